"""Control messages between the coordinator and the devices, as msgpack.

Tensors, bundles and weights travel as frames; these say what to do with them. Every
message of a run names the run and the plan's epoch, so that leftovers are recognised.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from edgetrain.codec_spec import CutCodecs
from edgetrain.errors import WireError
from edgetrain.optimizer_spec import OptimizerSpec
from edgetrain.sample_check import LabelSpec
from edgetrain.wire.hello import Hello

MAX_MESSAGE_BYTES: Final = 1 << 20


class Route(msgspec.Struct, frozen=True):
    """The device of every stage, in order; `heads`: stages that take labels in training."""

    devices: tuple[str, ...]
    heads: tuple[int, ...] = ()

    def to(self, stage: int) -> str:
        return self.devices[stage]


class LocalData(msgspec.Struct, frozen=True):
    """A device's own data set, in the order every party can derive.

    Attributes:
        dataset: the agent's name for it.
        batch_size: samples a step.
        shuffle: a new order each epoch, from the run's seed.
        labels: what its labels must look like.
    """

    dataset: str
    batch_size: int
    shuffle: bool
    labels: LabelSpec


class Deploy(msgspec.Struct, frozen=True, tag="deploy"):
    """Take over a stage; its bundle follows, or came before, as frames.

    Attributes:
        run: a random number that names the run.
        epoch: of the plan.
        bundle_sha256: of the encoded bundle, `bundle_bytes` long.
        microbatches: a step.
        local: where stage 0 reads its samples; None: the coordinator sends them.
        chunk_bytes: largest body of a frame.
        codecs: of each cut; empty: all plain.
        target_step_s: what a step should take, where a codec is ``adaptive``.
    """

    run: int
    epoch: int
    stage: int
    route: Route
    bundle_sha256: str
    bundle_bytes: int
    schedule: str
    microbatches: int
    optimizer: OptimizerSpec
    seed: int
    chunk_bytes: int
    local: LocalData | None = None
    codecs: tuple[CutCodecs, ...] = ()
    target_step_s: float = 0.0


class Train(msgspec.Struct, frozen=True, tag="train"):
    """Leave to train up to and including `last_step`."""

    run: int
    epoch: int
    last_step: int


class Evaluate(msgspec.Struct, frozen=True, tag="evaluate"):
    """Run microbatches forward only, with the weights as they are.

    Attributes:
        block: number of this request; frames carry it as their step.
        first: index of the first microbatch within the evaluation data.
        microbatches: how many.
        samples: how many rows count; the rest of the last microbatch is padding.
        each: the score of every sample is wanted too.
    """

    run: int
    epoch: int
    block: int
    first: int
    microbatches: int
    samples: int
    each: bool = False


class Revert(msgspec.Struct, frozen=True, tag="revert"):
    """Do something with the stage's weights as they were deployed, between two steps.

    Attributes:
        action: ``"try"`` puts them in place, ``"undo"`` the trained ones back; after
            ``"keep"`` they stay for good.
    """

    run: int
    epoch: int
    stage: int
    action: str


class NormTotal(msgspec.Struct, frozen=True, tag="norm_total"):
    """Square sum of the whole model's gradient, for clipping."""

    run: int
    epoch: int
    step: int
    square_sum: float


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Send the weights as they were after `step`; -1: as deployed.

    With `state`, all that the next step needs; only the last step's is kept.
    """

    run: int
    epoch: int
    step: int
    state: bool = False


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Forget the run."""

    run: int
    epoch: int
    reason: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The stage is loaded and warmed up; times are of one microbatch, bytes predicted."""

    run: int
    epoch: int
    stage: int
    forward_s: float
    backward_s: float
    memory_bytes: int
    activation_bytes: int = 0


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The device does not take the stage; `needed_bytes` if that is more than it lends."""

    run: int
    epoch: int
    stage: int
    reason: str
    needed_bytes: int = 0


class StepDone(msgspec.Struct, frozen=True, tag="step_done"):
    """The stage has updated its weights.

    Attributes:
        loss_sum, samples: at the last stage, over the step; 0 elsewhere.
        seconds: since the stage's previous update.
        compute_s: of these, in the engine and the optimizer.
        sent_bytes: frames of tensors since the previous update, headers included.
        stash_peak_bytes: most that was stashed at once.
        memory_peak_bytes: most that weights, commits, gradient, optimizer state and stash
            took at once.
        signal_to_noise: of the estimated gradients, running; 0: there are none.
        activation_peak_bytes: likewise of activations and of what the running graph needs.
        away_s, turnaround_s: see `HopTimes`.
    """

    run: int
    epoch: int
    stage: int
    step: int
    loss_sum: float
    samples: int
    seconds: float
    compute_s: float
    sent_bytes: int
    stash_peak_bytes: int
    memory_peak_bytes: int = 0
    signal_to_noise: float = 0.0
    activation_peak_bytes: int = 0
    away_s: float = 0.0
    turnaround_s: float = 0.0


class Evaluated(msgspec.Struct, frozen=True, tag="evaluated"):
    """Result of one Evaluate.

    Attributes:
        loss_sum: over the samples.
        correct: sum over the samples of the share of labels that the largest output hits;
            -1 where the loss has no classes.
        scores: of each sample, float32, if asked for: the share of labels hit, or the
            negative loss where it has no classes.
    """

    run: int
    epoch: int
    block: int
    loss_sum: float
    correct: float
    samples: int
    scores: bytes = b""


class GradientNorm(msgspec.Struct, frozen=True, tag="gradient_norm"):
    """Square sum of one stage's gradient."""

    run: int
    epoch: int
    stage: int
    step: int
    square_sum: float


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The stage cannot go on; `diverged` when its loss is not finite at `step`."""

    run: int
    epoch: int
    stage: int
    step: int
    reason: str
    diverged: bool


_T = TypeVar("_T")

Command = Deploy | Train | Evaluate | Revert | NormTotal | Fetch | Release
Report = Ready | Refused | StepDone | Evaluated | GradientNorm | Failed

_ENCODER: Final = msgspec.msgpack.Encoder()
_COMMANDS: Final[msgspec.msgpack.Decoder[Command]] = msgspec.msgpack.Decoder(Command)
_REPORTS: Final[msgspec.msgpack.Decoder[Report]] = msgspec.msgpack.Decoder(Report)
_HELLO: Final[msgspec.msgpack.Decoder[Hello]] = msgspec.msgpack.Decoder(Hello)


def encode(message: Command | Report | Hello) -> bytes:
    return _ENCODER.encode(message)


def decode_command(data: bytes) -> Command:
    """Parse what a device receives.

    Raises:
        WireError: it is no command.
    """
    return _decode(_COMMANDS, data)


def decode_report(data: bytes) -> Report:
    """Parse what the coordinator receives.

    Raises:
        WireError: it is no report.
    """
    return _decode(_REPORTS, data)


def decode_hello(data: bytes) -> Hello:
    """Parse a presence.

    Raises:
        WireError: it is no hello.
    """
    return _decode(_HELLO, data)


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"control message of {len(data)} B, over {MAX_MESSAGE_BYTES} B")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        raise WireError(f"not a control message: {error}") from error
