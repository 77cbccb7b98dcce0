"""Forward nodes with inferred shapes, ready to be differentiated and run."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.values import value_table
from edgetrain.compiler.vjp import prepare
from edgetrain.tensors import TensorSpec

Arrays = dict[str, np.ndarray]


def node(op: str, inputs: str, outputs: str, **attributes: object) -> Node:
    return Node(
        op, f"{op}({inputs})", tuple(inputs.split()), tuple(outputs.split()), attributes
    )


class Graph:
    """Forward nodes on given inputs, all shapes inferred."""

    def __init__(self, nodes: list[Node], inputs: Arrays, constants: Arrays | None = None):
        self.inputs = inputs
        constants = constants or {}
        infos = [
            helper.make_tensor_value_info(
                k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape
            )
            for k, v in inputs.items()
        ]
        tensors = [onnx.numpy_helper.from_array(v, k) for k, v in constants.items()]
        graph = helper.make_graph([n.to_proto() for n in nodes], "g", infos, [], tensors)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
        inferred = onnx.shape_inference.infer_shapes(
            model, strict_mode=True, data_prop=True
        )
        self.g = GraphBuilder(value_table(inferred), constants)
        self.nodes = prepare(self.g, nodes)
        for n in self.nodes:
            self.g.append(n)

    def seed(self, value: str, array: np.ndarray | None = None) -> str:
        """A cotangent or tangent as an input; ones unless given."""
        name = f"seed/{value}"
        shape = self.g.shape(value)
        self.inputs[name] = np.ones(shape, np.float32) if array is None else array
        self.g.describe(name, "float32", shape)
        return name

    def run(self, wanted: dict[str, str]) -> Arrays:
        """The values of `wanted`, primal name to the value of its shape."""
        specs = {
            n: TensorSpec(n, self.g.dtype(p), self.g.shape(p)) for p, n in wanted.items()
        }
        fed = list(self.inputs)
        model = self.g.model([self.g.spec(v) for v in fed], specs.values(), "test")
        onnx.checker.check_model(model)
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = ort.InferenceSession(model.SerializeToString(), options)
        feeds = {k: v.copy() for k, v in self.inputs.items()}
        found = dict(zip(specs, session.run(list(specs), feeds), strict=True))
        return {p: found[n] for p, n in wanted.items()}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
