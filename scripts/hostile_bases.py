"""Small healthy models, of many kinds, that `mutate_models.py` damages."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import numpy_helper, parser
from wheels import CACHE

# Weights are the inputs whose names begin with w; they become initializers.
_TEXTS: Final = {
    "dense": """
        <ir_version: 8, opset_import: ["" : 20]>
        g (float[N, 4] x, float[8, 4] w1, float[8] w2, float[8, 3] w3) => (float[N, 3] y) {
            h = Gemm<transB = 1>(x, w1, w2)
            r = Relu(h)
            y = MatMul(r, w3)
        }""",
    "image": """
        <ir_version: 7, opset_import: ["" : 13]>
        g (float[N, 2, 8, 8] x, float[4, 2, 3, 3] w1, float[4] w2, float[4] w3, float[4] w4,
           float[4] w5, float[4] w6, float[4, 1, 3, 3] w7, float[4, 3] w8)
            => (float[N, 3] y) {
            c = Conv<pads = [1, 1, 1, 1], strides = [1, 1]>(x, w1, w2)
            full = Constant<value_ints = [0, 0, 0, 0, 0, 0, 1, 1]>()
            p = Pad(c, full)
            n = BatchNormalization<epsilon = 0.001>(p, w3, w4, w5, w6)
            r = LeakyRelu<alpha = 0.1>(n)
            d = Conv<group = 4, dilations = [1, 1], kernel_shape = [3, 3]>(r, w7)
            m = MaxPool<kernel_shape = [2, 2], strides = [2, 2], ceil_mode = 1>(d)
            a = AveragePool<kernel_shape = [2, 2], auto_pad = "SAME_UPPER">(m)
            e = ReduceMean<axes = [2, 3], keepdims = 0>(a)
            z = MatMul(e, w8)
            y = Softmax<axis = -1>(z)
        }""",
    "attention": """
        <ir_version: 9, opset_import: ["" : 18]>
        g (float[N, 3, 6] x, float[6, 8] w1, float[8, 8] w2, float[8, 8] w3, float[8] w4,
           float[8] w5, float[8, 4] w6) => (float[N, 4] y) {
            e = MatMul(x, w1)
            q = MatMul(e, w2)
            k = MatMul(e, w3)
            heads = Constant<value_ints = [0, 0, 2, 4]>()
            qh = Reshape(q, heads)
            kh = Reshape(k, heads)
            qt = Transpose<perm = [0, 2, 1, 3]>(qh)
            kt = Transpose<perm = [0, 2, 3, 1]>(kh)
            s = MatMul(qt, kt)
            p = Softmax<axis = -1>(s)
            et = Transpose<perm = [0, 2, 1, 3]>(qh)
            o = MatMul(p, et)
            back = Transpose<perm = [0, 2, 1, 3]>(o)
            flat = Constant<value_ints = [0, 0, 8]>()
            j = Reshape(back, flat)
            l = Add(e, j)
            n = LayerNormalization<axis = -1, epsilon = 0.00001>(l, w4, w5)
            one = Constant<value_ints = [1]>()
            mean = ReduceMean<keepdims = 0>(n, one)
            y = Gemm(mean, w6)
        }""",
    "dynamic_shape": """
        <ir_version: 8, opset_import: ["" : 14]>
        g (float[N, 3, 4] x, float[12, 5] w1, float[5, 2] w2) => (float[N, 2] y) {
            shape = Shape(x)
            zero = Constant<value = int64[1] {0}>()
            one = Constant<value = int64[1] {1}>()
            rows = Slice(shape, zero, one)
            rest = Constant<value = int64[1] {-1}>()
            target = Concat<axis = 0>(rows, rest)
            f = Reshape(x, target)
            h = MatMul(f, w1)
            five = Constant<value = int64[1] {5}>()
            filled = ConstantOfShape<value = float[1] {0.5}>(five)
            b = Add(h, filled)
            t = Tanh(b)
            parts = Constant<value = int64[2] {2, 3}>()
            left, right = Split<axis = 1>(t, parts)
            c = Concat<axis = 1>(right, left)
            y = MatMul(c, w2)
        }""",
    "recurrent": """
        <ir_version: 8, opset_import: ["" : 16]>
        g (int64[N, 5] x, float[9, 4] w1, float[1, 12, 4] w2, float[1, 12, 4] w3,
           float[1, 24] w4, float[4, 3] w5) => (float[N, 3] y) {
            e = Gather<axis = 0>(w1, x)
            t = Transpose<perm = [1, 0, 2]>(e)
            all, last = GRU<hidden_size = 4, linear_before_reset = 1>(t, w2, w3, w4)
            first = Constant<value = int64[1] {0}>()
            h = Squeeze(last, first)
            y = MatMul(h, w5)
        }""",
    "sampling": """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 2, 4, 4] x, float[2, 3, 2, 2] w1, float[3] w2, float[3] w3,
           float[48, 2] w4) => (float[N, 2] y) {
            u = ConvTranspose<strides = [2, 2]>(x, w1)
            s = InstanceNormalization(u, w2, w3)
            scales = Constant<value = float[4] {1.0, 1.0, 0.5, 0.5}>()
            d = Resize<mode = "nearest">(s, , scales)
            low = Constant<value = float {-1.0}>()
            c = Clip(d, low)
            f = Flatten<axis = 1>(c)
            k = Constant<value = int64[1] {48}>()
            v, i = TopK<axis = -1>(f, k)
            y = MatMul(f, w4)
        }""",
    "branches": """
        <ir_version: 8, opset_import: ["" : 16]>
        g (float[N, 4] x, float[4, 4] w1, float[4, 2] w2) => (float[N, 2] y) {
            yes = Constant<value = bool {1}>()
            h = If(yes) <
                then_branch = a () => (float[N, 4] p) { p = MatMul(x, w1) },
                else_branch = b () => (float[N, 4] q) { q = Relu(x) }
            >
            n = Constant<value = int64 {3}>()
            s = Constant<value = float[1] {0.5}>()
            o = Loop(n, yes, s) <
                body = l (int64 i, bool c, float[1] t) => (bool d, float[1] u) {
                    d = Identity(c)
                    u = Add(t, t)
                }
            >
            m = Mul(h, o)
            y = MatMul(m, w2)
        }""",
    "functions": """
        <ir_version: 9, opset_import: ["" : 18, "own" : 1]>
        g (float[N, 4] x, float[4, 6] w1, float[6, 6] w2, float[6, 2] w3)
            => (float[N, 2] y) {
            a = own.layer<slope = 0.2>(x, w1)
            b = own.layer<slope = 0.1>(a, w2)
            y = MatMul(b, w3)
        }
        <domain: "own", opset_import: ["" : 18, "own" : 1]>
        layer<slope>(x, w) => (y) {
            h = MatMul(x, w)
            y = own.act<slope = @slope>(h)
        }
        <domain: "own", opset_import: ["" : 18]>
        act<slope>(x) => (y) { y = LeakyRelu<alpha: float = @slope>(x) }""",
    "quantised": """
        <ir_version: 8, opset_import: ["" : 13]>
        g (float[N, 4] x, float[4, 6] w1, float[6, 3] w2) => (float[N, 3] y)
        <float scale = {0.05}, uint8 zero = {128}> {
            q = QuantizeLinear(x, scale, zero)
            d = DequantizeLinear(q, scale, zero)
            h = MatMul(d, w1)
            r = Relu(h)
            y = MatMul(r, w2)
        }""",
    "old": """
        <ir_version: 3, opset_import: ["" : 7]>
        g (float[N, 6] x, float[6, 4] w1, float[4] w2, float[4, 2] w3) => (float[N, 2] y) {
            h = Gemm<alpha = 1.0, beta = 1.0>(x, w1, w2)
            u = Unsqueeze<axes = [2]>(h)
            s = Squeeze<axes = [2]>(u)
            b = Dropout<ratio = 0.3>(s)
            k = Clip<max = 6.0, min = 0.0>(b)
            y = MatMul(k, w3)
        }""",
}
# The smallest real files, where `fetch_models.py` and `export_models.py` have put them.
_FILES: Final = ("torch_gru_leg", "torch_mbv2_leg", "torch_unet_leg", "qdq_resnet")


def bases() -> dict[str, bytes]:
    """The healthy files, by name; each is of opset 7 to 20 and under 100 kB."""
    found = {name: _built(text).SerializeToString() for name, text in _TEXTS.items()}
    for name in _FILES:
        path: Path = CACHE / "inputs" / "models" / f"{name}.onnx"
        if path.exists():
            found[name] = path.read_bytes()
    return found


def _built(text: str) -> onnx.ModelProto:
    model = parser.parse_model(text)
    graph = model.graph
    rng = np.random.default_rng(0)
    for info in list(graph.input):
        if info.name.startswith("w"):
            shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
            value = rng.standard_normal(shape, np.float32) / np.float32(2)
            graph.initializer.append(numpy_helper.from_array(value, info.name))
            if model.ir_version > 3:  # before, an initializer had to be an input too
                graph.input.remove(info)
    return model
