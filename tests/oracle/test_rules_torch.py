"""Single rules against PyTorch's autograd in double precision, on the rules' own cases."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from rule_case import Case
from rule_cases import CASES
from test_rules import differentiate, primal

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle

F = torch.nn.functional
TOLERANCE = 1e-5
# The inputs, floats in double precision, and the attributes, to the first output.
Forward = Callable[..., "torch.Tensor"]
TRIGONOMETRY = ("Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh")
REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
PADS = {"edge": "replicate", "reflect": "reflect", "wrap": "circular"}


def shrink(x, lambd=0.5, bias=0.0):
    return torch.where(x.abs() > lambd, x - bias * x.sign(), torch.zeros_like(x))


def dims(x, axes) -> list[int]:
    return sorted(a % x.ndim for a in (range(x.ndim) if axes is None else axes.tolist()))


def reduce_prod(x, axes=None, keepdims=1):
    for axis in reversed(dims(x, axes)):
        x = x.prod(axis, keepdim=bool(keepdims))
    return x


def log_sum(x, axes=None, keepdims=1):
    return x.sum(dims(x, axes), keepdim=bool(keepdims)).log()


def group_norm(x, scale, bias, num_groups, epsilon=1e-5):
    """PyTorch's scale and bias are one a channel, those of opset 18 one a group."""
    size = x.shape[1] // num_groups
    affine = (v.repeat_interleave(size) for v in (scale, bias))
    return F.group_norm(x, num_groups, *affine, epsilon)


def lp_pool(x, p, kernel_shape, strides=None, **_):
    """PyTorch raises what ONNX takes the magnitude of, and steps by the kernel."""
    return F.lp_pool2d(x.abs(), p, kernel_shape, strides or 1)


def scatter(x, indices, updates, axis=0, reduction="none"):
    indices = indices % x.shape[axis]
    if reduction == "none":
        return x.scatter(axis, indices, updates)
    return x.scatter_reduce(axis, indices, updates, REDUCTIONS[reduction])


def cumsum(x, axis, exclusive=0, reverse=0):
    turn = [int(axis)] if reverse else []
    x = x.flip(turn)
    total = x.cumsum(int(axis))
    return (total - x if exclusive else total).flip(turn)


def pad(x, pads, mode):
    around = [int(n) for axis in reversed(range(x.ndim)) for n in pads[axis :: x.ndim]]
    if mode == "wrap":
        around = around[:4]
    return F.pad(x[None], around, mode=PADS[mode])[0]


def loss(function: Forward) -> Forward:
    """PyTorch takes no derivative by the weights of the classes."""

    def apply(scores, labels, weight=None, **more):
        fixed = None if weight is None else weight.detach()
        return function(scores, labels, fixed, **more)

    return apply


def grid_sample(x, grid, mode, padding_mode, align_corners):
    mode = "bilinear" if mode == "linear" else mode
    return F.grid_sample(x, grid, mode, padding_mode, bool(align_corners))


def fold(x, image, block, **more):
    size, kernel = image.tolist(), block.tolist()
    pads, one = more.get("pads", [0, 0]), [1, 1]
    dilations, strides = more.get("dilations", one), more.get("strides", one)
    return F.fold(x, size, kernel, dilations, pads[:2], strides)


FORWARDS: dict[str, Forward] = {
    **{op: getattr(torch, op.lower()) for op in TRIGONOMETRY},
    "Celu": lambda x, alpha=1.0: F.celu(x, alpha),
    "Clip": lambda x, low=None, high=None: torch.clamp(x, low, high),
    "Col2Im": fold,
    "CumSum": cumsum,
    "Einsum": lambda *x, equation: torch.einsum(equation, *x),
    "GatherElements": lambda x, i, axis: x.gather(axis, i % x.shape[axis]),
    "GridSample": grid_sample,
    "GroupNormalization": group_norm,
    "LRN": lambda x, size, alpha, beta=0.75, bias=1.0: F.local_response_norm(
        x, size, alpha, beta, bias
    ),
    "LpNormalization": lambda x, p, axis: F.normalize(x, p, axis),
    "LpPool": lp_pool,
    "Mish": F.mish,
    "Mod": lambda a, b, **_: torch.fmod(a, b),
    "NegativeLogLikelihoodLoss": loss(F.nll_loss),
    "Pad": pad,
    "ReduceLogSum": log_sum,
    "ReduceProd": reduce_prod,
    "ScatterElements": scatter,
    "Shrink": shrink,
    "SoftmaxCrossEntropyLoss": loss(F.cross_entropy),
    "Softsign": F.softsign,
    "ThresholdedRelu": lambda x, alpha=1.0: F.threshold(x, alpha, 0.0),
    "Trilu": lambda x, k=0, upper=1: (torch.triu if upper else torch.tril)(x, int(k)),
}


def comparable(case: Case) -> bool:
    """Whether PyTorch has this form of the operator, too."""
    more = case.attributes
    match case.op:
        case "LpPool":
            plain = {"kernel_shape", "strides", "p"}
            return set(more) <= plain and len(more["kernel_shape"]) == 2
        case "Pad":
            return "around" in case.label and more["mode"] != "wrap"
        case "Clip":
            return len(case.inputs) > 1
        case "Col2Im":
            pads = more.get("pads", [0, 0, 0, 0])
            return pads[:2] == pads[2:]
        case "LRN":
            return case.inputs[0].ndim == 4
        case _:
            return case.op in FORWARDS and case.outputs == 1


@pytest.mark.parametrize("case", [*filter(comparable, CASES)], ids=str)
def test_a_rule_gives_what_autograd_gives(case: Case) -> None:
    p = primal(case)
    u, _, results = differentiate(p, p.wrt)
    tensors = {}
    for name, value in zip(p.node.inputs, case.inputs, strict=True):
        if value is not None:
            wide = value.astype(np.float64) if value.dtype == np.float32 else value
            tensors[name] = torch.tensor(wide, requires_grad=name in p.wrt)
    inputs = [tensors.get(name) for name in p.node.inputs]
    y = FORWARDS[case.op](*inputs, **case.attributes)
    np.testing.assert_allclose(y.detach(), p.values["y0"], rtol=1e-4, atol=1e-5)
    y.backward(torch.tensor(u["u/y0"].astype(np.float64)))
    compared = [name for name in p.wrt if tensors[name].grad is not None]
    assert compared
    for name in compared:
        expected = tensors[name].grad.numpy()
        size = np.abs(expected).max() + 1e-2
        np.testing.assert_allclose(results[name], expected, rtol=0, atol=TOLERANCE * size)
