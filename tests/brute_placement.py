"""Every placement of a small problem, priced from the definitions alone.

Written without the planner's own cost model or search, so that each can be held to it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np

from edgetrain.planner.problem import Device, Layer, Problem


def stash_peak(problem, to_end):
    if problem.objective == "inference":
        return 0
    return {
        "gpipe": problem.microbatches,
        "1f1b": min(problem.microbatches, to_end),
        "1f1b-eager": min(problem.microbatches, 2 * to_end - 1),
    }[problem.schedule]


def crossing(problem, cut):
    """Bytes down and up over the cut before a layer."""
    layer = problem.layers[cut - 1]
    if problem.objective == "inference":
        return layer.output_bytes, 0
    back = layer.cotangent_bytes
    return layer.output_bytes, layer.output_bytes if back is None else back


def memory(problem, begin, end, peak, option):
    mine = problem.layers[begin:end]
    fixed = sum(layer.memory_bytes for layer in mine)
    stash = sum(layer.stash_bytes for layer in mine)
    if option == "plain":
        return fixed + peak * stash
    received = problem.layers[begin - 1].output_bytes if begin else problem.input_bytes
    return fixed + stash + peak * received


def compute_s(problem, stages, device):
    """Of one microbatch, with the fastest options that fit; None where none do."""
    times = []
    mine = [
        (begin, end, len(stages) - index)
        for index, (other, begin, end) in enumerate(stages)
        if other is device
    ]
    for options in itertools.product(problem.options, repeat=len(mine)):
        need = time = 0.0
        for (begin, end, to_end), option in zip(mine, options, strict=True):
            need += memory(problem, begin, end, stash_peak(problem, to_end), option)
            time += sum(device.forward_s[begin:end])
            if problem.objective == "training":
                time += sum(device.backward_s[begin:end])
                time += sum(device.forward_s[begin:end]) * (option == "recompute")
        if need <= device.memory_bytes:
            times.append(time)
    return min(times) if times and math.isfinite(min(times)) else None


def hops(problem, stages):
    """(bytes, sender, receiver) of every message of one microbatch."""
    for (a, _, cut), (b, _, _) in itertools.pairwise(stages):
        forth, back = crossing(problem, cut)
        yield forth, a, b
        if problem.objective == "training":
            yield back, b, a


def price(problem, stages):
    """(bottleneck, fill) of [(device, begin, end), ...]; None where the memory is short."""
    devices = {device.name: device for device, _, _ in stages}
    compute = [compute_s(problem, stages, device) for device in devices.values()]
    if None in compute:
        return None
    fill = sum(compute)
    star = problem.topology == "broker"
    up, down, sent = (dict.fromkeys(devices, 0) for _ in range(3))
    for size, sender, receiver in hops(problem, stages):
        up[sender.name] += size
        down[receiver.name] += size
        sent[sender.name] += 1
        fill += size / sender.link_bytes_per_s + sender.latency_s + problem.hop_overhead_s
        if star:
            fill += size / receiver.link_bytes_per_s + receiver.latency_s
    loads = list(compute)
    for name, device in devices.items():
        held = max(up[name], down[name]) if star else up[name]
        overhead = sent[name] * problem.hop_overhead_s
        loads.append(held / device.link_bytes_per_s + overhead)
    if star:
        loads.append(sum(up.values()) / problem.broker_bytes_per_s)
    return max(loads), fill


def placements(problem):
    """Every [(device, begin, end), ...] that keeps the pins and the number of stages."""
    first, last = problem.pin_first, problem.pin_last
    layers, devices = len(problem.layers), problem.devices
    both = first is not None and first == last
    orders = []
    for count in range(1, len(devices) + 1):
        for order in itertools.permutations(devices, count):
            if first in (None, order[0].name) and (both or last in (None, order[-1].name)):
                orders.append(order)
                if both and count > 1:
                    orders.append((*order, order[0]))
    if both:
        orders = [order for order in orders if order[-1].name == first]
    for order in orders:
        if len(order) > layers or problem.stages not in (None, len(order)):
            continue
        for inner in itertools.combinations(range(1, layers), len(order) - 1):
            edges = (0, *inner, layers)
            yield [(device, edges[i], edges[i + 1]) for i, device in enumerate(order)]


def best(problem):
    """(time, fill) of the best placement, or None where nothing fits.

    Inference: the least bottleneck, then the least fill. Training: the shortest step.
    """
    found = [cost for cost in (price(problem, p) for p in placements(problem)) if cost]
    if not found:
        return None
    if problem.objective == "inference":
        bottleneck = min(found)[0]
        near = [fill for load, fill in found if load <= bottleneck * (1 + 1e-11)]
        return bottleneck, min(near)
    rest = problem.microbatches - 1
    return min((fill + rest * load, fill) for load, fill in found)


def random_problem(seed, *, max_layers=9, max_devices=5):
    """A small problem: unlike or partly equal devices, tight or roomy, any objective."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, max_devices + 1))
    # Placements grow with both: few have the most layers and the most devices.
    depth = int(rng.integers(1, max_layers + 1))
    if count == max_devices and rng.integers(4):
        depth = min(depth, 7)
    devices = random_devices(rng, count, depth)
    broker = bool(rng.integers(2))
    pins, stages = random_ends(rng, count, depth)
    return Problem(
        random_layers(rng, depth),
        devices,
        objective="training" if rng.integers(2) else "inference",
        topology="broker" if broker else "peer",
        broker_bytes_per_s=math.inf
        if not broker or rng.integers(2)
        else float(rng.uniform(100.0, 3000.0)),
        microbatches=int(rng.choice([1, 2, 4, 8, 32])),
        schedule=str(rng.choice(["gpipe", "1f1b", "1f1b-eager"])),
        pin_first=pins[0],
        pin_last=pins[1],
        stages=stages,
        options=("plain", "recompute") if rng.integers(2) else ("plain",),
        hop_overhead_s=float(rng.choice([0.0, 0.3])),
        input_bytes=int(rng.integers(0, 300)),
    )


def random_layers(rng, depth):
    return tuple(
        Layer(
            f"l{i}",
            memory_bytes=int(rng.integers(1, 100)),
            output_bytes=int(rng.integers(1, 1000)),
            stash_bytes=int(rng.integers(0, 40)),
            cotangent_bytes=[None, int(rng.integers(0, 500))][int(rng.integers(4) == 0)],
        )
        for i in range(depth)
    )


def random_devices(rng, count, depth):
    link_scale = float(rng.choice([40.0, 400.0, math.inf]))
    roomy = float(rng.choice([1.0, 3.0, 100.0]))
    base = [(rng.uniform(0.1, 2.0, depth), rng.uniform(0.1, 4.0, depth)) for _ in "ab"]
    devices = []
    while len(devices) < count:
        name = f"d{len(devices)}"
        if devices and rng.integers(3) == 0:
            twin = devices[int(rng.integers(len(devices)))]
            devices.append(replace(twin, name=name))
            continue
        times = base[int(rng.integers(2))]
        speed = rng.uniform(0.2, 3.0)
        forward, backward = (tuple(float(t) for t in one / speed) for one in times)
        if rng.integers(8) == 0:
            cannot = int(rng.integers(depth))
            forward = (*forward[:cannot], math.inf, *forward[cannot + 1 :])
        devices.append(
            Device(
                name,
                forward,
                backward,
                memory_bytes=int(rng.integers(80, 500) * roomy),
                link_bytes_per_s=link_scale * float(rng.uniform(0.3, 3.0)),
                latency_s=float(rng.choice([0.0, 0.2])),
            )
        )
    return tuple(devices)


def random_ends(rng, count, depth):
    """Pins of the first and the last stage, and how many stages to make."""
    pins = [None, None]
    if rng.integers(2):
        drawn = rng.integers(-1, count, 2)
        pins = [f"d{n}" if n >= 0 else None for n in drawn]
    both = pins[0] is not None and pins[0] == pins[1]
    if None not in pins and not both and depth < 2:
        pins[1] = None
    allowed = [n for n in range(1, min(count + both, depth) + 1) if not (both and n == 2)]
    if None not in pins and not both:
        allowed = [n for n in allowed if n > 1]
    return pins, int(rng.choice(allowed)) if rng.integers(4) == 0 else None
