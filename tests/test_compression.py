"""Dense layers computed from small cores: function, gradients, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from normal_form import expect_same
from onnx import TensorProto, helper, numpy_helper
from small_models import build, normal
from stage_runs import stages_of, train_pass
from training import on_three, three
from training import train as run

from edgetrain.compiler import agreement, reference
from edgetrain.compiler.compression import Compressed, compress, parse
from edgetrain.compiler.cut import CutFinder
from edgetrain.compiler.export import differences, export
from edgetrain.compiler.forecast import stash_forecast
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.program import Program
from edgetrain.compiler.stage import Recipe, compile_stages
from edgetrain.compiler.stash import Keep
from edgetrain.compiler.tensor_train import TensorTrain, dense, fit, merge
from edgetrain.compiler.trainable import select_trainable
from edgetrain.compiler.woven import computed_from_cores
from edgetrain.config import DataConfig, FleetConfig, ModelConfig, RunConfig
from edgetrain.errors import ConfigError, GraphError
from edgetrain.manifest import Mode
from edgetrain.sim.fleet import SimDevice
from edgetrain.train_config import TrainConfig

BATCH = 4
node = helper.make_node


def tensor(*shape: int, seed: int = 0) -> np.ndarray:
    return (normal(*shape, seed=seed) / np.sqrt(shape[0])).astype(np.float32)


def net() -> onnx.ModelProto:
    """x [N, 64] -> 96 -> 64 -> 80 -> y [N, 3]: dense layers in three forms, and a head."""
    return build(
        [
            node("Gemm", ["x", "w1", "b1"], ["h1"], "first", transB=1),
            node("Tanh", ["h1"], ["t1"]),
            node("MatMul", ["t1", "w2"], ["m2"], "second"),
            node("Add", ["m2", "b2"], ["h2"]),
            node("Tanh", ["h2"], ["t2"]),
            node("Transpose", ["w3"], ["w3.t"], "turn", perm=[1, 0]),
            node("MatMul", ["t2", "w3.t"], ["h3"], "third"),
            node("Tanh", ["h3"], ["t3"]),
            node("Gemm", ["t3", "head", "b4"], ["y"], "last"),
        ],
        [("x", ["N", 64])],
        ["y"],
        {
            "w1": tensor(96, 64),
            "b1": tensor(96, seed=1),
            "w2": tensor(96, 64, seed=2),
            "b2": tensor(64, seed=3),
            "w3": tensor(80, 64, seed=4),
            "head": tensor(80, 3, seed=5),
            "b4": tensor(3, seed=6),
        },
        opset=17,
    )


def shared(reader: str) -> onnx.ModelProto:
    """A square weight that a dense layer and one more node read, before a head."""
    other = {
        "dense": node("MatMul", ["t", "w"], ["u"]),
        "elementwise": node("Mul", ["t", "w"], ["u"]),
    }[reader]
    return build(
        [
            node("MatMul", ["x", "w"], ["h"]),
            node("Tanh", ["h"], ["t"]),
            other,
            node("MatMul", ["u", "head"], ["y"]),
        ],
        [("x", [64, 64])],
        ["y"],
        {"w": tensor(64, 64), "head": tensor(64, 3, seed=1)},
    )


def compressed(
    program: Program, text: str = "tt:r=2", seed: int = 0
) -> tuple[Program, tuple[TensorTrain, ...]]:
    asked = parse(text)
    assert asked is not None
    return compress(program, asked, seed=seed)


@cache
def small(text: str = "tt:r=2") -> Compressed:
    return Compressed(*compressed(normalise(net(), batch=BATCH), text))


def feeds() -> dict[str, np.ndarray]:
    return {"x": normal(BATCH, 64, seed=9), "labels": np.arange(BATCH) % 3}


def recipe(program: Program, stages: int = 1, keep: Keep = Keep.LEAST) -> Recipe:
    modes = (Mode.VJP,) * stages
    weights = select_trainable(program, "all")
    return Recipe(weights, "softmax_cross_entropy", modes, keep=keep)


def test_dense_layers_have_cores_and_all_else_stays() -> None:
    program, trains = small()
    assert [train.weight for train in trains] == ["w1", "w2", "w3"]
    cores = [name for train in trains for name in train.cores]
    assert set(program.weights) == {*cores, "b1", "b2", "head", "b4"}
    held = normalise(net(), batch=BATCH)
    for name in ("b1", "b2", "head", "b4"):
        assert np.array_equal(program.weights[name], held.weights[name])
    for train in trains:
        for name, shape in train.cores.items():
            assert program.weights[name].shape == shape
    (remark,) = program.remarks
    assert "w1 (6,144 numbers to " in remark
    assert "begin at random" in remark


def test_the_rewritten_program_is_in_normal_form() -> None:
    program, _ = small()
    onnx.checker.check_model(program.model, full_check=True)
    names = [info.name for info in program.model.graph.input]
    assert names == [spec.name for spec in program.inputs] + list(program.weights)
    again = onnx.shape_inference.infer_shapes(program.model, strict_mode=True)
    assert again == program.model


def test_the_graph_computes_what_merging_gives() -> None:
    program, trains = small()
    given = {**feeds(), **program.weights}
    found = reference.run(program.model, given, [train.weight for train in trains])
    for train in trains:
        cores = [program.weights[name] for name in train.cores]
        np.testing.assert_allclose(found[train.weight], merge(train, cores), atol=1e-6)


@settings(max_examples=40)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 12), st.integers(0, 9))
def test_so_it_does_for_any_shape_and_rank(rows, columns, rank, seed) -> None:
    train = fit("w", (rows, columns), rank)
    model = build(
        [node("MatMul", ["x", "w"], ["y"])],
        [("x", [1, rows]), ("w", [rows, columns])],
        ["y"],
    )
    generator = np.random.default_rng(seed)
    cores = {
        name: generator.normal(size=shape).astype(np.float32)
        for name, shape in train.cores.items()
    }
    x = np.ones((1, rows), np.float32)
    woven = computed_from_cores(model, [train])
    (found,) = reference.run(woven, {"x": x, **cores}, ["w"]).values()
    expected = merge(train, list(cores.values()))
    scale = 1 + np.abs(expected).max()
    np.testing.assert_allclose(found / scale, expected / scale, atol=1e-6)


@pytest.mark.parametrize("text", ["tt:r=2", "tt:r=2,init=svd"])
def test_the_exported_file_computes_what_was_trained(text: str) -> None:
    held = normalise(net(), batch=BATCH)
    program, trains = small(text)
    exported = export(net(), held, dense(program.weights, trains))
    assert differences(net(), exported) == []
    expected = reference.run(program.model, {**feeds(), **program.weights})
    found = reference.run(exported, feeds())
    assert agreement.compare(expected, found, 1e-5) == ""
    values = {t.name: numpy_helper.to_array(t) for t in exported.graph.initializer}
    for old in net().graph.initializer:
        same = np.array_equal(values[old.name], numpy_helper.to_array(old))
        assert same == (old.name not in {"w1", "w2", "w3"})


def test_a_file_that_was_compressed_comes_back_from_its_cores() -> None:
    """Trains of the file's own ranks lose nothing."""
    held = normalise(net(), batch=BATCH)
    program, trains = small()
    model = export(net(), held, dense(program.weights, trains))
    again, _ = compressed(normalise(model, batch=BATCH), "tt:r=2,init=svd")
    expect_same(model, again, 1e-5)
    assert "close to the file's weights" in again.remarks[-1]


def test_random_values_follow_from_the_seed() -> None:
    held = normalise(net(), batch=BATCH)
    first, same, other = (compressed(held, seed=seed)[0] for seed in (0, 0, 1))
    for name, value in first.weights.items():
        assert np.array_equal(value, same.weights[name])
        assert np.array_equal(value, other.weights[name]) == (not name.startswith("tt/"))


def test_random_weights_are_scaled_by_what_each_unit_sums_up() -> None:
    """Whichever way round the file holds them."""
    held = normalise(net(), batch=BATCH)
    for weight, summed in {"w1": 64, "w2": 96, "w3": 64}.items():
        squares = []
        for seed in range(60):
            program, trains = compressed(held, seed=seed)
            squares.append(np.mean(dense(program.weights, trains)[weight] ** 2))
        assert np.mean(squares) == pytest.approx(2 / summed, rel=0.25)


def test_gradients_of_cores_equal_central_differences() -> None:
    """Of the mean loss, along random directions of each core."""
    program, trains = small()
    (stage,) = stages_of(compile_stages(program, [], recipe(program)))
    done = train_pass([stage], feeds())
    inputs = {"x": feeds()["x"]}
    start = stage.parameters.weights.copy()
    specs = {spec.name: spec for spec in stage.manifest.weights}
    for train in trains:
        for name, shape in train.cores.items():
            direction = normal(*shape, seed=len(name))
            direction *= 1e-2 / np.linalg.norm(direction)
            part = slice(specs[name].offset, specs[name].offset + direction.size)
            ends = []
            for sign in (1, -1):
                stage.parameters.weights[...] = start
                stage.parameters.weights[part] += sign * direction.ravel()
                losses = stage.evaluate_loss(inputs, feeds()["labels"]).losses
                ends.append(losses.mean(dtype=np.float64))
            gradient = done.gradients[name]
            scale = 1e-2 * float(np.linalg.norm(direction) * np.linalg.norm(gradient))
            expected = float(np.vdot(gradient, direction))
            assert (ends[0] - ends[1]) / 2 == pytest.approx(expected, abs=scale)
            assert np.any(gradient)


@pytest.mark.parametrize("keep", list(Keep))
def test_stages_give_the_gradients_of_the_whole(keep: Keep) -> None:
    program, _ = small()
    finder = CutFinder(program, program.weights)
    cuts = finder.valid()
    assert [cut.name for cut in cuts] == ["t1", "t2", "t3"]
    whole = train_pass(stages_of(compile_stages(program, [], recipe(program))), feeds())
    stages = stages_of(compile_stages(program, cuts, recipe(program, 4, keep)))
    found = train_pass(stages, feeds())
    np.testing.assert_allclose(found.losses, whole.losses, rtol=1e-5)
    assert found.gradients.keys() == whole.gradients.keys()
    for name, gradient in whole.gradients.items():
        np.testing.assert_allclose(found.gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_computed_weight_is_not_stashed() -> None:
    """A stage keeps no more than with the dense weight, which costs it nothing."""
    held = normalise(net(), batch=BATCH)
    program, _ = small()

    def stashes(of: Program) -> list[int]:
        cuts = CutFinder(of, of.weights).valid()
        bundles = compile_stages(of, cuts, recipe(of, len(cuts) + 1))
        return [bundle.manifest.stash_bytes for bundle in bundles]

    assert stashes(program) == stashes(held)
    nodes = CutFinder(program, program.weights).nodes
    cuts = [cut.position for cut in CutFinder(program, program.weights).valid()]
    stretches = [nodes[a:b] for a, b in zip([0, *cuts], [*cuts, len(nodes)], strict=True)]
    forecast = stash_forecast(program, program.weights, stretches)
    assert max(forecast) < program_bytes(held, "w2") / 2


def program_bytes(program: Program, weight: str) -> int:
    return program.weights[weight].nbytes


def test_an_inference_only_stage_trains_its_last_layer_exactly() -> None:
    """Its cores' gradients come from plain products."""
    program, trains = small()
    cuts = [CutFinder(program, program.weights).named("t1")]
    asked = recipe(program, 2)
    exact = train_pass(stages_of(compile_stages(program, cuts, asked)), feeds())
    mixed = Recipe(asked.trainable, asked.loss, (Mode.HYBRID, Mode.VJP))
    found = train_pass(stages_of(compile_stages(program, cuts, mixed)), feeds())
    for name in (*trains[0].cores, "b1"):
        np.testing.assert_allclose(
            found.gradients[name], exact.gradients[name], rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("reader", ["dense", "elementwise"])
def test_a_weight_that_other_nodes_read_has_cores_if_all_are_dense(reader: str) -> None:
    program = normalise(shared(reader), batch=64)
    if reader == "elementwise":
        with pytest.raises(ConfigError, match="no dense layer"):
            compressed(program)
        return
    rewritten, trains = compressed(program)
    assert [train.weight for train in trains] == ["w"]
    values = dense(rewritten.weights, trains)
    x = {"x": normal(64, 64)}
    expected = reference.run(program.model, {**x, **values})
    found = reference.run(rewritten.model, {**x, **rewritten.weights})
    assert agreement.compare(expected, found, 1e-5) == ""


def test_a_table_tied_to_the_head_stays_dense() -> None:
    table = tensor(64, 64)
    model = build(
        [
            node("Gather", ["embed", "tokens"], ["a"]),
            node("MatMul", ["a", "w"], ["b"]),
            node("MatMul", ["b", "head"], ["y"]),
        ],
        [("tokens", ["N", 3])],
        ["y"],
        {"embed": table, "w": tensor(64, 64, seed=1), "head": table.T.copy()},
    )
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    held = normalise(model, batch=2, tie=True)
    program, trains = compressed(held)
    assert [train.weight for train in trains] == ["w"]
    assert differences(model, export(model, held, dense(program.weights, trains))) == []


def half() -> onnx.ModelProto:
    model = net()
    for held in model.graph.initializer:
        value = numpy_helper.to_array(held).astype(np.float16)
        held.CopyFrom(numpy_helper.from_array(value, held.name))
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.elem_type = TensorProto.FLOAT16
    return model


def test_cores_are_rounded_to_the_files_type_only_when_merged() -> None:
    held = normalise(half(), batch=BATCH)
    program, trains = compressed(held)
    assert all(value.dtype == np.float32 for value in program.weights.values())
    exported = export(half(), held, dense(program.weights, trains))
    assert differences(half(), exported) == []


@pytest.mark.parametrize(
    "text",
    ["tt:", "tt:8", "tt:r=", "tt:r=0", "tt:r=-1", "tt:r=2.5", "tt:r=8,init=zero",
     "tt:r=8,", "tt:r=8,r=4", "tt:r=" + "9" * 5000, "tt:r=8\n", "tt:r=٨"],
)  # fmt: skip
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"trainable = .* write tt:r=N"):
        parse(text)


@pytest.mark.parametrize("choice", ["all", "last:2", "w.*", "tt", ("tt:r=8",)])
def test_other_choices_ask_for_no_compression(choice: str | tuple[str, ...]) -> None:
    assert parse(choice) is None


def lone(rows: int, columns: int, weight: np.ndarray | None = None) -> onnx.ModelProto:
    """One dense layer and a head."""
    value = tensor(rows, columns) if weight is None else weight
    return build(
        [node("MatMul", ["x", "w"], ["h"]), node("MatMul", ["h", "head"], ["y"])],
        [("x", ["N", rows])],
        ["y"],
        {"w": value, "head": tensor(columns, 64, seed=1)},
    )


REFUSED: dict[str, tuple[Callable[[], onnx.ModelProto], str, str]] = {
    "only small layers": (lambda: lone(8, 8), "tt:r=2", "no dense layer"),
    "only a head": (lambda: build([node("MatMul", ["x", "w"], ["y"])],
        [("x", ["N", 64])], ["y"], {"w": tensor(64, 64)}), "tt:r=2", "no dense layer"),
    "rank": (lambda: lone(64, 64), "tt:r=64", r"'w' \[64, 64\].*smaller rank"),
    "primes": (lambda: lone(67, 71), "tt:r=32", r"'w' \[67, 71\].*smaller rank"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_where_nothing_is_to_be_gained_it_says_so(name: str) -> None:
    make, text, message = REFUSED[name]
    with pytest.raises(ConfigError, match=rf"trainable = '{text}'.*{message}"):
        compressed(normalise(make(), batch=2), text)


def test_names_that_the_cores_would_take_are_refused() -> None:
    model = lone(64, 64)
    for part in model.graph.node:
        part.input[:] = ["tt/h" if name == "h" else name for name in part.input]
        part.output[:] = ["tt/h" if name == "h" else name for name in part.output]
    with pytest.raises(GraphError, match=r"begin with 'tt/'"):
        compressed(normalise(model, batch=2))


def clouds(folder: Path, samples: int, name: str, seed: int) -> Path:
    """Three clouds of points in 64 dimensions."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, samples)
    centres = np.random.default_rng(99).standard_normal((3, 64)).astype(np.float32)
    x = centres[labels] + 1.5 * rng.standard_normal((samples, 64)).astype(np.float32)
    np.savez(folder / name, x=x, labels=labels)
    return folder / name


@pytest.mark.parametrize("stages", [1, 3])
def test_a_run_trains_the_cores_and_exports_the_users_file(
    tmp_path: Path, stages: int
) -> None:
    onnx.save(net(), tmp_path / "m.onnx")
    config = RunConfig(
        ModelConfig(tmp_path / "m.onnx", trainable="tt:r=4"),
        DataConfig(
            clouds(tmp_path, 512, "train.npz", 0), clouds(tmp_path, 256, "eval.npz", 1)
        ),
        TrainConfig(epochs=6, batch_size=32, microbatches=2, optimizer="adam", lr=0.005),
        fleet=FleetConfig(devices=1),
    )
    out = tmp_path / "run"
    outcome = (
        run(config, out, [SimDevice("one")])
        if stages == 1
        else run(on_three(config, ("t1", "t2")), out, three())
    )
    assert outcome.score is not None
    assert outcome.score.accuracy >= 0.9
    exported = onnx.load(out / "trained.onnx")
    assert differences(net(), exported) == []
    with np.load(tmp_path / "eval.npz") as data:
        session = ort.InferenceSession(exported.SerializeToString())
        (scores,) = session.run(None, {"x": data["x"]})
        accuracy = np.mean(scores.argmax(axis=1) == data["labels"])
    assert accuracy == pytest.approx(outcome.score.accuracy, abs=1e-9)
