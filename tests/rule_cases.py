"""Nodes on which every differentiation rule is tried: shapes, attributes, broadcasting."""

from __future__ import annotations

import numpy as np
from activation_rule_cases import ACTIVATION_CASES
from normalization_rule_cases import NORMALIZATION_CASES
from recurrent_rule_cases import RECURRENT_CASES
from rule_case import Case, ints, positive, real, scalar, smooth
from selection_rule_cases import SELECTION_CASES
from spatial_rule_cases import SPATIAL_CASES

BROADCASTS = {
    "same": ((3, 4), (3, 4)),
    "row": ((3, 4), (4,)),
    "column": ((3, 4), (3, 1)),
    "channel": ((2, 3, 2, 2), (3, 1, 1)),
    "scalar": ((), (2, 3)),
    "both": ((2, 1, 3), (4, 1)),
}


PRODUCTS = {
    "matrices": ((3, 4), (4, 2)),
    "batch": ((2, 3, 4), (2, 4, 5)),
    "shared right": ((2, 3, 4), (4, 5)),
    "shared left": ((3, 4), (2, 4, 5)),
    "broadcast": ((2, 1, 3, 4), (3, 4, 2)),
    "broadcast one": ((1, 3, 4), (4, 2)),
    "dot": ((4,), (4,)),
    "vector left": ((4,), (4, 3)),
    "vector right": ((3, 4), (4,)),
    "vector batch": ((4,), (2, 4, 3)),
    "batch vector": ((2, 3, 4), (4,)),
}

EQUATIONS = {
    "ij,jk->ik": ((2, 3), (3, 4)),
    "bij,bkj->bik": ((2, 3, 4), (2, 5, 4)),
    "ij,j": ((2, 3), (3,)),
    "ij->j": ((2, 3),),
    "i,j->ij": ((2,), (3,)),
    "ab,bc,cd->ad": ((2, 3), (3, 4), (4, 2)),
    "ij,k->k": ((2, 3), (4,)),
}


def _elementwise() -> list[Case]:
    cases = []
    for label, (a, b) in BROADCASTS.items():
        x, y = real(*a, seed=1), real(*b, seed=2)
        cases += [Case(op, label, (x, y)) for op in ("Add", "Sub", "Mul")]
        cases += [Case(op, label, (x, y + np.float32(0.011))) for op in ("Max", "Min")]
        cases.append(Case("Div", label, (x, positive(*b, seed=2))))
        cases.append(Case("Pow", label, (positive(*a, seed=1), y)))
        c = np.asarray(real(*b, seed=3) > 0)
        cases.append(Case("Where", label, (c, x, smooth(*b))))
        three = (x, y, smooth(*np.broadcast_shapes(a, b)))
        cases += [Case(op, label, three) for op in ("Sum", "Mean")]
        if label in ("same", "row", "channel"):
            cases.append(Case("PRelu", label, (x, y)))
    return cases


def _unary() -> list[Case]:
    cases = []
    x = real(3, 7, seed=4)
    signed = (
        "Neg Abs Exp Erf Sin Cos Tanh Sigmoid HardSigmoid HardSwish Softplus LeakyRelu"
        " Relu Elu Gelu Identity"
    )
    cases += [Case(op, "matrix", (x,)) for op in signed.split()]
    cases += [Case(op, "scalar", (scalar(0.3),)) for op in signed.split()]
    cases += [Case(op, "matrix", (positive(3, 7),)) for op in ("Sqrt", "Reciprocal", "Log")]
    return [
        *cases,
        Case("Add", "one value", (scalar(1.5), real(1, 1))),
        Case("Where", "scalars", (np.array([[True], [False]]), scalar(1.0), scalar(2.0))),
        Case("Max", "three", (real(4, 3), real(3, seed=5) * np.float32(0.9), scalar(0.37))),
        Case("Pow", "square", (x, scalar(2)), fixed=(1,)),
        Case("Pow", "cube", (x, scalar(3)), fixed=(1,)),
        Case("Pow", "int exponent", (x, ints(3))),
        Case("Pow", "root", (positive(5), scalar(0.5)), fixed=(1,)),
        Case("Cast", "to double", (x,), {"to": 11}),
        Case("LeakyRelu", "alpha", (x,), {"alpha": 0.3}),
        Case("LeakyRelu", "zero", (x,), {"alpha": 0.0}),
        Case("Elu", "alpha", (x,), {"alpha": 0.6}),
        Case("HardSigmoid", "alpha", (x,), {"alpha": 0.65, "beta": 0.4}),
        Case("HardSwish", "wide", (x * np.float32(2.9),)),
        Case("Gelu", "tanh", (x,), {"approximate": "tanh"}),
        Case("Clip", "both", (x, scalar(-0.93), scalar(1.21))),
        Case("Clip", "low", (x, scalar(-0.93))),
        Case("Clip", "high", (x, None, scalar(1.21))),
        Case("Clip", "none", (x,)),
        Case("Softmax", "last", (x,)),
        Case("Softmax", "first", (real(3, 2, 4),), {"axis": 0}),
        Case("LogSoftmax", "last", (x,)),
        Case("LogSoftmax", "middle", (real(3, 2, 4),), {"axis": 1}),
    ]


def _linear() -> list[Case]:
    cases = [
        Case("MatMul", label, (smooth(*a, seed=1), smooth(*b, seed=2)))
        for label, (a, b) in PRODUCTS.items()
    ]
    for ta in (0, 1):
        for tb in (0, 1):
            a = smooth(*((4, 3) if ta else (3, 4)), seed=1)
            b = smooth(*((5, 4) if tb else (4, 5)), seed=2)
            attributes = {"transA": ta, "transB": tb, "alpha": 0.5, "beta": 1.5}
            cases.append(Case("Gemm", f"{ta}{tb}", (a, b, smooth(5)), attributes))
    a, b = smooth(3, 4, seed=1), smooth(4, 5, seed=2)
    cases += [
        Case("Gemm", f"c {c.shape}", (a, b, c))
        for c in (scalar(0.3), smooth(1, 5), smooth(3, 1), smooth(3, 5), smooth(1))
    ]
    cases += [
        Case("Einsum", e, tuple(smooth(*s, seed=i) for i, s in enumerate(shapes)),
             {"equation": e})
        for e, shapes in EQUATIONS.items()
    ]  # fmt: skip
    return [*cases, Case("Gemm", "no c", (a, b))]


def _normalization() -> list[Case]:
    cases = []
    for label, shape in {
        "image": (3, 4, 2, 3),
        "vector": (6, 4),
        "sequence": (3, 2, 5),
    }.items():
        x, c = smooth(*shape, seed=1), shape[1]
        weights = (x, positive(c, seed=2), smooth(c, seed=3))
        running = (smooth(c, seed=4), positive(c, seed=5))
        cases.append(Case("BatchNormalization", label, (*weights, *running)))
        training = {"training_mode": 1, "momentum": 0.0, "epsilon": 1e-3}
        cases.append(
            Case("BatchNormalization", f"training {label}", (*weights, *running), training,
                 outputs=3, fixed=(3, 4))
        )  # fmt: skip
        if len(shape) > 2:
            cases.append(Case("InstanceNormalization", label, weights))
    for outputs in (1, 3):
        cases += [
            Case("LayerNormalization", f"last {outputs}",
                 (smooth(2, 3, 8), positive(8), smooth(8, seed=1)), {}, outputs),
            Case("LayerNormalization", f"two axes {outputs}",
                 (smooth(3, 2, 4), positive(2, 4), smooth(2, 4, seed=1)), {"axis": 1},
                 outputs),
            Case("LayerNormalization", f"no bias {outputs}", (smooth(3, 8), positive(8)),
                 {"axis": -1, "epsilon": 1e-2}, outputs),
            Case("LayerNormalization", f"broadcast {outputs}",
                 (smooth(3, 2, 4), positive(4), smooth(2, 1)), {"axis": 1}, outputs),
        ]  # fmt: skip
    return cases


def _reduction() -> list[Case]:
    cases = []
    x = real(2, 3, 4, seed=7)
    for op in ("Sum", "Mean", "Max", "Min", "L1", "L2", "SumSquare", "LogSumExp"):
        name = f"Reduce{op}"
        cases += [
            Case(name, "all", (x,)),
            Case(name, "all flat", (x,), {"keepdims": 0}),
            Case(name, "one", (x, ints(1))),
            Case(name, "two", (x, ints(-1, 0)), {"keepdims": 0}),
        ]
        if op in ("Sum", "Mean", "Max", "Min"):
            noop = {"noop_with_empty_axes": 1}
            cases.append(Case(name, "none", (x,), noop))
    return cases


def _layout() -> list[Case]:
    x = real(2, 3, 4, seed=8)
    image = real(1, 8, 2, 3, seed=9)
    return [
        Case("Reshape", "flat", (x, ints(-1))),
        Case("Reshape", "scalar", (real(1, 1), np.zeros(0, np.int64))),
        Case("Flatten", "1", (x,)),
        Case("Flatten", "2", (x,), {"axis": 2}),
        Case("Squeeze", "all", (real(1, 3, 1),)),
        Case("Squeeze", "one", (real(1, 3, 1), ints(-1))),
        Case("Unsqueeze", "two", (x, ints(0, -1))),
        Case("Transpose", "reversed", (x,)),
        Case("Transpose", "cycle", (x,), {"perm": [1, 2, 0]}),
        Case("Concat", "two", (x, real(2, 1, 4)), {"axis": 1}),
        Case("Concat", "one", (x,), {"axis": -1}),
        Case("Concat", "negative", (x, x[..., :2], x), {"axis": -1}),
        Case("Split", "even", (x,), {"axis": 2, "num_outputs": 2}, outputs=2),
        Case("Split", "sizes", (x, ints(1, 2)), {"axis": -2}, outputs=2),
        Case("Expand", "rows", (real(3, 1), ints(2, 3, 4))),
        Case("Expand", "kept", (real(3, 4), ints(3, 1))),
        Case("Expand", "scalar", (scalar(0.4), ints(2, 3))),
        Case("Tile", "two", (x, ints(2, 1, 3))),
        Case("Tile", "none", (x, ints(1, 1, 1))),
        Case("Pad", "zero", (x, ints(0, 1, 2, 0, 0, 1))),
        Case("Pad", "value", (x, ints(1, 0, 0, 0, 2, 0), scalar(0.5))),
        Case("Pad", "axes", (x, ints(1, 2), None, ints(-1))),
        Case("Pad", "crop", (x, ints(0, -1, 1, 0, 1, -2), scalar(0.5))),
        Case("DepthToSpace", "DCR", (image,), {"blocksize": 2}),
        Case("DepthToSpace", "CRD", (image,), {"blocksize": 2, "mode": "CRD"}),
        Case("SpaceToDepth", "two", (real(1, 2, 4, 6),), {"blocksize": 2}),
    ]  # fmt: skip


def _selection() -> list[Case]:
    x = real(2, 3, 4, seed=8)
    reverse = np.iinfo(np.int64).min
    return [
        Case("Slice", "plain", (x, ints(1, 0), ints(3, 2), ints(1, 2))),
        Case("Slice", "no axes", (x, ints(0, 1), ints(1, 9))),
        Case("Slice", "negative", (x, ints(-3), ints(-1), ints(-1))),
        Case("Slice", "steps", (x, ints(0, 1), ints(3, 4), ints(1, 2), ints(2, 2))),
        Case("Slice", "reversed", (x, ints(-1), ints(reverse), ints(2), ints(-1))),
        Case("Slice", "back by two", (x, ints(9), ints(0), ints(2), ints(-2))),
        Case("Gather", "rows", (real(5, 3), ints(0, 2, 2, -1)), runtime=True),
        Case("Gather", "known rows", (real(5, 3), ints(4, -4))),
        Case("Gather", "known twice", (real(5, 3), ints(4, -1))),
        Case("Gather", "matrix", (x, ints(0, 2, 2, 1).reshape(2, 2)), {"axis": 1},
             runtime=True),
        Case("Gather", "one", (x, np.array(-1)), {"axis": -1}),
        Case("Gather", "one at run time", (x, np.array(1)), {"axis": -1}, runtime=True),
        Case("Gather", "large", (real(120, 1), ints(7, -1, 7)), runtime=True),
        Case("Gather", "large last", (real(1, 120), ints(7, -1, 7)), {"axis": 1},
             runtime=True),
    ]  # fmt: skip


CASES = [
    *_elementwise(),
    *_unary(),
    *_linear(),
    *SPATIAL_CASES,
    *_normalization(),
    *_reduction(),
    *_layout(),
    *_selection(),
    *ACTIVATION_CASES,
    *NORMALIZATION_CASES,
    *SELECTION_CASES,
    *RECURRENT_CASES,
]
