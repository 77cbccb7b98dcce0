"""A stage's weights as they were deployed, to compare with and to fall back on."""

from __future__ import annotations

from typing import Final

from edgetrain.errors import RunError
from edgetrain.manifest import Manifest, Mode
from edgetrain.runtime.parameters import Parameters, Vector

TRY: Final = "try"
UNDO: Final = "undo"
KEEP: Final = "keep"
_PIECE: Final = 1 << 16  # elements


def gated(manifest: Manifest) -> bool:
    """Whether a stage keeps its deployed weights: where gradients are not backprop's."""
    exact = manifest.mode in (Mode.VJP, Mode.FROZEN)
    return manifest.estimator.gate and not exact and manifest.trainable_elements > 0


class Fallback:
    """The trainable weights of one stage as they were deployed.

    Attributes:
        final: the deployed weights are back for good, and do not train any more.
    """

    def __init__(self, parameters: Parameters) -> None:
        self.final = False
        self._parameters = parameters
        self._other: Vector | None = parameters.trainable.copy()
        self._tried = False

    @property
    def nbytes(self) -> int:
        return 0 if self._other is None else self._other.nbytes

    def obey(self, action: str) -> None:
        """Put the deployed weights in place of the trained ones, or those back.

        Args:
            action: `TRY`, then `UNDO` or `KEEP`; the same one twice counts once.

        Raises:
            RunError: there is no such action.
        """
        if action not in (TRY, UNDO, KEEP):
            raise RunError(f"{action!r} is nothing to do with a stage's weights")
        if self.final:
            return
        if self._tried == (action == UNDO):
            self._swap()
        self._tried = action == TRY
        if action == KEEP:
            self.final, self._other = True, None

    def _swap(self) -> None:
        """Exchange the two in place, for every graph that holds the weights' memory."""
        if self._other is None:
            return
        weights = self._parameters.trainable
        for start in range(0, weights.size, _PIECE):
            piece = slice(start, start + _PIECE)
            trained = weights[piece].copy()
            weights[piece] = self._other[piece]
            self._other[piece] = trained
