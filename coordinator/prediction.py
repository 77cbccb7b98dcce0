"""What a plan should take, step by step, if devices and links are as known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.assignment import Assignment
from coordinator.cut_codecs import codecs_at, decode_s, encode_s, encoded_bytes
from coordinator.network import DeviceLink
from coordinator.stage_costs import StageTimes
from edgetrain.codec_spec import CutCodecs
from edgetrain.manifest import DECOUPLED
from edgetrain.planner.timeline import Timeline, play
from edgetrain.planner.timeline_case import Case, DataOn, Network, TimedDevice, TimedStage


@dataclass(frozen=True, slots=True)
class Surrounds:
    """What a run's plans are played out in.

    Attributes:
        network: between the devices.
        data_on: who has the samples.
        input_bytes, label_bytes: of one microbatch.
    """

    network: Network
    data_on: DataOn
    input_bytes: float
    label_bytes: float


@dataclass(frozen=True, slots=True)
class PredictedHop:
    """What crosses a cut.

    Attributes:
        down_bytes, up_bytes: of a microbatch, as it is encoded.
        seconds: of one microbatch, there and back, if nothing is in its way.
        codecs: that they are in.
        plain_down_bytes, plain_up_bytes: as they would be without.
    """

    down_bytes: int
    up_bytes: int
    seconds: float
    codecs: CutCodecs
    plain_down_bytes: int
    plain_up_bytes: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one plan; `times` of its stages, `hops` over its cuts."""

    times: tuple[StageTimes, ...]
    hops: tuple[PredictedHop, ...]
    timeline: Timeline

    @property
    def step_s(self) -> float:
        """From one step to the next."""
        return self.timeline.period_s


def predict(
    assignment: Assignment,
    times: Sequence[StageTimes],
    links: Sequence[DeviceLink],
    around: Surrounds,
) -> Prediction:
    """Play the plan out.

    Args:
        assignment: cuts, schedule and microbatches.
        times: of its stages.
        links: of the stages' devices.
        around: the rest.
    """
    hops = [_hop(assignment, n, links, around) for n in range(len(assignment.cuts))]
    stages = tuple(_stage(assignment, times, hops, number) for number in range(len(times)))
    devices = {
        name: TimedDevice(
            name,
            uplink_bytes_per_s=link.bytes_per_s,
            downlink_bytes_per_s=link.bytes_per_s,
            latency_s=link.latency_s,
        )
        for name, link in zip(assignment.devices, links, strict=True)
    }
    case = Case(
        stages,
        tuple(devices.values()),
        assignment.schedule,
        assignment.microbatches,
        around.network,
        around.data_on,
        around.input_bytes,
        around.label_bytes,
    )
    return Prediction(tuple(times), tuple(hops), play(case))


def _stage(
    assignment: Assignment,
    times: Sequence[StageTimes],
    hops: Sequence[PredictedHop],
    number: int,
) -> TimedStage:
    """The last stage's one graph goes forward and backward when its backward is due."""
    mine = times[number]
    last = number == len(times) - 1
    encode_s, decode_s = _packing_s(hops, number)
    return TimedStage(
        assignment.devices[number],
        forward_s=0.0 if last else mine.forward_s,
        backward_s=mine.compute_s if last else mine.backward_s,
        update_s=mine.update_s,
        output_bytes=0 if last else hops[number].down_bytes,
        cotangent_bytes=hops[number - 1].up_bytes if number else 0,
        memory_bytes=assignment.memory_bytes[number],
        encode_s=encode_s,
        decode_s=decode_s,
    )


def _packing_s(hops: Sequence[PredictedHop], number: int) -> tuple[float, float]:
    """Seconds a message, on average of those that a stage sends, and that it receives."""
    packed, unpacked = [], []
    for hop in hops[number : number + 1]:
        packed.append(encode_s(hop.codecs.activations, hop.plain_down_bytes))
        unpacked.append(decode_s(hop.codecs.cotangents, hop.plain_up_bytes))
    for hop in hops[max(number - 1, 0) : number]:
        packed.append(encode_s(hop.codecs.cotangents, hop.plain_up_bytes))
        unpacked.append(decode_s(hop.codecs.activations, hop.plain_down_bytes))
    count = max(len(packed), 1)
    return sum(packed) / count, sum(unpacked) / count


def _hop(
    assignment: Assignment, number: int, links: Sequence[DeviceLink], around: Surrounds
) -> PredictedHop:
    crossing, codecs = assignment.cuts[number].crossing, codecs_at(assignment, number)
    gradients = assignment.gradients
    returns = gradients.modes[number] not in DECOUPLED and gradients.returns[number + 1]
    down_bytes = encoded_bytes(codecs.activations, crossing)
    up_bytes = encoded_bytes(codecs.cotangents, crossing) if returns else 0
    plain_bytes = assignment.cuts[number].nbytes
    plain_up_bytes = plain_bytes if returns else 0
    near, far = links[number], links[number + 1]
    rate = min(near.bytes_per_s, far.bytes_per_s)
    network = around.network
    way_s = network.hop_s + near.latency_s + far.latency_s
    seconds = (1 + returns) * way_s
    seconds += (down_bytes + up_bytes) * (network.hop_s_per_byte + 1 / rate)
    return PredictedHop(down_bytes, up_bytes, seconds, codecs, plain_bytes, plain_up_bytes)
