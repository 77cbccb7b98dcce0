"""Cases for the timeline's tests: balanced pipelines, and random ones."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from edgetrain.planner.timeline_case import Case, Network, TimedDevice, TimedStage


def balanced(
    stages, microbatches, schedule="1f1b", *, times=(1.0, 2.0), link=(0.0, math.inf), **more
):
    """Equal stages, each on a device of its own: d0, d1, ...

    `times`: seconds forward and backward. `link`: bytes of each message, bytes/s.
    """
    nbytes, rate = link
    names = [f"d{index}" for index in range(stages)]
    return Case(
        stages=tuple(
            TimedStage(name, *times, output_bytes=nbytes, cotangent_bytes=nbytes)
            for name in names
        ),
        devices=tuple(TimedDevice(name, rate, rate) for name in names),
        schedule=schedule,
        microbatches=microbatches,
        **more,
    )


def random_case(seed, *, schedule="1f1b", own_devices=True, latency=True):
    """Unlike stages, devices and links, from a seed."""
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 6))
    names = [f"d{index}" for index in range(count)]
    hosts = names if own_devices or count < 3 else [*names[:-1], names[0]]
    stages = tuple(
        TimedStage(
            host,
            *random.uniform(0.1, 3.0, 3),
            output_bytes=random.uniform(0.0, 2e6),
            cotangent_bytes=random.uniform(0.0, 2e6),
            stash_bytes=random.uniform(0.0, 1e6),
            encode_s=random.uniform(0.0, 0.1),
            decode_s=random.uniform(0.0, 0.1),
        )
        for host in hosts
    )
    devices = tuple(
        TimedDevice(
            name,
            *random.uniform(2e5, 5e6, 2),
            latency_s=random.uniform(0.0, 0.2) if latency else 0.0,
        )
        for name in names
    )
    topology = ("peer", "broker")[int(random.integers(2))]
    broker = math.inf if random.random() < 0.5 else random.uniform(1e6, 5e6)
    return Case(
        stages,
        devices,
        schedule,
        int(random.integers(1, 9)),
        Network(topology, broker, hop_s=0.01, op_s=0.02),
        data_on=("coordinator", "first")[int(random.integers(2))],
        input_bytes=random.uniform(0.0, 2e6),
        label_bytes=100.0,
        coordinator=TimedDevice("coordinator", 5e6, 5e6, 0.01),
    )


def renamed(case, names):
    """The same case with other names of devices."""
    new = dict(zip([device.name for device in case.devices], names, strict=True))
    return dataclasses.replace(
        case,
        devices=tuple(dataclasses.replace(d, name=new[d.name]) for d in case.devices),
        stages=tuple(dataclasses.replace(s, device=new[s.device]) for s in case.stages),
    )


def faster_links(case, factor):
    """The same case with all links and the broker so many times as fast."""

    def faster(device):
        return dataclasses.replace(
            device,
            uplink_bytes_per_s=device.uplink_bytes_per_s * factor,
            downlink_bytes_per_s=device.downlink_bytes_per_s * factor,
        )

    network = case.network
    return dataclasses.replace(
        case,
        devices=tuple(faster(device) for device in case.devices),
        coordinator=faster(case.coordinator),
        network=dataclasses.replace(
            network, broker_bytes_per_s=network.broker_bytes_per_s * factor
        ),
    )
