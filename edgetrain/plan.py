"""The plan: where the model is cut, who runs what, what it should cost, and why.

The coordinator writes it to the run folder before the first step, so that a report can
set what was predicted beside what was measured.
"""

from __future__ import annotations

import msgspec

from edgetrain.codec_spec import RAW
from edgetrain.errors import PlanError


class StagePlan(msgspec.Struct, frozen=True):
    """One stage.

    Attributes:
        cut: names of the tensors that leave the stage; empty for the last one.
        mode: how it obtains its gradients.
        reason: why this device and this mode, one sentence.
        layers: how many pieces between neighbouring valid cuts it holds.
        parameters: elements of its weights.
        predicted_forward_s, predicted_backward_s: of one microbatch, on its device.
        predicted_update_s: of a step's update.
        stash: what its forward keeps for its backward.
        predicted_memory_bytes: while it trains.
        predicted_activation_bytes: likewise, of activations alone.
    """

    stage: int
    device: str
    cut: tuple[str, ...]
    mode: str
    reason: str
    layers: int
    parameters: int
    predicted_forward_s: float
    predicted_backward_s: float
    predicted_memory_bytes: int
    predicted_activation_bytes: int = 0
    predicted_update_s: float = 0.0
    stash: str = ""


class HopPlan(msgspec.Struct, frozen=True):
    """The way between two neighbouring stages.

    Attributes:
        down_bytes, up_bytes: of a microbatch's activations, and of the cotangents that
            come back, as they are encoded; the most, where that hangs on the values.
        predicted_s: of one microbatch's tensors, there and back together.
        down_codec, up_codec: what they are encoded in.
    """

    down_bytes: int
    up_bytes: int
    predicted_s: float
    down_codec: str = RAW
    up_codec: str = RAW

    @property
    def codecs(self) -> str:
        """For people; empty where all is plain."""
        if self.down_codec == self.up_codec:
            return "" if self.down_codec == RAW else self.down_codec
        return f"{self.down_codec}, back {self.up_codec}"


class Plan(msgspec.Struct, frozen=True):
    """A whole pipeline.

    Attributes:
        model_sha256: of the model file that was planned for.
        schedule: its name.
        microbatches: how many a step has.
        microbatch: samples in each.
        predicted_step_s: from one step to the next, as steps overlap.
        reason: why so many stages and this schedule, one sentence.
        remarks: what the user should know of the model, one sentence each.
        hops: between neighbouring stages, one fewer than those.
        left_out: devices that got no stage, and why.
        gap: by which part of its time another plan might beat this one, by the cost model;
            0: none does.
    """

    model_sha256: str
    schedule: str
    microbatches: int
    microbatch: int
    stages: tuple[StagePlan, ...]
    predicted_step_s: float
    reason: str
    remarks: tuple[str, ...] = ()
    hops: tuple[HopPlan, ...] = ()
    left_out: dict[str, str] = {}
    gap: float = 0.0

    def encode(self) -> bytes:
        """As indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)

    @classmethod
    def decode(cls, data: bytes) -> Plan:
        """Parse a plan.

        Raises:
            PlanError: not JSON, a field is missing or of the wrong type, or the stages are
                not numbered 0, 1, 2 and so on.
        """
        try:
            plan = msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise PlanError(f"not a plan: {error}") from error
        numbers = [stage.stage for stage in plan.stages]
        if not numbers or numbers != list(range(len(numbers))):
            raise PlanError(f"not a plan: its stages are numbered {numbers}, not from 0 up")
        return plan
