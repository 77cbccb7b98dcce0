"""All that training has come to between two steps, by stage and by weight.

The same state can be cut anew: `join` puts the stages of one plan together, `split` takes
out what a stage of another plan needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from edgetrain.errors import BundleError
from edgetrain.manifest import Manifest, view

Vector = npt.NDArray[np.float32]
Arrays = Mapping[str, npt.NDArray[Any]]

_DTYPES: Final = ("float32", "int64")


class PackedArray(msgspec.Struct, frozen=True):
    """A small array as it travels."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Packed(msgspec.Struct, frozen=True):
    steps: int
    weights: bytes
    optimizer: dict[str, PackedArray]


@dataclass(frozen=True, slots=True)
class StageState:
    """Of one stage.

    Attributes:
        steps: so many are in it.
        weights: flat, as the stage's manifest lays them out.
        optimizer: its state: vectors as long as the trainable part, and scalars.
    """

    steps: int
    weights: Vector
    optimizer: Arrays

    def encode(self) -> bytes:
        weights = np.ascontiguousarray(self.weights, np.float32).tobytes()
        return msgspec.msgpack.encode(_Packed(self.steps, weights, pack(self.optimizer)))

    @classmethod
    def decode(cls, data: bytes | memoryview, manifest: Manifest) -> StageState:
        """Parse and check the state of a stage.

        Raises:
            BundleError: it is none, or not of this stage.
        """
        try:
            packed = msgspec.msgpack.decode(data, type=_Packed)
        except msgspec.DecodeError as error:
            raise BundleError(f"not a stage's state: {error}") from error
        if len(packed.weights) != 4 * manifest.elements:
            raise BundleError(
                f"a state of {len(packed.weights)} B of weights for stage"
                f" {manifest.stage}, which has {manifest.elements} elements"
            )
        if packed.steps < 0:
            raise BundleError(f"a state of {packed.steps} steps")
        weights = np.frombuffer(packed.weights, np.float32).copy()
        return cls(packed.steps, weights, unpack(packed.optimizer, manifest))


@dataclass(frozen=True, slots=True)
class ModelState:
    """Of the whole model, however it is cut.

    Attributes:
        steps: so many are in it.
        weights: by name, running statistics among them.
        vectors: of the optimizer, by their name in it and by weight.
        scalars: of the optimizer, the same on all stages that train.
    """

    steps: int
    weights: Arrays
    vectors: Mapping[str, Arrays]
    scalars: Arrays


def join(states: Sequence[StageState], manifests: Sequence[Manifest]) -> ModelState:
    """Put the stages of one plan together.

    Raises:
        BundleError: they are of different steps.
    """
    steps = {state.steps for state in states}
    if len(steps) != 1:
        raise BundleError(f"the stages' states are of different steps: {sorted(steps)}")
    weights: dict[str, npt.NDArray[Any]] = {}
    vectors: dict[str, dict[str, npt.NDArray[Any]]] = {}
    scalars: dict[str, npt.NDArray[Any]] = {}
    for state, manifest in zip(states, manifests, strict=True):
        weights |= {spec.name: view(state.weights, spec) for spec in manifest.weights}
        if not manifest.trainable_elements:
            continue  # its optimizer never moved
        for name, array in state.optimizer.items():
            if not array.shape:
                scalars[name] = array
                continue
            parts = vectors.setdefault(name, {})
            parts |= {s.name: view(array, s) for s in manifest.weights if s.trainable}
    return ModelState(steps.pop(), weights, vectors, scalars)


def split(state: ModelState, manifest: Manifest) -> StageState:
    """Take out what one stage needs.

    Raises:
        BundleError: the state lacks one of its weights.
    """
    weights = np.zeros(manifest.elements, np.float32)
    for spec in manifest.weights:
        if spec.name not in state.weights:
            raise BundleError(f"the state of the run has no weight {spec.name!r}")
        view(weights, spec)[...] = state.weights[spec.name]
    optimizer: dict[str, npt.NDArray[Any]] = {}
    for name, parts in state.vectors.items():
        vector = np.zeros(manifest.trainable_elements, np.float32)
        for spec in manifest.weights:
            if spec.trainable and spec.name in parts:
                view(vector, spec)[...] = parts[spec.name]
        optimizer[name] = vector
    return StageState(state.steps, weights, {**optimizer, **state.scalars})


def pack(arrays: Arrays) -> dict[str, PackedArray]:
    """Arrays as they travel."""
    return {
        name: PackedArray(array.dtype.name, array.shape, array.tobytes())
        for name, array in arrays.items()
    }


def unpack(packed: Mapping[str, PackedArray], manifest: Manifest) -> Arrays:
    """Arrays of an optimizer's state, checked against the stage they are for.

    Raises:
        BundleError: one is neither a scalar nor as long as what the stage trains.
    """
    allowed = {(), (manifest.trainable_elements,)}
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, item in packed.items():
        if item.dtype not in _DTYPES or item.shape not in allowed:
            raise BundleError(
                f"optimizer state {name!r} is {item.dtype}{list(item.shape)}, for a stage"
                f" that trains {manifest.trainable_elements} elements"
            )
        flat = np.frombuffer(item.data, np.uint8)
        dtype = np.dtype(item.dtype)
        if flat.size != dtype.itemsize * int(np.prod(item.shape, dtype=np.int64)):
            raise BundleError(f"optimizer state {name!r} holds {flat.size} B: cut short")
        arrays[name] = flat.view(dtype).reshape(item.shape).copy()
    return arrays
