"""Where a derivative is not unique, or is none, and what the rules return there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_TIES: Final = "elements that tie share evenly"
_FIRST: Final = "of elements that tie in a window the first, in row-major order, has it all"
_ACTIVATIONS: Final = "as its activation functions have it"
_ENDS: Final = "infinite at the ends of the domain, -1 and 1"
_SCATTER: Final = (
    'with "max" and "min", elements that tie share evenly; with "none", every update of an'
    " index that is given twice has the derivative"
)
_EMPTY_MEAN: Final = "the mean over no label, all being ignored, is not a number"

CHOICES: Final[Mapping[str, str]] = {
    "Abs": "0 at 0",
    "Acos": _ENDS,
    "Acosh": "infinite at 1",
    "Asin": _ENDS,
    "Atanh": _ENDS,
    "Cast": "between float types 1: rounding is not seen",
    "Clip": "at a bound the bound has it all; where the bounds cross, the upper one",
    "Div": "infinite or not a number where the divisor is 0",
    "Dropout": "the mask is a constant, and so is the ratio",
    "Elu": "alpha at 0",
    "GRU": _ACTIVATIONS,
    "GlobalLpPool": "0 where the norm is 0; with p = 1, also by an element that is 0",
    "GlobalMaxPool": _FIRST,
    "GridSample": "by the grid on an element that of the side above; 0 where an edge clamps"
    ' and with "nearest", which jumps',
    "HardSigmoid": "0 where it saturates",
    "HardSwish": "0 at -3 and 1 at 3",
    "LSTM": _ACTIVATIONS,
    "LeakyRelu": "alpha at 0",
    "Log": "infinite at 0",
    "LpNormalization": "0 where the norm is 0; with p = 1, also of the norm by an element"
    " that is 0",
    "LpPool": "0 where the norm is 0; with p = 1, also by an element that is 0",
    "Max": _TIES,
    "MaxPool": _FIRST,
    "MeanVarianceNormalization": "of the deviation 0 where all elements are equal",
    "Min": _TIES,
    "Mod": "where y jumps, that of the side whose quotient the kernel took",
    "NegativeLogLikelihoodLoss": _EMPTY_MEAN,
    "PRelu": "the slope at 0, and 0 by the slope",
    "Pow": "0 by the exponent where the base is 0",
    "RNN": _ACTIVATIONS,
    "Reciprocal": "infinite at 0",
    "ReduceL1": "0 by an element that is 0",
    "ReduceL2": "0 where all elements are 0",
    "ReduceLogSum": "infinite where the sum is 0",
    "ReduceMax": _TIES,
    "ReduceMin": _TIES,
    "Relu": "0 at 0",
    "ScatterElements": _SCATTER,
    "ScatterND": _SCATTER,
    "Selu": "gamma * alpha at 0",
    "Shrink": "0 at -lambd and lambd, where it may jump",
    "SoftmaxCrossEntropyLoss": _EMPTY_MEAN,
    "Sqrt": "infinite at 0",
    "ThresholdedRelu": "0 at alpha, where it jumps",
    "TopK": "of elements that tie, those the kernel took have it all",
}
