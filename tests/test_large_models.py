"""A model's large weights are set apart first; it stays the same model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from normal_form import expect_form, expect_same
from onnx import helper
from small_models import aliased, build, conditional, convnet, mlp, normal

from edgetrain.compiler import agreement, intake, large, reference, sites
from edgetrain.compiler.export import differences, export
from edgetrain.compiler.normalise import normalise

MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "perceptron": mlp,
    "float16": lambda: mlp("float16"),
    "float64": lambda: mlp("float64"),
    "convolutions": convnet,
    "aliases": aliased,
    "branches": lambda: conditional(condition_from_data=False),
}


@pytest.mark.parametrize("name", MODELS)
def test_fed_back_they_give_the_same_function(name: str) -> None:
    model = MODELS[name]()
    before = model.SerializeToString(deterministic=True)
    skeleton, apart = large.set_apart(model, sites.find(model), least_bytes=1)
    assert model.SerializeToString(deterministic=True) == before
    assert len(skeleton.graph.initializer) + len(apart) == len(model.graph.initializer)
    opened = intake.to_inference(intake.open_up(skeleton))
    large.declare(opened.graph, apart)
    whole = intake.to_inference(intake.open_up(model))
    x = whole.graph.input[0]
    shape = [d.dim_value or 2 for d in x.type.tensor_type.shape.dim]
    dtype = helper.tensor_dtype_to_np_dtype(x.type.tensor_type.elem_type)
    feeds = {x.name: normal(*shape).astype(dtype)}
    expected = reference.run(whole, feeds)
    got = reference.run(opened, {**feeds, **apart})
    tolerance = 1e-2 if name == "float16" else 1e-6
    assert agreement.compare(expected, got, tolerance) == ""
    assert apart


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_a_model_over_the_limit_normalises_and_exports(dtype: str) -> None:
    side = 760  # two bytes an element are enough
    node = helper.make_node
    model = build(
        [node("MatMul", ["x", "big"], ["a"]), node("Add", ["a", "small"], ["y"])],
        [("x", ["N", side])],
        ["y"],
        {
            "big": normal(side, side).astype(dtype),
            "small": normal(side).astype(dtype),
        },
    )
    data_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.elem_type = data_type
    assert len(large.set_apart(model, sites.find(model))[1]) == 1
    program = normalise(model, batch=2)
    expect_form(program)
    if dtype == "float32":
        expect_same(model, program)
    assert set(program.weights) == {"big", "small"}
    assert {source.dtype for source in program.sources.values()} == {dtype}
    assert (dtype == "float32") == (not program.remarks)
    assert export(model, program, {}) == model
    new = {name: value + 1 for name, value in program.weights.items()}
    exported = export(model, program, new)
    assert differences(model, exported) == []
    again = normalise(exported, batch=2).weights
    for name, value in new.items():
        np.testing.assert_allclose(again[name], value, rtol=1e-2, atol=1e-2)
