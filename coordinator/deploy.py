"""Hands the stages of a plan to their devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.fleet import Event, Fleet, Gone, Said, Undelivered
from edgetrain.bundle import Bundle, sha256
from edgetrain.codec_spec import CutCodecs
from edgetrain.errors import DeviceError, FleetError, OverfullDeviceError, TransportError
from edgetrain.manifest import Manifest
from edgetrain.optimizer_spec import OptimizerSpec
from edgetrain.runtime.outbox import Outbox
from edgetrain.transport.packet_limit import FRAME_OVERHEAD_BYTES
from edgetrain.wire.frame import DEFAULT_CHUNK_BYTES, HEADER_BYTES, Address, Kind
from edgetrain.wire.messages import Deploy, LocalData, Ready, Refused, Route

LEAST_CHUNK_BYTES: Final = 16 * 1024  # commands and presences may be as long


@dataclass(frozen=True, slots=True)
class Deployment:
    """What all stages of a plan have in common.

    Attributes:
        run, epoch: name the plan.
        devices: in pipeline order.
        timeout_s: for a device to load its stage and report.
        codecs: of the cuts.
        target_step_s: for those that are adaptive.
        chunk_bytes: largest body of a frame.
    """

    run: int
    epoch: int
    devices: tuple[str, ...]
    schedule: str
    microbatches: int
    optimizer: OptimizerSpec
    seed: int
    local: LocalData | None
    timeout_s: float
    codecs: tuple[CutCodecs, ...] = ()
    target_step_s: float = 0.0
    chunk_bytes: int = DEFAULT_CHUNK_BYTES


def deploy(
    fleet: Fleet, outbox: Outbox, bundles: Sequence[Bundle], deployment: Deployment
) -> list[Ready]:
    """Send every stage to its device and wait until all are ready.

    Returns:
        What each device measured, in pipeline order.

    Raises:
        DeviceError: one refused, or went away.
        FleetError: one did not report in time.
    """
    d = deployment
    route = Route(d.devices, heads_of([bundle.manifest for bundle in bundles]))
    for stage, (device, bundle) in enumerate(zip(d.devices, bundles, strict=True)):
        data = bundle.encode()
        command = Deploy(
            run=d.run,
            epoch=d.epoch,
            stage=stage,
            route=route,
            bundle_sha256=sha256(data),
            bundle_bytes=len(data),
            schedule=d.schedule,
            microbatches=d.microbatches,
            optimizer=d.optimizer,
            seed=d.seed,
            chunk_bytes=d.chunk_bytes,
            local=d.local,
            codecs=d.codecs,
            target_step_s=d.target_step_s,
        )
        fleet.command(device, command)
        address = Address(Kind.BUNDLE, d.run, d.epoch, stage)
        outbox.put(device, address, data, chunk_bytes=d.chunk_bytes)
    ready: dict[int, Ready] = {}
    while len(ready) < len(d.devices):
        event = fleet.event(d.timeout_s)
        if event is None:
            late = [n for stage, n in enumerate(d.devices) if stage not in ready]
            raise FleetError(
                f"{', '.join(late)} did not load the stage within {d.timeout_s:g} s: see"
                " the agent's log, or raise [fleet] step_timeout_s"
            )
        _note(event, d, ready)
    return [ready[stage] for stage in range(len(d.devices))]


def chunk_bytes_of(payload_limit_bytes: int, max_packet_bytes: int | None) -> int:
    """The largest body of a frame, under what the broker and the user say.

    Raises:
        TransportError: the broker takes next to nothing.
    """
    limit_bytes = payload_limit_bytes - HEADER_BYTES
    if max_packet_bytes is not None:
        limit_bytes = min(limit_bytes, max_packet_bytes - FRAME_OVERHEAD_BYTES)
    if limit_bytes < LEAST_CHUNK_BYTES:
        raise TransportError(
            f"the broker takes packets of about {payload_limit_bytes} B, at least"
            f" {LEAST_CHUNK_BYTES + FRAME_OVERHEAD_BYTES} B are needed: raise"
            " max_packet_size or message_size_limit (mosquitto), max_payload_size (iotcore)"
        )
    return min(DEFAULT_CHUNK_BYTES, limit_bytes)


def heads_of(manifests: Sequence[Manifest]) -> tuple[int, ...]:
    """The stages before the last that take labels."""
    return tuple(m.stage for m in manifests[:-1] if m.labels is not None)


def _refusal(device: str, refused: Refused) -> DeviceError:
    reason = f"refuses stage {refused.stage}: {refused.reason}"
    if not refused.needed_bytes:
        return DeviceError(device, reason)
    return OverfullDeviceError(device, reason, refused.stage, refused.needed_bytes)


def _note(event: Event, deployment: Deployment, ready: dict[int, Ready]) -> None:
    match event:
        case Gone(device) if device in deployment.devices:
            raise DeviceError(device, "its connection ended while it loaded its stage")
        case Undelivered(device, run, epoch, reason):
            if (run, epoch) == (deployment.run, deployment.epoch):
                raise DeviceError(device, reason)
        case Said(device, Refused() as refused) if refused.run == deployment.run:
            raise _refusal(device, refused)
        case Said(_, Ready() as report):
            if (report.run, report.epoch) == (deployment.run, deployment.epoch):
                ready[report.stage] = report
        case _:
            pass
