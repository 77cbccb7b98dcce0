"""Checking that a normalised model computes what the file computes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from edgetrain.compiler import reference
from edgetrain.errors import EngineError, GraphError

Array = npt.NDArray[Any]

TOLERANCE: Final = 1e-3
# Half precision itself is about 1e-3 an operation.
HALF_TOLERANCE: Final = 3e-2
RANDOM: Final = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike"}
    | {"RandomUniform", "RandomUniformLike"}
)
_DRAWN: Final = 1 << 24  # elements; a larger input repeats them, as drawing is slow
_OUTLIERS: Final = (4.0, -4.0)
_UNCHECKED: Final = (
    "The file's own graph draws random numbers or does not run on random input, so the"
    " normalised model was not compared with it."
)


@dataclass(frozen=True, slots=True)
class Trial:
    """A normalised model beside the file's own graph.

    Attributes:
        original: the file's graph in inference form.
        model: the normalised model, with `weights` as inputs.
        batch: the rows that `model` takes of each input.
        extents: the rows that `original` takes, by input.
        tolerance: largest difference, relative to the largest value of an output.
        apart: weights that `original` takes as inputs too.
    """

    original: onnx.ModelProto
    model: onnx.ModelProto
    weights: Mapping[str, Array]
    batch: int
    extents: Mapping[str, int]
    tolerance: float = TOLERANCE
    apart: Mapping[str, Array] = field(default_factory=dict)


def verify(trial: Trial, feeds: Mapping[str, Array]) -> str:
    """Run both graphs and compare; the common rows, where their batch sizes differ.

    Args:
        trial: what to compare.
        feeds: as many rows of each input as the larger batch.

    Returns:
        Why nothing was compared, for the user to know, or ``""``.

    Raises:
        GraphError: the outputs differ, or rows act on each other.
        EngineError: the normalised model does not run.
    """
    rebatched = any(extent != trial.batch for extent in trial.extents.values())
    common = min([trial.batch, *trial.extents.values()])
    for factor in _OUTLIERS if rebatched else (1.0,):
        values = amplify(feeds, common, factor)
        own = as_float32(leading(values, dict.fromkeys(values, trial.batch)))
        got = reference.run(trial.model, {**own, **trial.weights})
        theirs = {**leading(values, trial.extents), **trial.apart}
        expected = _expected(trial.original, theirs)
        if expected is None:
            if rebatched:
                raise GraphError(_UNCHECKED)
            return _UNCHECKED
        if rebatched:
            _check_rows(got, trial.batch)
        difference = compare(expected, got, trial.tolerance)
        if difference:
            raise GraphError(
                f"the normalised model does not compute what the file does: {difference}"
            )
    return ""


def _expected(
    original: onnx.ModelProto, feeds: Mapping[str, Array]
) -> dict[str, Array] | None:
    if any(node.op_type in RANDOM for node in original.graph.node):
        return None
    try:
        return reference.run(original, feeds)
    except EngineError:
        return None


def _check_rows(outputs: Mapping[str, Array], batch: int) -> None:
    for name, value in outputs.items():
        if value.shape[:1] != (batch,):
            raise GraphError(f"output {name!r} has shape {list(value.shape)}")


def leading(feeds: Mapping[str, Array], rows: Mapping[str, int]) -> dict[str, Array]:
    """The first rows of each array; an array of rank 0 as it is."""
    return {k: v[: rows[k]] if v.ndim else v for k, v in feeds.items()}


def as_float32(feeds: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays with every floating-point one as float32."""
    return {
        name: value.astype(np.float32, copy=False) if value.dtype.kind == "f" else value
        for name, value in feeds.items()
    }


def sample(graph: onnx.GraphProto, rows: int, seed: int = 0) -> dict[str, Array]:
    """Random inputs: normal floats; 0 or 1 for integers, which may index; any bool.

    Args:
        graph: inputs of static shape; an initializer among them is skipped.
        rows: the leading extent to give each input.
        seed: of the generator.
    """
    generator = np.random.default_rng(seed)
    held = {tensor.name for tensor in graph.initializer}
    feeds: dict[str, Array] = {}
    for info in graph.input:
        if info.name in held:
            continue
        tensor = info.type.tensor_type
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        shape = tuple(d.dim_value for d in tensor.shape.dim)
        shape = (rows, *shape[1:]) if shape else ()
        if dtype.kind in "fV":
            drawn = generator.standard_normal(min(math.prod(shape), _DRAWN))
            feeds[info.name] = np.resize(drawn.astype(dtype), shape)
        else:
            feeds[info.name] = generator.integers(0, 2, shape).astype(dtype)
    return feeds


def amplify(feeds: Mapping[str, Array], common: int, factor: float) -> dict[str, Array]:
    """Scale the float rows from `common` on.

    A graph that lets such rows act on the rows before them gives itself away, one that
    takes the largest or smallest of all rows too once `factor` was positive and negative.
    """
    scaled = {}
    for name, value in feeds.items():
        scaled[name] = value.copy()
        if value.ndim and value.dtype.kind == "f":
            scaled[name][common:] *= factor
    return scaled


def compare(
    expected: Mapping[str, Array], got: Mapping[str, Array], tolerance: float
) -> str:
    """The first output that differs by more than `tolerance` of its largest value.

    Outputs of different length are compared on their common leading rows.

    Returns:
        What differs, or ``""``.
    """
    for name, value in expected.items():
        want, have = value.astype(np.float64), got[name].astype(np.float64)
        if want.ndim != have.ndim or want.shape[1:] != have.shape[1:]:
            return f"{name!r} has shape {list(have.shape)}, not {list(want.shape)}"
        if want.ndim:
            rows = min(len(want), len(have))
            want, have = want[:rows], have[:rows]
        if not np.array_equal(np.isfinite(want), np.isfinite(have)):
            return f"{name!r} is not finite where it should be, or the reverse"
        want, have = want[np.isfinite(want)], have[np.isfinite(have)]
        scale = np.max(np.abs(want), initial=0.0)
        error = np.max(np.abs(want - have), initial=0.0)
        if error > tolerance * max(scale, np.finfo(np.float32).tiny):
            return f"{name!r} differs by {error / (scale or 1.0):.1e} of its largest value"
    return ""
