"""How gradients are estimated where they are not computed exactly."""

from __future__ import annotations

from typing import Final

import msgspec

from edgetrain.settings import choose, require

ACTIVATIONS: Final = "activations"
WEIGHTS: Final = "weights"
JVP: Final = "jvp"
FORWARD: Final = "forward"
NOISES: Final = (ACTIVATIONS, WEIGHTS)
FORMS: Final = (JVP, FORWARD)
MAX_TANGENTS: Final = 1024
MOST_ADAPTED: Final = 16
MAX_MOVE_LSB: Final = 63  # half of the way to either end of a grid


class EstimatorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The run file's ``[estimator]``; the same on every stage that estimates.

    Attributes:
        tangents: random directions a microbatch.
        adaptive: stages in ``hybrid`` or ``local`` begin with `tangents` and take more of
            them where their estimates are noise, fewer where they are mostly signal.
        noise: what is perturbed: ``"activations"``, the outputs of linear layers, whose
            estimate has far less variance; or ``"weights"``.
        form: ``"jvp"`` pushes tangents through a forward-mode graph; ``"forward"`` takes
            differences of plain forwards, for engines that run nothing else.
        control_variate: subtract a learned guess before multiplying by noise.
        upstream: return an estimated cotangent to the stage before.
        gate: compare such a stage with its deployed weights on held-out samples, and go
            back to those where it is worse.
        sides: of a difference of forwards that noise is carried through to the loss by
            (``forward_gradient``, ``spsa``): 2, moved along the noise and against it, is
            unbiased up to the square of the step; 1 takes half the forwards.
        quantised: with ``noise = "weights"``, a hybrid stage computes on integers of 8
            bits, in training and when it is evaluated, as an engine would that has nothing
            else; what is trained, and written to the file, are floats all the same. Grids
            come from the file's weights and from training samples of the coordinator.
        move_lsb: by how many steps of its grid noise moves a quantised weight.
    """

    tangents: int = 4
    adaptive: bool = False
    noise: str = ACTIVATIONS
    form: str = JVP
    control_variate: bool = True
    upstream: bool = True
    gate: bool = True
    sides: int = 2
    quantised: bool = False
    move_lsb: int = 1

    def __post_init__(self) -> None:
        choose("[estimator] noise", self.noise, NOISES)
        choose("[estimator] form", self.form, FORMS)
        require(self.sides in (1, 2), f"[estimator] sides = {self.sides}: must be 1 or 2")
        require(
            1 <= self.tangents <= MAX_TANGENTS,
            f"[estimator] tangents = {self.tangents}: must be in 1 ... {MAX_TANGENTS}",
        )
        require(
            self.noise == WEIGHTS or not self.quantised,
            "[estimator] quantised = true: integers hold no small noise in activations;"
            " write noise = 'weights', which moves weights from step to step",
        )
        require(
            1 <= self.move_lsb <= MAX_MOVE_LSB,
            f"[estimator] move_lsb = {self.move_lsb}: must be in 1 ... {MAX_MOVE_LSB}",
        )

    @property
    def most_tangents(self) -> int:
        """As many as a microbatch may come to have."""
        return max(self.tangents, MOST_ADAPTED) if self.adaptive else self.tangents


DEFAULT: Final = EstimatorSpec()
