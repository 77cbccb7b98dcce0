"""The compiler's working form: one opset, static shapes, weights as inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx

from edgetrain.tensors import TensorSpec

OPSET: Final = 20
IR_VERSION: Final = 10


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where a weight lives in the user's file.

    Attributes:
        kind: "initializer", or "node" for what a Constant, ConstantOfShape or Identity node
            gives.
        name: of the initializer, or of the node's output.
        dtype: the file's own type, as numpy names it.
    """

    kind: str
    name: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Tie:
    """A tensor of the file that is the same parameter as a weight.

    Attributes:
        name: of the tensor; it is no weight of its own.
        of: the weight.
        transposed: the tensor is the weight's transpose.
    """

    name: str
    of: str
    transposed: bool


@dataclass(frozen=True, slots=True)
class Program:
    """A normalised model.

    Attributes:
        model: opset 20, functions inlined, constants folded, topologically sorted, every
            value's static shape and type recorded. Weights are graph inputs without value,
            after the data inputs; what is left in `initializer` are settings and other
            constants. Inference form: no live Dropout, BatchNormalization not training.
        weights: float32 value of each weight, keyed by its name in `model`.
        sources: where each weight goes when the trained model is written.
        inputs, outputs: the data inputs and the outputs, with the batch size in place.
        batch: samples a microbatch; the leading extent of the data inputs.
        states: weights that are BatchNormalization's running mean or variance.
        remarks: what a user should know, one sentence each.
        ties: tensors that are computed from a weight and are written together with it.
    """

    model: onnx.ModelProto
    weights: Mapping[str, npt.NDArray[np.float32]]
    sources: Mapping[str, WeightSource]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batch: int
    states: frozenset[str]
    remarks: tuple[str, ...] = field(default=())
    ties: tuple[Tie, ...] = field(default=())
