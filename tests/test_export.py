"""The exported model is the user's file with new weight values, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import cached
from onnx import TensorProto, helper, numpy_helper
from small_models import aliased, build, convnet, mlp, normal

from edgetrain.compiler import agreement, intake, reference
from edgetrain.compiler.export import differences, export
from edgetrain.compiler.load import load
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.program import Program
from edgetrain.errors import GraphError

node = helper.make_node


def typed_fields() -> onnx.ModelProto:
    """A model whose tensors lie in float_data, and in value_floats and value_float."""
    model = build(
        [
            node("Constant", [], ["scale"], value_floats=[1.0, 2.0, 3.0]),
            node("Constant", [], ["slope"], value_float=0.25),
            node("Mul", ["x", "scale"], ["a"]),
            node("PRelu", ["a", "slope"], ["b"]),
            node("MatMul", ["b", "w"], ["y"]),
        ],
        [("x", ["N", 3])],
        ["y"],
    )
    tensor = helper.make_tensor("w", TensorProto.FLOAT, [3, 2], normal(6).tolist())
    model.graph.initializer.append(tensor)
    return model


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "float32": mlp,
    "float16": lambda: mlp("float16"),
    "float64": lambda: mlp("float64"),
    "constant nodes": convnet,
    "training": lambda: convnet(17),
    "aliases": aliased,
    "typed fields": typed_fields,
}


def perturbed(program: Program, seed: int = 3) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {
        name: value + np.asarray(generator.uniform(0.02, 0.3, value.shape), np.float32)
        for name, value in program.weights.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_unchanged_weights_give_the_file_bit_for_bit(name: str) -> None:
    model = MODELS[name]()
    program = normalise(model, batch=2)
    same = export(model, program, program.weights)
    assert same.SerializeToString() == model.SerializeToString()
    assert export(model, program, {}).SerializeToString() == model.SerializeToString()


@pytest.mark.parametrize("name", MODELS)
def test_the_exported_file_computes_what_was_trained(name: str) -> None:
    model = MODELS[name]()
    program = normalise(model, batch=2)
    new = perturbed(program)
    exported = export(model, program, new)
    again = normalise(exported, batch=2)
    tolerance = 1e-3 if name == "float16" else 1e-6
    assert again.weights.keys() == new.keys()
    for key, value in new.items():
        np.testing.assert_allclose(again.weights[key], value, rtol=tolerance)
    feeds = agreement.sample(program.model.graph, 2)
    trained = reference.run(program.model, {**feeds, **new})
    inputs = {spec.name: feeds[spec.name] for spec in program.inputs}
    file_graph = intake.to_inference(intake.open_up(exported))
    dtype = np.dtype(program.sources[next(iter(new))].dtype)
    inputs = {name: value.astype(dtype) for name, value in inputs.items()}
    written = reference.run(file_graph, inputs)
    assert agreement.compare(trained, written, 1e-2 if name == "float16" else 1e-6) == ""
    before = reference.run(intake.to_inference(intake.open_up(model)), inputs)
    assert agreement.compare(before, written, 1e-2) != ""


@pytest.mark.parametrize("name", ["float32", "float16", "float64", "typed fields"])
def test_only_weight_values_differ(name: str) -> None:
    model = MODELS[name]()
    program = normalise(model, batch=2)
    exported = export(model, program, perturbed(program))
    assert exported != model
    assert differences(model, exported) == []


def test_bfloat16_trains_as_float32_and_is_rounded_on_export() -> None:
    model = mlp("bfloat16")
    program = normalise(model, batch=2)
    assert export(model, program, program.weights) == model
    exported = export(model, program, perturbed(program))
    assert differences(model, exported) == []
    again = normalise(exported, batch=2)
    for name, value in perturbed(program).items():
        np.testing.assert_allclose(again.weights[name], value, rtol=2**-8)


def test_nodes_that_cannot_hold_a_value_become_constants() -> None:
    model = convnet()
    program = normalise(model, batch=2)
    exported = export(model, program, perturbed(program))
    (line,) = differences(model, exported)
    assert "'fill' (ConstantOfShape)" in line

    model = aliased()
    program = normalise(model, batch=2)
    new = perturbed(program)
    lines = differences(model, export(model, program, new))
    assert ["alias_scale" in lines[0], "alias_bias" in lines[1]] == [True, True]
    together = {**new, "norm2.scale": new["norm1.scale"], "norm2.bias": new["norm1.bias"]}
    assert differences(model, export(model, program, together)) == []


def test_an_alias_alone_lends_its_value_to_the_shared_tensor() -> None:
    model = aliased()
    model.graph.node[2].input[1] = "scale2"
    model.graph.node.insert(0, node("Identity", ["norm1.scale"], ["scale2"], "first"))
    program = normalise(model, batch=2)
    assert {"norm1.scale", "norm2.scale"} < set(program.weights)
    exported = export(model, program, perturbed(program))
    assert len(differences(model, exported)) == 2
    again = normalise(exported, batch=2)
    np.testing.assert_array_equal(
        again.weights["norm1.scale"], perturbed(program)["norm1.scale"]
    )


@settings(max_examples=25, deadline=None)
@given(moved=st.sets(st.integers(0, 31)), dtype=st.sampled_from(["float16", "float64"]))
def test_elements_left_alone_keep_the_exact_value_of_the_file(moved, dtype) -> None:
    model = mlp(dtype)
    program = normalise(model, batch=1)
    new = program.weights["w1"].copy()
    new.reshape(-1)[list(moved)] += 1
    written = numpy_helper.to_array(
        export(model, program, {"w1": new}).graph.initializer[0]
    )
    kept = numpy_helper.to_array(model.graph.initializer[0])
    assert written.dtype == kept.dtype
    unequal = np.flatnonzero((written != kept).reshape(-1))
    assert set(unequal.tolist()) == moved


def test_weights_that_do_not_fit_are_refused() -> None:
    model = mlp()
    program = normalise(model, batch=2)
    with pytest.raises(GraphError, match="'other' is not a weight"):
        export(model, program, {"other": normal(1)})
    with pytest.raises(GraphError, match=r"'b1' has shape \[4\], the model's has \[8\]"):
        export(model, program, {"b1": normal(4)})
    with pytest.raises(GraphError, match="'w1' is not a weight"):
        export(typed_fields(), program, {"w1": normal(8, 4)})


def test_every_other_change_is_named() -> None:
    def edit(change: Callable[[onnx.ModelProto], object]) -> list[str]:
        model = convnet()
        change(model)
        return differences(convnet(), model)

    assert edit(lambda m: m.SerializeToString()) == []
    assert edit(lambda m: setattr(m, "producer_name", "x")) == ["producer_name"]
    assert edit(lambda m: setattr(m.graph, "name", "x")) == ["graph.name"]
    assert edit(lambda m: m.metadata_props.add(key="k", value="v")) == ["metadata_props"]
    assert edit(lambda m: m.opset_import.add(domain="d", version=1)) == ["opset_import"]
    assert "only in the first" in edit(lambda m: m.graph.node.pop())[0]
    assert "name" in edit(lambda m: setattr(m.graph.node[2], "name", "x"))[0]
    assert "attribute" in edit(lambda m: m.graph.node[2].attribute.pop())[0]
    assert edit(lambda m: m.graph.initializer[0].dims.append(1)) == [
        "initializer 0 'bn.scale': dims"
    ]
    setting = edit(
        lambda m: setattr(m.graph.initializer[7], "raw_data", b"\x06" + bytes(7))
    )
    assert setting == ["initializer 7 'five': raw_data"]


def test_a_real_file_with_weights_in_constant_nodes() -> None:
    model = load(cached("text_direction.onnx"))
    program = normalise(model, batch=1, shapes={"x": (3, 48, 192)})
    assert export(model, program, program.weights) == model
    exported = export(model, program, perturbed(program))
    assert exported != model
    assert differences(model, exported) == []
