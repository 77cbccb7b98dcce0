"""Gradients of whole networks, against PyTorch's autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from gradient_network import Network

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle

F = torch.nn.functional
TOLERANCE = 1e-5
Tensors = dict[str, "torch.Tensor"]


def check(net: Network, forward: Callable[[Tensors], torch.Tensor]) -> None:
    """Compare all cotangents, and <dy, J v>, with those of `forward`."""
    torch.set_num_threads(1)
    leaves = {k: torch.tensor(v, requires_grad=True) for k, v in net.primals.items()}
    y = forward(leaves)
    rng = np.random.default_rng(7)
    dy = rng.normal(size=y.shape).astype(np.float32)
    shapes = {k: v.shape for k, v in net.primals.items()}
    tangents = {k: rng.normal(size=v).astype(np.float32) for k, v in shapes.items()}
    y.backward(torch.tensor(dy))
    cotangents, ty = net.differentiate(dy, tangents)

    assert set(cotangents) == set(leaves)
    for name, leaf in leaves.items():
        expected = leaf.grad.numpy()
        error = np.abs(cotangents[name] - expected).max() / np.abs(expected).max()
        assert error < TOLERANCE, f"{name}: {error}"
    pairs = [(tangents[k].astype(np.float64), leaves[k].grad.numpy()) for k in leaves]
    size = math.sqrt(
        sum((t**2).sum() * (d.astype(np.float64) ** 2).sum() for t, d in pairs)
    )
    expected = sum((t * d).sum() for t, d in pairs)
    assert abs((dy.astype(np.float64) * ty).sum() - expected) < TOLERANCE * size


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    fan_in = math.prod(shape[1:]) if len(shape) > 1 else 1
    values = np.random.default_rng(seed).normal(size=shape)
    return (values / math.sqrt(fan_in)).astype(np.float32)


def image(*shape: int) -> np.ndarray:
    return np.random.default_rng(11).normal(size=shape).astype(np.float32)


def affine(channels: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    scale = np.random.default_rng(seed).uniform(0.5, 1.5, channels)
    return scale.astype(np.float32), normal(channels, seed=seed)


def test_mlp() -> None:
    sizes = (20, 32, 16, 10)
    weights = {}
    for i in range(3):
        weights[f"w{i}"] = normal(sizes[i + 1], sizes[i], seed=i)
        weights[f"b{i}"] = normal(sizes[i + 1], seed=i + 10)
    net = Network(image(8, 20), weights)
    h = "x"
    for i in range(3):
        h = net("Gemm", h, f"w{i}", f"b{i}", transB=1)
        h = net("Relu", h) if i < 2 else h
    net("LogSoftmax", h)

    def forward(t: Tensors) -> torch.Tensor:
        h = t["x"]
        for i in range(3):
            h = F.linear(h, t[f"w{i}"], t[f"b{i}"])
            h = torch.relu(h) if i < 2 else h
        return torch.log_softmax(h, -1)

    check(net, forward)


def test_lenet_on_digits_with_a_flat_background() -> None:
    x = image(4, 1, 20, 20)
    x[:, :, :6], x[:, :, 14:] = 0, 0
    weights = {
        "w1": normal(6, 1, 5, 5), "b1": np.abs(normal(6)), "w2": normal(16, 6, 3, 3),
        "b2": np.abs(normal(16)), "w3": normal(144, 10), "b3": normal(10),
    }  # fmt: skip
    net = Network(x, weights)
    pool = {"kernel_shape": [2, 2], "strides": [2, 2]}
    h = net("MaxPool", net("Relu", net("Conv", "x", "w1", "b1")), **pool)
    h = net("MaxPool", net("Relu", net("Conv", h, "w2", "b2")), **pool)
    h = net("Reshape", h, net.ints(4, -1))
    net("Add", net("MatMul", h, "w3"), "b3")

    def forward(t: Tensors) -> torch.Tensor:
        h = F.max_pool2d(torch.relu(F.conv2d(t["x"], t["w1"], t["b1"])), 2)
        h = F.max_pool2d(torch.relu(F.conv2d(h, t["w2"], t["b2"])), 2)
        return h.flatten(1) @ t["w3"] + t["b3"]

    check(net, forward)


def norm(t: Tensors, x: torch.Tensor, name: str) -> torch.Tensor:
    return F.batch_norm(x, None, None, t[f"{name}.s"], t[f"{name}.b"], training=True)


def test_residual_block_with_batch_normalisation() -> None:
    weights = {
        "stem": normal(8, 3, 7, 7), "w1": normal(12, 8, 3, 3), "w2": normal(12, 12, 3, 3),
        "w3": normal(12, 8, 1, 1), "head": normal(5, 12), "bias": normal(5),
    }  # fmt: skip
    for i, (name, channels) in enumerate({"n0": 8, "n1": 12, "n2": 12, "n3": 12}.items()):
        weights[f"{name}.s"], weights[f"{name}.b"] = affine(channels, i)
    net = Network(image(4, 3, 24, 24), weights)
    h = net("Conv", "x", "stem", strides=[2, 2], pads=[3, 3, 3, 3])
    h = net("Relu", net.batch_norm(h, "n0"))
    h = net("MaxPool", h, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    a = net("Conv", h, "w1", strides=[2, 2], pads=[1, 1, 1, 1])
    a = net("Relu", net.batch_norm(a, "n1"))
    a = net.batch_norm(net("Conv", a, "w2", pads=[1, 1, 1, 1]), "n2")
    b = net.batch_norm(net("Conv", h, "w3", strides=[2, 2]), "n3")
    h = net("GlobalAveragePool", net("Relu", net("Add", a, b)))
    net("Gemm", net("Flatten", h), "head", "bias", transB=1)

    def forward(t: Tensors) -> torch.Tensor:
        h = torch.relu(norm(t, F.conv2d(t["x"], t["stem"], stride=2, padding=3), "n0"))
        h = F.max_pool2d(h, 3, 2, 1)
        a = torch.relu(norm(t, F.conv2d(h, t["w1"], stride=2, padding=1), "n1"))
        a = norm(t, F.conv2d(a, t["w2"], padding=1), "n2")
        b = norm(t, F.conv2d(h, t["w3"], stride=2), "n3")
        return F.linear(torch.relu(a + b).mean((2, 3)), t["head"], t["bias"])

    check(net, forward)


@pytest.mark.parametrize("stride", [1, 2])
def test_inverted_residual_block(stride: int) -> None:
    weights = {
        "expand": normal(24, 6, 1, 1), "depth": normal(24, 1, 3, 3),
        "project": normal(6, 24, 1, 1),
    }  # fmt: skip
    for i, (name, channels) in enumerate({"n1": 24, "n2": 24, "n3": 6}.items()):
        weights[f"{name}.s"], weights[f"{name}.b"] = affine(channels, i)
    net = Network(image(3, 6, 16, 16), weights)
    zero, six = net.floats(0), net.floats(6)
    h = net("Clip", net.batch_norm(net("Conv", "x", "expand"), "n1"), zero, six)
    spread = {"group": 24, "pads": [1, 1, 1, 1], "strides": [stride, stride]}
    h = net("Clip", net.batch_norm(net("Conv", h, "depth", **spread), "n2"), zero, six)
    h = net.batch_norm(net("Conv", h, "project"), "n3")
    if stride == 1:
        net("Add", h, "x")

    def forward(t: Tensors) -> torch.Tensor:
        h = F.relu6(norm(t, F.conv2d(t["x"], t["expand"]), "n1"))
        h = F.conv2d(h, t["depth"], stride=stride, padding=1, groups=24)
        h = norm(t, F.conv2d(F.relu6(norm(t, h, "n2")), t["project"]), "n3")
        return h + t["x"] if stride == 1 else h

    check(net, forward)


def encoder_layer(t: Tensors, heads: int, approximate: str) -> torch.Tensor:
    x = t["x"]
    n, length, width = x.shape
    qkv = F.layer_norm(x, (width,), t["s1"], t["b1"]) @ t["qkv"] + t["qkv.b"]
    q, k, v = (
        part.reshape(n, length, heads, -1).transpose(1, 2) for part in qkv.split(width, -1)
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(width // heads)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(n, length, width)
    h = x + mixed @ t["out"] + t["out.b"]
    up = F.layer_norm(h, (width,), t["s2"], t["b2"]) @ t["up"] + t["up.b"]
    return h + F.gelu(up, approximate=approximate) @ t["down"] + t["down.b"]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_transformer_encoder_layer(approximate: str) -> None:
    n, length, width, heads = 2, 6, 16, 4
    weights = {
        "qkv": normal(3 * width, width).T.copy(), "qkv.b": normal(3 * width),
        "out": normal(width, width, seed=1), "out.b": normal(width, seed=2),
        "up": normal(width, 32, seed=3), "up.b": normal(32, seed=4),
        "down": normal(32, width, seed=5), "down.b": normal(width, seed=6),
    }  # fmt: skip
    for i in (1, 2):
        weights[f"s{i}"], weights[f"b{i}"] = affine(width, i)
    net = Network(image(n, length, width), weights)

    def linear(x: str, name: str) -> str:
        return net("Add", net("MatMul", x, name), f"{name}.b")

    def split(i: int) -> str:
        part = net(
            "Slice", qkv, net.ints(i * width), net.ints((i + 1) * width), net.ints(-1)
        )
        cut = net("Reshape", part, net.ints(n, length, heads, -1))
        return net("Transpose", cut, perm=[0, 2, 1, 3])

    qkv = linear(net("LayerNormalization", "x", "s1", "b1"), "qkv")
    q, k, v = (split(i) for i in range(3))
    scores = net("MatMul", q, net("Transpose", k, perm=[0, 1, 3, 2]))
    scores = net("Div", scores, net.floats(math.sqrt(width // heads)))
    mixed = net("Transpose", net("MatMul", net("Softmax", scores), v), perm=[0, 2, 1, 3])
    mixed = linear(net("Reshape", mixed, net.ints(n, length, width)), "out")
    h = net("Add", "x", mixed)
    up = linear(net("LayerNormalization", h, "s2", "b2"), "up")
    net("Add", h, linear(net("Gelu", up, approximate=approximate), "down"))

    check(net, lambda t: encoder_layer(t, heads, approximate))
