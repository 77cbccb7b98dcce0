"""What every normalised model must satisfy."""

from __future__ import annotations

import numpy as np
import onnx

from edgetrain.compiler import agreement, intake, reference
from edgetrain.compiler.program import OPSET, Program
from edgetrain.compiler.values import value_table


def outputs_of(program: Program, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return reference.run(program.model, {**feeds, **program.weights})


def expect_same(model: onnx.ModelProto, program: Program, tolerance: float = 1e-6) -> None:
    """Another random input than the one that normalise itself checks."""
    feeds = agreement.sample(program.model.graph, program.batch, seed=5)
    feeds = {spec.name: feeds[spec.name] for spec in program.inputs}
    original = intake.to_inference(intake.open_up(model))
    expected = reference.run(original, feeds)
    assert agreement.compare(expected, outputs_of(program, feeds), tolerance) == ""
    assert list(expected) == [spec.name for spec in program.outputs]


def expect_form(program: Program) -> None:
    """Every promise of Program's docstring."""
    graph = program.model.graph
    assert [(o.domain, o.version) for o in program.model.opset_import] == [("", OPSET)]
    onnx.checker.check_model(program.model, full_check=True)
    table = value_table(program.model)
    produced = [name for n in graph.node for name in n.output if name]
    assert all(name in table for name in produced)
    names = [info.name for info in graph.input]
    assert names == [spec.name for spec in program.inputs] + list(program.weights)
    assert program.weights.keys().isdisjoint(t.name for t in graph.initializer)
    assert program.sources.keys() == program.weights.keys()
    for name, value in program.weights.items():
        assert value.dtype == np.float32
        assert table[name].shape == value.shape
    ops = {n.op_type for n in graph.node}
    assert ops.isdisjoint({"Constant", "ConstantOfShape", "Dropout", "Shape", "Size", "If"})
    for n in graph.node:
        if n.op_type == "BatchNormalization":
            assert len(n.output) == 1
            assert not any(a.name == "training_mode" and a.i for a in n.attribute)
    read = {name for n in graph.node for name in n.input}
    assert all(name in read for name in program.weights)
