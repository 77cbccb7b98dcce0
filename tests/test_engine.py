"""The engine reads and writes held memory in place, and refuses what does not fit."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edgetrain.errors import EngineError
from edgetrain.manifest import GraphSpec, Port, Role
from edgetrain.runtime.engines.onnxruntime import OnnxRuntimeEngine
from edgetrain.sim.device import SlowedEngine

N, K = 3, 4
ENGINE = OnnxRuntimeEngine()


def port(name: str, role: Role, *shape: int, dtype: str = "float32") -> Port:
    return Port(name, role, name, dtype, shape)


SPEC = GraphSpec(
    inputs=(port("x", Role.ACTIVATION, N, K), port("w", Role.WEIGHT, K)),
    outputs=(port("y", Role.ACTIVATION, N, K), port("total", Role.GRADIENT, K)),
    sha256="",
)


def graph(op: str = "Mul") -> bytes:
    """y = x * w, total = sum over rows of y."""
    infos = {
        p.name: helper.make_tensor_value_info(p.name, TensorProto.FLOAT, p.shape)
        for p in (*SPEC.inputs, *SPEC.outputs)
    }
    axes = onnx.numpy_helper.from_array(np.asarray([0], np.int64), "axes")
    nodes = [
        helper.make_node(op, ["x", "w"], ["y"]),
        helper.make_node("ReduceSum", ["y", "axes"], ["total"], keepdims=0),
    ]
    made = helper.make_graph(
        nodes, "g", [infos["x"], infos["w"]], [infos["y"], infos["total"]], [axes]
    )
    opset = [helper.make_opsetid("", 20)]
    return helper.make_model(made, opset_imports=opset, ir_version=10).SerializeToString()


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((N, K)), rng.standard_normal(K)
    return {"x": x.astype(np.float32), "w": w.astype(np.float32)}


def held() -> dict[str, np.ndarray]:
    """Pieces of larger buffers, as a stage's are."""
    weights, gradients = np.zeros(64, np.float32), np.zeros(64, np.float32)
    return {"w": weights[16 : 16 + K], "total": gradients[32 : 32 + K]}


@pytest.mark.parametrize(
    "engine", [ENGINE, SlowedEngine(ENGINE, lambda: 0.5, sleep=lambda _: None)]
)
def test_held_memory_is_read_at_every_run(engine):
    memory = held()
    loaded = engine.load(graph(), SPEC, memory)
    for seed in range(3):
        given = arrays(seed)
        memory["w"][...] = given["w"]
        found = loaded.run({"x": given["x"]})
        assert found.keys() == {"y"}
        np.testing.assert_array_equal(found["y"], given["x"] * given["w"])
        np.testing.assert_allclose(memory["total"], found["y"].sum(0), rtol=1e-6)


def test_only_the_held_piece_of_a_buffer_is_written():
    buffer = np.full(64, 7, np.float32)
    loaded = ENGINE.load(graph(), SPEC, {"total": buffer[32 : 32 + K]})
    loaded.run(arrays())
    outside = np.delete(buffer, np.arange(32, 32 + K))
    assert (outside == 7).all()
    assert (buffer[32 : 32 + K] != 7).any()


@pytest.mark.parametrize(
    "engine", [ENGINE, SlowedEngine(ENGINE, lambda: 0.5, sleep=lambda _: None)]
)
def test_the_same_graph_holds_other_memory(engine):
    one, other = held(), held()
    first = engine.load(graph(), SPEC, one)
    second = first.holding(other)
    given = arrays()
    one["w"][...], other["w"][...] = 1, 2
    assert np.array_equal(first.run(given)["y"], given["x"])
    assert np.array_equal(second.run(given)["y"], 2 * given["x"])
    assert np.array_equal(first.run(given)["y"], given["x"])
    np.testing.assert_allclose(other["total"], 2 * one["total"], rtol=1e-6)


def test_outputs_have_memory_of_their_own():
    loaded = ENGINE.load(graph(), SPEC, {})
    first = loaded.run(arrays(0))
    kept = {name: array.copy() for name, array in first.items()}
    second = loaded.run(arrays(1))
    for name, array in first.items():
        assert np.array_equal(array, kept[name])
        assert not np.shares_memory(array, second[name])


def test_inputs_are_left_alone_and_may_be_read_only():
    given = arrays()
    before = {name: array.copy() for name, array in given.items()}
    for array in given.values():
        array.setflags(write=False)
    ENGINE.load(graph(), SPEC, {}).run(given)
    for name, array in given.items():
        assert np.array_equal(array, before[name])


def test_strided_inputs_and_further_names_are_fine():
    given = arrays()
    wide = np.repeat(given["x"], 2, axis=1)
    loaded = ENGINE.load(graph(), SPEC, {})
    expected = loaded.run(given)["y"]
    given |= {"x": wide[:, ::2], "other": np.zeros(9)}
    assert np.array_equal(loaded.run(given)["y"], expected)
    given["x"] = np.asfortranarray(wide[:, ::2])
    assert np.array_equal(loaded.run(given)["y"], expected)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (np.zeros((N, K), np.float64), r"'x' is float64\[3, 4\].* float32\[3, 4\]"),
        (np.zeros((N, K), np.int32), "int32"),
        (np.zeros((K, N), np.float32), r"float32\[4, 3\]"),
        (np.zeros(N * K, np.float32), r"float32\[12\]"),
    ],
)
def test_a_wrong_type_or_shape_is_refused(wrong, words):
    """Bound by address, it would be read as what it is not."""
    loaded = ENGINE.load(graph(), SPEC, {})
    with pytest.raises(EngineError, match=words):
        loaded.run(arrays() | {"x": wrong})
    assert loaded.run(arrays())["y"].shape == (N, K)


def test_a_missing_input_is_refused():
    with pytest.raises(EngineError, match=r"'w' .*not fed"):
        ENGINE.load(graph(), SPEC, {}).run({"x": arrays()["x"]})


@pytest.mark.parametrize("data", [b"", b"no model", graph()[:40], graph("Unheard")])
def test_what_is_no_model_is_refused(data):
    with pytest.raises(EngineError, match="ONNX Runtime cannot load the graph"):
        ENGINE.load(data, SPEC, {})


def test_a_graph_that_fails_is_an_engine_error():
    """Gather beyond the end is found out only when it runs."""
    info = helper.make_tensor_value_info
    made = helper.make_graph(
        [helper.make_node("Gather", ["x", "i"], ["y"])],
        "g",
        [info("x", TensorProto.FLOAT, [2]), info("i", TensorProto.INT64, [1])],
        [info("y", TensorProto.FLOAT, [1])],
    )
    opset = [helper.make_opsetid("", 20)]
    data = helper.make_model(made, opset_imports=opset, ir_version=10).SerializeToString()
    ports = (port("x", Role.ACTIVATION, 2), port("i", Role.ACTIVATION, 1, dtype="int64"))
    spec = GraphSpec(ports, (port("y", Role.ACTIVATION, 1),), "")
    loaded = ENGINE.load(data, spec, {})
    feeds = {"x": np.zeros(2, np.float32), "i": np.asarray([5], np.int64)}
    with pytest.raises(EngineError, match="failed to run the graph"):
        loaded.run(feeds)


def test_scalars_and_empty_tensors_pass():
    info = helper.make_tensor_value_info
    made = helper.make_graph(
        [helper.make_node("Mul", ["x", "s"], ["y"])],
        "g",
        [info("x", TensorProto.FLOAT, [0, 2]), info("s", TensorProto.FLOAT, [])],
        [info("y", TensorProto.FLOAT, [0, 2])],
    )
    opset = [helper.make_opsetid("", 20)]
    data = helper.make_model(made, opset_imports=opset, ir_version=10).SerializeToString()
    spec = GraphSpec(
        (port("x", Role.ACTIVATION, 0, 2), port("s", Role.ACTIVATION)),
        (port("y", Role.ACTIVATION, 0, 2),),
        "",
    )
    feeds = {"x": np.zeros((0, 2), np.float32), "s": np.float32(2).reshape(())}
    assert ENGINE.load(data, spec, {}).run(feeds)["y"].shape == (0, 2)


def test_providers_that_are_not_there_are_left_out():
    engine = OnnxRuntimeEngine(providers=("NoSuchExecutionProvider",))
    assert engine.providers == ("CPUExecutionProvider",)
    assert engine.version
