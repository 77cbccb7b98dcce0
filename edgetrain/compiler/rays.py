"""Which rays cross a stage's cuts, and which modes can carry them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from edgetrain.compiler.part import Part
from edgetrain.errors import PlanError
from edgetrain.estimator_spec import FORWARD, JVP, WEIGHTS, EstimatorSpec
from edgetrain.manifest import CARRYING, Mode
from edgetrain.rays import (
    ERROR,
    SLOPES,
    TANGENT,
    TANGENTS,
    VARIANT,
    Rays,
    independent,
    rows_of,
)
from edgetrain.segment import Unit
from edgetrain.tensors import TensorSpec

# Elements a sample of what the loss applies to. With more, no layer of a usual width can
# have feedback weights, and what they learn from would be most of what comes back.
MOST_FEEDBACK: Final = 1024

_NEED_COTANGENTS: Final = frozenset({Mode.VJP, Mode.IDENTITY, Mode.HYBRID})


def check_modes(modes: Sequence[Mode]) -> None:
    """Refuse neighbours that cannot work together.

    Raises:
        PlanError: naming both stages and the way out.
    """
    for stage, mode in enumerate(modes):
        if mode not in CARRYING:
            continue
        for later, other in enumerate(modes[stage + 1 :], stage + 1):
            if other is not mode:
                raise PlanError(
                    f"stage {stage} trains by {mode.value!r}, whose noise has to be carried"
                    f" on to the loss, but stage {later} after it is {other.value!r} and"
                    f" carries none. Make all stages from {stage} on {mode.value!r}, or"
                    f" stage {stage} 'hybrid', which needs a cotangent from the stage after"
                    " it instead"
                )
        for earlier, other in enumerate(modes[:stage]):
            if other in _NEED_COTANGENTS:
                raise PlanError(
                    f"stage {earlier} trains by {other.value!r} and needs a cotangent, but"
                    f" stage {stage} after it is {mode.value!r} and sends none back. Make"
                    f" stage {earlier} {mode.value!r} or 'frozen', or stage {stage}"
                    " 'vjp' or 'hybrid'"
                )


def settled(mode: Mode, spec: EstimatorSpec) -> EstimatorSpec:
    """The estimator of a stage: its mode leaves some choices open and others not."""
    if mode is Mode.SPSA or (mode in CARRYING and spec.noise == WEIGHTS):
        return msgspec.structs.replace(spec, noise=WEIGHTS, form=FORWARD)
    return spec


def crossing_rays(
    part: Part,
    slopes_in: tuple[TensorSpec, ...],
    target: TensorSpec | None,
    units: Sequence[Unit],
    *,
    learns: bool,
) -> Rays:
    """What noise makes of a stage's cuts, and what comes back for it.

    Args:
        part: the stage.
        slopes_in: what the stage after it sends back.
        target: what the loss applies to, at the last stage.
        units: what is perturbed.
        learns: some weight of the stage has an estimated gradient.
    """
    spec, received = part.estimator, part.moved(part.receives)
    made, slopes = part.moved(part.sends), slopes_in
    if target is not None:
        made = (target,) if received or learns else ()
        slopes = _slopes(spec, target, part.samples)
    rays = Rays(_rays(spec, received), _rays(spec, made), slopes_in)
    if rows_of(rays, (unit.shape for unit in units), part.samples) == 1:
        slopes = (TensorSpec(SLOPES, "float32", (spec.tangents, 1)),)
    return msgspec.structs.replace(rays, slopes_out=slopes if received else ())


def _rays(spec: EstimatorSpec, values: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    prefix, count = TANGENT, spec.tangents
    if spec.form != JVP:
        prefix, count = VARIANT, spec.sides * spec.tangents
    return tuple(
        TensorSpec(prefix + value.name, value.dtype, (count, *value.shape))
        for value in values
    )


def _slopes(
    spec: EstimatorSpec, target: TensorSpec, samples: int
) -> tuple[TensorSpec, ...]:
    """What the last stage sends back."""
    rows = 1 if spec.noise == WEIGHTS else independent(samples, target.shape)
    slopes = TensorSpec(SLOPES, "float32", (spec.tangents, rows))
    each = target.elements // rows
    if not spec.control_variate or rows == 1 or each > MOST_FEEDBACK:
        return (slopes,)
    return (
        slopes,
        TensorSpec(ERROR, "float32", (rows, each)),
        TensorSpec(TANGENTS, "float32", (spec.tangents, rows, each)),
    )
