"""What crosses a stage's cuts where noise is carried on to the loss.

Each random direction makes a ray: a tangent of every activation that crosses, or two
variants of it, moved along the noise and against it. Rays travel beside the activations,
all those of one activation in one tensor [rays, *shape]. What comes back are slopes: how
much the loss rises along each direction.

Source: for noise that is pushed through the whole model and a scalar that comes back,
Baydin et al., Gradients without backpropagation (arXiv:2202.08587); per sample, Ren et al.
(arXiv:2210.03310). Ours: across the stages of a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from edgetrain.tensors import TensorSpec

TANGENT: Final = "tangent/"
VARIANT: Final = "variant/"
# Per direction and sample; without samples where weights are perturbed.
SLOPES: Final = "slopes"
# For control variates: the loss's cotangent, and the tangents it was multiplied with.
ERROR: Final = "error"
TANGENTS: Final = "tangents"


class Rays(msgspec.Struct, frozen=True):
    """Of one stage; all empty where none pass it.

    Attributes:
        received: beside the activations it receives.
        made: beside those it sends; at the last stage, of the value the loss applies to,
            where they are kept until the labels are there.
        slopes_in: what comes back from downstream.
        slopes_out: what it sends back upstream.
    """

    received: tuple[TensorSpec, ...] = ()
    made: tuple[TensorSpec, ...] = ()
    slopes_in: tuple[TensorSpec, ...] = ()
    slopes_out: tuple[TensorSpec, ...] = ()


def origin(ray: TensorSpec) -> str:
    """The name of the value it is a ray of."""
    return ray.name.removeprefix(TANGENT).removeprefix(VARIANT)


def rows_of(rays: Rays, units: Iterable[tuple[int, ...]], samples: int) -> int:
    """How many slopes of a direction a stage can tell apart: those of samples, or one.

    Args:
        rays: of the stage.
        units: shapes of what it perturbs.
        samples: of a microbatch.
    """
    crossing = [ray.shape[1:] for ray in (*rays.received, *rays.made)]
    arriving = [spec.shape[1:] for spec in rays.slopes_in if spec.name == SLOPES]
    return independent(samples, *units, *crossing, *arriving)


def independent(samples: int, *shapes: tuple[int, ...]) -> int:
    """How many groups of rows have nothing to do with each other.

    Those of a microbatch's samples, if all tensors begin with them; else there is one.
    """
    return samples if all(shape[:1] == (samples,) for shape in shapes) else 1
