"""A network built node by node, differentiated in both modes and run."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.jvp import jvp
from edgetrain.compiler.values import value_table
from edgetrain.compiler.vjp import prepare, vjp
from edgetrain.tensors import TensorSpec

TRAINING = {"training_mode": 1, "momentum": 0.0}
Weights = dict[str, np.ndarray]


class Network:
    """A forward graph from `x` to `y`, built node by node."""

    def __init__(self, x: np.ndarray, weights: Weights) -> None:
        self.primals = {"x": x, **weights}
        self.scratch: Weights = {}
        self.nodes: list[Node] = []
        self.constants: dict[str, np.ndarray] = {}

    def __call__(
        self, op: str, *inputs: str, outputs: int = 1, **attributes: object
    ) -> str:
        name = f"{op}_{len(self.nodes)}"
        names = tuple(name if i == 0 else f"{name}.{i}" for i in range(outputs))
        self.nodes.append(Node(op, name, inputs, names, attributes))
        return name

    def ints(self, *values: int) -> str:
        name = f"ints_{len(self.constants)}"
        self.constants[name] = np.array(values, np.int64)
        return name

    def floats(self, value: float) -> str:
        name = f"float_{len(self.constants)}"
        self.constants[name] = np.array(value, np.float32)
        return name

    def batch_norm(self, x: str, name: str) -> str:
        """In training mode, on scratch statistics."""
        scratch = (f"{name}.mean", f"{name}.var")
        self.scratch |= {k: np.ones_like(self.primals[f"{name}.s"]) for k in scratch}
        weights = (f"{name}.s", f"{name}.b", *scratch)
        return self("BatchNormalization", x, *weights, outputs=3, **TRAINING)

    def differentiate(
        self, dy: np.ndarray, tangents: Weights
    ) -> tuple[Weights, np.ndarray]:
        """All cotangents for `dy`, and the output's tangent for `tangents`."""
        feeds = self.primals | self.scratch
        infos = [
            helper.make_tensor_value_info(k, onnx.TensorProto.FLOAT, v.shape)
            for k, v in feeds.items()
        ]
        tensors = [onnx.numpy_helper.from_array(v, k) for k, v in self.constants.items()]
        protos = [n.to_proto() for n in self.nodes]
        graph = helper.make_graph(protos, "net", infos, [], tensors)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
        inferred = onnx.shape_inference.infer_shapes(
            model, strict_mode=True, data_prop=True
        )
        g = GraphBuilder(value_table(inferred), self.constants)
        nodes = prepare(g, self.nodes)
        for n in nodes:
            g.append(n)
        y = nodes[-1].output
        feeds["dy"] = dy
        feeds |= {f"t/{k}": v for k, v in tangents.items()}
        for name, value in feeds.items():
            g.describe(name, "float32", value.shape)
        back = vjp(g, nodes, {y: "dy"}, self.primals)
        ahead = jvp(g, nodes, {k: f"t/{k}" for k in tangents})[y]
        outputs = {n: TensorSpec(n, "float32", g.shape(k)) for k, n in back.items()}
        outputs[ahead] = TensorSpec(ahead, "float32", dy.shape)
        for n in nodes:
            if n.op_type == "BatchNormalization":
                outputs |= {s: g.spec(s) for s in n.outputs[1:]}
        inputs = [g.spec(k) for k in feeds]
        return run(g.model(inputs, outputs.values(), "net"), feeds, back, ahead)


def run(
    model: onnx.ModelProto, feeds: Weights, back: dict[str, str], ahead: str
) -> tuple[Weights, np.ndarray]:
    onnx.checker.check_model(model)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options)
    names = [o.name for o in session.get_outputs()]
    found = dict(zip(names, session.run(names, feeds), strict=True))
    return {k: found[n] for k, n in back.items()}, found[ahead]
