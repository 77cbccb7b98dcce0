"""Make samples fit a model, or say what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from edgetrain.errors import DataError
from edgetrain.samples import Array, Samples
from edgetrain.tensors import TensorSpec

_CHUNK_ELEMENTS: Final = 1 << 22


class LabelSpec(msgspec.Struct, frozen=True):
    """What labels must look like.

    Attributes:
        tensor: type and shape, the batch first; its size does not matter.
        low, high: smallest and largest value allowed; None: any.
        ignored: another value that is allowed; None: there is none.
    """

    tensor: TensorSpec
    low: float | None = None
    high: float | None = None
    ignored: int | None = None


def check(
    samples: Samples,
    inputs: Sequence[TensorSpec],
    labels: LabelSpec | None,
    *,
    at_least: int = 1,
) -> Samples:
    """Match samples with a model's inputs and its loss.

    Arrays are converted only where no information is lost, or from float64 to float32.

    Args:
        samples: as read.
        inputs: of the model, the batch first; its size does not matter.
        labels: None: they are not needed, and dropped.
        at_least: samples there must be.

    Returns:
        Arrays of exactly the model's names, types and sample shapes, in the model's order;
        its remarks say what was converted.

    Raises:
        DataError: naming the array, what is wrong with it and how to mend it.
    """
    source = samples.source
    named = _named(samples, [spec.name for spec in inputs])
    _check_lengths(samples, at_least)
    fitted: dict[str, Array] = {}
    remarks: list[str] = list(samples.remarks)
    for spec in inputs:
        array = _fit_shape(source, spec, named[spec.name])
        fitted[spec.name], remark = _fit_type(source, spec, array)
        remarks += [remark] if remark else []
        _check_finite(source, spec.name, fitted[spec.name])
    fitted_labels = None if labels is None else _fit_labels(samples, labels)
    return Samples(fitted, fitted_labels, source, tuple(remarks))


def _named(samples: Samples, wanted: Sequence[str]) -> dict[str, Array]:
    """The input arrays under the model's names; a lone one needs no name."""
    given = dict(samples.inputs)
    if len(wanted) == 1 and len(given) == 1:
        return {wanted[0]: next(iter(given.values()))}
    missing = sorted(set(wanted) - set(given))
    extra = sorted(set(given) - set(wanted))
    if missing or extra:
        parts = [f"lacks {', '.join(missing)}"] if missing else []
        parts += [f"has {', '.join(extra)}, which the model does not take"] if extra else []
        raise DataError(
            f"{samples.source} {' and '.join(parts)}: name its arrays as the model's inputs"
            f" ({', '.join(wanted)}), and 'labels'"
        )
    return given


def _fit_shape(source: str, spec: TensorSpec, array: Array) -> Array:
    """Accept an array of the right sample shape, give or take extents of 1."""
    wanted, given = spec.shape[1:], array.shape[1:]
    if array.ndim and given == wanted:
        return array
    squeezed = [n for n in given if n != 1]
    if array.ndim and squeezed == [n for n in wanted if n != 1]:
        return array.reshape(len(array), *wanted)
    same = array.ndim and math.prod(given) == math.prod(wanted)
    extents = "".join(f", {n}" for n in wanted)
    advice = (
        f"as many numbers: if they are in that order, save array.reshape(-1{extents})"
        if same
        else "check the axes and the preprocessing"
    )
    raise DataError(
        f"{source}: array {spec.name!r} has shape {list(array.shape)}, the model needs"
        f" [samples{extents}]; {advice}"
    )


def _fit_type(source: str, spec: TensorSpec, array: Array) -> tuple[Array, str]:
    wanted = np.dtype(spec.dtype)
    if array.dtype == wanted:
        return array, ""
    rounds = array.dtype == np.float64 and wanted == np.float32
    if array.dtype.kind not in "biuf" or not (
        rounds or np.can_cast(array.dtype, wanted, "safe")
    ):
        raise DataError(
            f"{source}: array {spec.name!r} is {array.dtype}, the model needs {wanted};"
            f" convert it when you save it: array.astype('{wanted}')"
        )
    remark = ""
    if array.dtype.kind in "iu" and wanted.kind == "f":
        remark = (
            f"{source}: array {spec.name!r} is {array.dtype} and goes in unscaled,"
            " as the numbers it holds; save it scaled if the model expects that"
        )
    with np.errstate(over="ignore"):  # what overflows becomes infinite and is refused later
        return array.astype(wanted), remark


def _fit_labels(samples: Samples, labels: LabelSpec) -> Array:
    source, spec = samples.source, labels.tensor
    if samples.labels is None:
        raise DataError(f"{source} has no labels: add an array named 'labels'")
    classes = 0 if labels.high is None else int(labels.high) + 1
    if len(spec.shape) == 1 and samples.labels.shape[1:] == (classes,) and classes > 1:
        raise DataError(
            f"{source}: the labels are one-hot, [samples, {classes}]; the loss needs class"
            " indices: save labels.argmax(axis=1), or set [model] loss_options.soft_labels"
        )
    array = _fit_shape(source, spec, samples.labels)
    wanted = np.dtype(spec.dtype)
    if array.dtype.kind in "biu":
        converted = array.astype(wanted)
        if not np.array_equal(converted, array):
            raise DataError(
                f"{source}: labels of type {array.dtype} do not fit into {wanted}:"
                " they are too large"
            )
    else:
        converted, _ = _fit_type(source, spec, array)
    _check_finite(source, spec.name, converted)
    _check_range(source, labels, converted)
    return converted


def _check_range(source: str, labels: LabelSpec, array: Array) -> None:
    low = -math.inf if labels.low is None else labels.low
    high = math.inf if labels.high is None else labels.high
    bad = ((array < low) | (array > high)) & (array != labels.ignored)
    ignored = "" if labels.ignored is None else f", and {labels.ignored} to ignore one"
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise DataError(
            f"{source}: the label of sample {where[0]} is {array[where]}, the model and its"
            f" loss allow {low:g} to {high:g}"
            + ignored
            + ("; classes count from 0" if array.dtype.kind == "i" else "")
        )


def _check_finite(source: str, name: str, array: Array) -> None:
    if array.dtype.kind != "f":
        return
    for first, part in _chunks(array):
        finite = np.isfinite(part).reshape(len(part), -1).all(axis=1)
        if not finite.all():
            sample = first + int(np.argmin(finite))
            raise DataError(
                f"{source}: array {name!r} holds a NaN or an infinite number, first in"
                f" sample {sample}; remove or replace such samples"
            )


def _chunks(array: Array) -> Iterator[tuple[int, Array]]:
    """Parts of the array with the index of their first row, so that masks stay small."""
    rows = max(1, _CHUNK_ELEMENTS // max(1, math.prod(array.shape[1:])))
    for first in range(0, len(array), rows):
        yield first, array[first : first + rows]


def _check_lengths(samples: Samples, at_least: int) -> None:
    arrays = samples.arrays().items()
    lengths = {name: len(array) for name, array in arrays if array.ndim}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in lengths.items())
        raise DataError(f"{samples.source}: the arrays differ in samples: {counts}")
    if min(lengths.values(), default=at_least) < at_least:
        raise DataError(
            f"{samples.source} has {min(lengths.values())} samples, at least {at_least}"
            " are needed (one batch: [train] batch_size)"
        )
