"""`edgetrain.grad`: the file it makes, and the laws its derivatives obey."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from loss_case import one_thread
from onnx import helper
from small_models import build, convnet, mlp, normal
from test_architecture import loaded_by

import edgetrain
from edgetrain.compiler.grad import grad
from edgetrain.errors import ConfigError, GraphError, UnsupportedOpError
from edgetrain.losses import LossOptions

BATCH = 3
MODES = ("vjp", "jvp")
MODELS = {"mlp": mlp, "convnet": convnet}
LOSS = {"mlp": "mse", "convnet": "softmax_cross_entropy"}
Arrays = dict[str, np.ndarray]


def loaded(model: onnx.ModelProto) -> ort.InferenceSession:
    """In stock ONNX Runtime, after the checker has passed it."""
    onnx.checker.check_model(model, full_check=True)
    return ort.InferenceSession(model.SerializeToString(), one_thread())


def values(specs: Sequence[ort.NodeArg], seed: int = 0) -> Arrays:
    """Random numbers for inputs: small integers where they are class indices."""
    rng = np.random.default_rng(seed)
    return {
        spec.name: rng.integers(0, 3, spec.shape)
        if spec.type == "tensor(int64)"
        else rng.normal(size=spec.shape).astype(np.float32)
        for spec in specs
    }


def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Arrays:
    session = loaded(model)
    names = [out.name for out in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def weights(model: onnx.ModelProto) -> Arrays:
    """The default values of the inputs that have one."""
    inputs = {info.name for info in model.graph.input}
    tensors = (t for t in model.graph.initializer if t.name in inputs)
    return {t.name: onnx.numpy_helper.to_array(t) for t in tensors}


def names(infos: Sequence[onnx.ValueInfoProto]) -> list[str]:
    return [info.name for info in infos]


# The file


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_the_file_is_valid_and_says_all_its_shapes(name, loss, mode):
    result = grad(MODELS[name](), mode=mode, loss=LOSS[name] if loss else None, batch=BATCH)
    session = loaded(result)
    for info in (*result.graph.input, *result.graph.output):
        assert info.type.tensor_type.HasField("shape")
        assert all(d.HasField("dim_value") for d in info.type.tensor_type.shape.dim)
    feeds = values(session.get_inputs())
    for spec, value in zip(session.get_outputs(), session.run(None, feeds), strict=True):
        assert list(value.shape) == spec.shape
        assert np.isfinite(value).all()


def test_inputs_and_outputs_have_speaking_names():
    trained = ["w1", "b1", "w2", "b2"]
    plain = grad(mlp()).graph
    assert names(plain.input) == ["x", "cotangent/y", *trained]
    gradients = [f"gradient/{w}" for w in trained]
    assert names(plain.output) == ["y", *gradients, "cotangent/x"]
    fused = grad(mlp(), loss="mse").graph
    assert names(fused.input) == ["x", "labels", *trained]
    assert names(fused.output) == ["y", "loss", "losses", *gradients]
    tangents = [f"tangent/{w}" for w in trained]
    ahead = grad(mlp(), mode="jvp").graph
    assert names(ahead.input) == ["x", "tangent/x", *tangents, *trained]
    assert names(ahead.output) == ["y", "tangent/y"]
    ahead = grad(mlp(), mode="jvp", loss="mse").graph
    assert names(ahead.output) == ["y", "loss", "losses", "tangent/y", "tangent/loss"]


def test_weights_are_inputs_whose_default_is_the_file_s_value():
    model = mlp()
    result = grad(model, loss="mse", batch=BATCH)
    session = loaded(result)
    assert [i.name for i in session.get_overridable_initializers()] == [
        "w1", "b1", "w2", "b2"
    ]  # fmt: skip
    feeds = values(session.get_inputs())
    assert set(feeds) == {"x", "labels"}
    own = run(result, feeds)
    np.testing.assert_array_equal(run(result, {**feeds, **weights(result)})["y"], own["y"])
    stock = ort.InferenceSession(model.SerializeToString(), one_thread())
    original = stock.run(["y"], {"x": feeds["x"]})[0]
    np.testing.assert_allclose(own["y"], original, rtol=1e-5, atol=1e-6)
    moved = run(result, {**feeds, "b2": weights(result)["b2"] + 1})
    np.testing.assert_allclose(moved["y"], own["y"] + 1, rtol=1e-5)


def test_the_file_says_where_it_comes_from(tmp_path):
    model, path = mlp(), tmp_path / "m.onnx"
    onnx.save(model, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    for source in (path, str(path), model):
        result = grad(source, loss="mse")
        facts = {prop.key: prop.value for prop in result.metadata_props}
        assert facts["edgetrain.source_sha256"] == digest
        assert facts["edgetrain.version"] == result.producer_version != ""
        assert (facts["edgetrain.mode"], facts["edgetrain.loss"]) == ("vjp", "mse")
        assert result.producer_name == "edgetrain"


def test_the_model_itself_is_not_altered():
    model = convnet()
    before = model.SerializeToString(deterministic=True)
    grad(model, loss="softmax_cross_entropy")
    assert model.SerializeToString(deterministic=True) == before


def test_the_name_in_the_package_is_this_function():
    assert edgetrain.grad is grad
    with pytest.raises(AttributeError, match="no attribute 'gradient'"):
        _ = edgetrain.gradient


def test_a_device_that_imports_the_package_does_not_load_onnx():
    assert "onnx" not in loaded_by("import edgetrain, edgetrain.losses")
    assert "onnx" in loaded_by("import edgetrain; edgetrain.grad")


# Laws


@pytest.mark.parametrize("name", MODELS)
def test_the_two_modes_are_transposes_of_each_other(name):
    back, ahead = (grad(MODELS[name](), mode=mode, batch=BATCH) for mode in MODES)
    feeds = values(loaded(ahead).get_inputs())
    u = values(loaded(back).get_inputs(), seed=1)["cotangent/y"]
    pushed = run(ahead, feeds)["tangent/y"]
    pulled = run(back, {"x": feeds["x"], "cotangent/y": u})
    left = (u.astype(np.float64) * pushed).sum()
    pairs = [("cotangent/x", "tangent/x")]
    pairs += [(f"gradient/{w}", f"tangent/{w}") for w in weights(back)]
    terms = [pulled[a].astype(np.float64) * feeds[b] for a, b in pairs]
    size = sum(np.abs(term).sum() for term in terms)
    assert left == pytest.approx(sum(term.sum() for term in terms), abs=1e-5 * size)


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_the_slope_of_the_loss(name):
    back, ahead = (
        grad(MODELS[name](), mode=mode, loss=LOSS[name], batch=BATCH) for mode in MODES
    )
    feeds = values(loaded(ahead).get_inputs())
    feeds["tangent/x"] *= 0
    own = weights(back)
    data = {key: feeds[key] for key in ("x", "labels")}
    pulled = run(back, data)
    slope = sum((pulled[f"gradient/{w}"] * feeds[f"tangent/{w}"]).sum() for w in own)
    pushed = run(ahead, feeds)
    assert pushed["tangent/loss"] == pytest.approx(slope, rel=1e-4)
    assert pulled["loss"] == pytest.approx(pulled["losses"].mean(), rel=1e-6)
    step = 1e-2

    def at(t: float) -> float:
        moved = {w: v + np.float32(t) * feeds[f"tangent/{w}"] for w, v in own.items()}
        return float(run(back, {**data, **moved})["loss"])

    near, far = at(step) - at(-step), at(2 * step) - at(-2 * step)
    assert slope == pytest.approx((8 * near - far) / (12 * step), rel=1e-2)


def test_twice_differentiated_a_model_gives_products_with_its_hessian():
    """The tangent of the gradient, against a difference of gradients."""
    once = grad(quadratic(), loss="mse", batch=BATCH)
    twice = grad(once, mode="jvp", wrt="w", batch=BATCH)
    feeds = values(loaded(twice).get_inputs())
    feeds["tangent/x"] *= 0
    feeds["tangent/labels"] *= 0
    product = run(twice, feeds)["tangent/gradient/w"]
    w, v = weights(once)["w"], feeds["tangent/w"]
    data = {key: feeds[key] for key in ("x", "labels")}
    ends = [run(once, {**data, "w": w + t * v})["gradient/w"] for t in (0.5, -0.5)]
    np.testing.assert_allclose(product, ends[0] - ends[1], rtol=1e-4, atol=1e-5)


def quadratic() -> onnx.ModelProto:
    """y = x @ w: its mean square error is quadratic in w."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "dense")
    return build([node], [("x", ["N", 4])], ["y"], {"w": normal(4, 2)})


def test_what_does_not_depend_has_derivative_zero():
    node = helper.make_node
    nodes = [node("Mul", ["x", "w"], ["y"]), node("Mul", ["a", "v"], ["z"])]
    tensors = {"w": normal(2), "v": normal(2)}
    model = build(nodes, [("x", ["N", 2]), ("a", ["N", 2])], ["y", "z"], tensors)
    result = grad(model, loss="mse", output="y")
    found = run(result, values(loaded(result).get_inputs()))
    assert found["gradient/w"].any()
    assert found["gradient/v"].shape == (2,)
    assert not found["gradient/v"].any()
    ahead = grad(model, mode="jvp", wrt="w", batch=2)
    feeds = values(loaded(ahead).get_inputs())
    feeds["tangent/a"] *= 0
    found = run(ahead, feeds)
    assert found["tangent/y"].any()
    assert not found["tangent/z"].any()


def test_one_value_may_have_several_names():
    """The cotangent of both terms of a sum is that of the sum itself."""
    model = build(
        [helper.make_node("Add", ["x", "a"], ["y"])],
        [("x", ["N", 2]), ("a", ["N", 2])],
        ["y"],
    )
    result = grad(model, batch=BATCH, wrt=())
    feeds = values(loaded(result).get_inputs())
    found = run(result, feeds)
    for name in ("cotangent/x", "cotangent/a"):
        np.testing.assert_array_equal(found[name], feeds["cotangent/y"])


# Choices


@pytest.mark.parametrize(
    ("wrt", "chosen"),
    [
        ("all", ["w1", "b1", "w2", "b2"]),
        ("last:1", ["w2", "b2"]),
        ("w.", ["w1", "w2"]),
        (["w1", "b.*"], ["w1", "b1", "b2"]),
        ((), []),
    ],
)
def test_only_chosen_weights_are_inputs(wrt, chosen):
    result = grad(mlp(), wrt=wrt)
    assert list(weights(result)) == chosen
    gradients = [n for n in names(result.graph.output) if n.startswith("gradient/")]
    assert gradients == [f"gradient/{w}" for w in chosen]


def test_a_final_softmax_is_left_out_of_the_derivative():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["z"], "dense"),
        helper.make_node("Softmax", ["z"], ["y"], "softmax"),
    ]
    model = build(nodes, [("x", ["N", 4])], ["y"], {"w": normal(4, 3) * 1000})
    result = grad(model, loss="softmax_cross_entropy", batch=BATCH)
    feeds = {**values(loaded(result).get_inputs()), "labels": np.array([0, 1, 2])}
    found = run(result, feeds)
    np.testing.assert_allclose(found["y"].sum(axis=1), 1, rtol=1e-5)
    assert np.isfinite(found["loss"])
    assert found["loss"] > 100


def test_options_reach_the_loss():
    ignoring = LossOptions(ignore_index=7)
    model = grad(
        convnet(), loss="softmax_cross_entropy", loss_options=ignoring, batch=BATCH
    )
    feeds = values(loaded(model).get_inputs())
    feeds["labels"][:] = 7
    assert not run(model, feeds)["loss"].any()


def test_integer_inputs_have_no_derivative():
    node = helper.make_node("Gather", ["table", "ids"], ["y"], "look up")
    model = build([node], [], ["y"], {"table": normal(5, 3)})
    info = helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["N", 2])
    model.graph.input.append(info)
    result = grad(model, batch=BATCH)
    assert names(result.graph.input) == ["ids", "cotangent/y", "table"]
    found = run(result, values(loaded(result).get_inputs()))
    assert found["gradient/table"].shape == (5, 3)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"mode": "vpj"}, ConfigError, "did you mean 'vjp'"),
        ({"loss": "mze"}, ConfigError, "did you mean 'mse'"),
        ({"wrt": "w3"}, ConfigError, "wrt = 'w3' matches no weight of: w1"),
        ({"wrt": "["}, ConfigError, r"wrt: '\[' is no pattern"),
        ({"batch": 0}, GraphError, "at least 1"),
        ({"loss": "softmax_cross_entropy"}, GraphError, "two classes or more"),
        ({"loss": "mse", "output": "z"}, GraphError, "output = 'z': the outputs are y"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        grad(mlp(), **options)


def test_several_outputs_and_a_loss_need_a_choice():
    nodes = [helper.make_node(op, ["x"], [op]) for op in ("Sin", "Cos")]
    model = build(nodes, [("x", ["N", 2])], ["Sin", "Cos"])
    with pytest.raises(GraphError, match="applies to with output"):
        grad(model, loss="mse", wrt=())


def test_a_name_that_is_taken_is_refused():
    model = build(
        [helper.make_node("Sin", ["labels"], ["y"])], [("labels", ["N", 2])], ["y"]
    )
    assert names(grad(model, wrt=()).graph.output) == ["y", "cotangent/labels"]
    with pytest.raises(GraphError, match=r"'labels'.*rename"):
        grad(model, loss="mse", wrt=())


def test_an_operator_without_a_rule_is_named():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "dense"),
        helper.make_node("Det", ["h"], ["y"], "volume"),
    ]
    model = build(nodes, [("x", ["N", 2, 2])], ["y"], {"w": normal(2, 2)})
    with pytest.raises(UnsupportedOpError, match=r"'Det'.*'volume'"):
        grad(model)
