"""Which codec each cut of a plan gets, and what it saves and costs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from coordinator.assignment import Assignment
from coordinator.network import DeviceLink
from edgetrain.codec_spec import AUTO, CodecSpec, CutCodecs
from edgetrain.compiler.cut import Cut
from edgetrain.errors import PlanError
from edgetrain.manifest import CARRYING, Mode
from edgetrain.plan_config import PlanConfig
from edgetrain.planner.timeline_case import Network
from edgetrain.tensors import TensorSpec
from edgetrain.wire.codec import most_bytes


class CodecRate(NamedTuple):
    """Bytes of plain float32 a second."""

    encode_bytes_per_s: float
    decode_bytes_per_s: float


# A quarter or less of what one core of a server does (benchmarks/codecs.py), for boards.
RATES: Final = {
    "bf16": CodecRate(1.0e9, 1.5e9),
    "int8": CodecRate(0.45e9, 1.8e9),
    "int4": CodecRate(0.35e9, 0.8e9),
    "topk": CodecRate(0.15e9, 0.8e9),
    "topk8": CodecRate(0.12e9, 0.6e9),
    "sparse": CodecRate(0.6e9, 0.6e9),
}
LOSSY_AUTO: Final = CodecSpec("bf16")  # all that is chosen unasked


@dataclass(frozen=True, slots=True)
class CodecChooser:
    """Chooses for one run.

    Attributes:
        plan: what was asked.
        network: what a message takes beside its devices' links.
    """

    plan: PlanConfig
    network: Network

    def of(self, number: int, near: DeviceLink, far: DeviceLink) -> CutCodecs:
        """Of a cut between devices with these links."""
        asked = self.plan.codec_of(number)
        rate = min(near.bytes_per_s, far.bytes_per_s)
        byte_s = self.network.hop_s_per_byte + 1 / rate
        return CutCodecs(
            self._direction(asked.activations, byte_s),
            self._direction(asked.cotangents, byte_s),
        )

    def of_plan(
        self,
        devices: Sequence[str],
        links: Mapping[str, DeviceLink],
        modes: Sequence[Mode],
    ) -> tuple[CutCodecs, ...]:
        """Of all cuts of a plan; nothing is encoded that does not leave a device.

        Raises:
            PlanError: a codec that loses something is asked for where stages compare a
                loss with one that hardly differs.
        """
        pairs = itertools.pairwise(devices)
        codecs = tuple(
            CutCodecs() if near == far else self.of(number, links[near], links[far])
            for number, (near, far) in enumerate(pairs)
        )
        carrying = next((mode.value for mode in modes if mode in CARRYING), None)
        if carrying is None:
            return codecs
        return tuple(self._exact(number, c, carrying) for number, c in enumerate(codecs))

    def _exact(self, number: int, codecs: CutCodecs, mode: str) -> CutCodecs:
        asked = self.plan.codec_of(number)
        for codec, word in (
            (codecs.activations, asked.activations),
            (codecs.cotangents, asked.cotangents),
        ):
            if not codec.lossless and word != AUTO:
                raise PlanError(
                    f"[plan] codec = {word!r} does not go with {mode!r} stages: they learn"
                    " from small differences of the loss, which its errors would cover."
                    " Use 'raw', 'sparse' or 'auto', or another [train] gradient"
                )
        lossless = [
            codec if codec.lossless else CodecSpec()
            for codec in (codecs.activations, codecs.cotangents)
        ]
        return CutCodecs(*lossless)

    def _direction(self, asked: str, byte_s: float) -> CodecSpec:
        """``auto`` is bf16 where half the bytes take longer than the encoding."""
        if asked != AUTO:
            return CodecSpec.parse(asked)
        rate = RATES[LOSSY_AUTO.name]
        cost_s = 1 / rate.encode_bytes_per_s + 1 / rate.decode_bytes_per_s
        return LOSSY_AUTO if byte_s / 2 > cost_s else CodecSpec()


def encoded_bytes(codec: CodecSpec, tensors: Iterable[TensorSpec]) -> int:
    """What a microbatch takes; the most, where that hangs on the values."""
    return sum(most_bytes(codec, tensor) for tensor in tensors)


def encode_s(codec: CodecSpec, nbytes: float) -> float:
    """To encode so many plain bytes."""
    return nbytes / RATES[codec.name].encode_bytes_per_s if codec.name in RATES else 0.0


def decode_s(codec: CodecSpec, nbytes: float) -> float:
    """To decode them."""
    return nbytes / RATES[codec.name].decode_bytes_per_s if codec.name in RATES else 0.0


def codecs_at(assignment: Assignment, number: int) -> CutCodecs:
    """Of one cut."""
    return assignment.codecs[number] if assignment.codecs else CutCodecs()


def residual_bytes(codecs: Sequence[CutCodecs], cuts: Sequence[Cut], stage: int) -> int:
    """What a stage's codecs keep from one microbatch to the next."""
    return cuts[stage - 1].nbytes if stage and codecs[stage - 1].feedback else 0
