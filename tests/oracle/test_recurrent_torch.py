"""LSTM, GRU and RNN against PyTorch's own, gradients and all."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from edgetrain.compiler.build import Node
from edgetrain.compiler.jvp import jvp
from edgetrain.compiler.vjp import vjp
from tests.forward_graph import Graph, normal

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle

STEPS, BATCH, FEATURES, HIDDEN = 12, 3, 4, 6
TOLERANCE = 1e-5
# Where ONNX keeps the gates that PyTorch has in the order i, f, g, o or r, z, n.
ORDER = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}


def to_onnx(op: str, parameter: torch.Tensor) -> np.ndarray:
    """A parameter, or its gradient, of one direction in ONNX's order of gates."""
    blocks = np.split(parameter.detach().numpy(), len(ORDER[op]))
    return np.concatenate([blocks[i] for i in ORDER[op]]).astype(np.float32)


def operands(op: str, layer: torch.nn.Module, *, gradients: bool) -> dict[str, np.ndarray]:
    """W, R and B as ONNX has them, or their gradients."""
    sides = ["", "_reverse"][: 2 if layer.bidirectional else 1]

    def part(kind: str, side: str) -> np.ndarray:
        parameter = getattr(layer, f"{kind}_l0{side}")
        return to_onnx(op, parameter.grad if gradients else parameter)

    biases = [[part(f"bias_{k}h", side) for k in "ih"] for side in sides]
    return {
        "w": np.stack([part("weight_ih", side) for side in sides]),
        "r": np.stack([part("weight_hh", side) for side in sides]),
        "b": np.stack([np.concatenate(pair) for pair in biases]),
    }


@pytest.mark.parametrize(
    ("op", "bidirectional"), list(itertools.product(ORDER, (False, True))), ids=str
)
def test_gradients_are_those_of_torch(op: str, bidirectional: bool) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    count = 2 if bidirectional else 1
    layer = getattr(torch.nn, op)(FEATURES, HIDDEN, bidirectional=bidirectional).double()
    states = {"h": normal(count, BATCH, HIDDEN, seed=1)}
    if op == "LSTM":
        states["c"] = normal(count, BATCH, HIDDEN, seed=2)
    inputs = {"x": normal(STEPS, BATCH, FEATURES), **states}

    leaves = {k: torch.tensor(v).double().requires_grad_() for k, v in inputs.items()}
    given = tuple(leaves[k] for k in states)
    y, last = layer(leaves["x"], given if op == "LSTM" else given[0])
    results = (y, *(last if op == "LSTM" else (last,)))
    names = ("y", "yh", "yc")[: len(results)]
    u = [normal(*result.shape, seed=3 + i) for i, result in enumerate(results)]
    torch.autograd.backward(results, [torch.tensor(value).double() for value in u])
    expected = {k: leaf.grad.numpy() for k, leaf in leaves.items()}
    expected |= operands(op, layer, gradients=True)

    inputs |= operands(op, layer, gradients=False)
    attributes = {"direction": "bidirectional" if bidirectional else "forward"}
    if op == "GRU":
        attributes["linear_before_reset"] = 1
    wiring = ("x", "w", "r", "b", "", *states)
    forward = Node(op, op, wiring, names, {"hidden_size": HIDDEN, **attributes})
    graph = Graph([forward], dict(inputs))
    # PyTorch has the directions side by side in its last axis.
    u[0] = u[0].reshape(STEPS, BATCH, count, HIDDEN).transpose(0, 2, 1, 3).copy()
    seeds = {k: graph.seed(k, value) for k, value in zip(names, u, strict=True)}
    back = vjp(graph.g, graph.nodes, seeds, list(inputs))
    v = {k: normal(*value.shape, seed=9) for k, value in inputs.items()}
    ahead = jvp(graph.g, graph.nodes, {k: graph.seed(k, t) for k, t in v.items()})
    found = graph.run(back | {k: ahead[k] for k in names})

    for name, value in expected.items():
        error = np.abs(found[name] - value).max() / np.abs(value).max()
        assert error < TOLERANCE, f"{name}: {error}"
    pulled = sum((v[k].astype(np.float64) * expected[k]).sum() for k in v)
    pushed = sum(
        (s.astype(np.float64) * found[k]).sum() for k, s in zip(names, u, strict=True)
    )
    size = sum(np.abs(v[k] * expected[k]).sum() for k in v)
    assert abs(pulled - pushed) < TOLERANCE * size
