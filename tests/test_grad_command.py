"""`edgetrain grad`: the file it writes, and what it says of it."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from loss_case import one_thread
from onnx import helper
from small_models import build, mlp, normal

from coordinator.cli import main
from edgetrain.compiler.grad import grad


@pytest.fixture
def model(tmp_path):
    onnx.save(mlp(), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_the_command_writes_what_the_function_returns(model, tmp_path, capsys):
    out = tmp_path / "g.onnx"
    options = ["--loss", "huber", "--loss-option", "delta=0.5", "--batch", "4"]
    chosen = ["--wrt", "w1", "--wrt", "b.", "--json"]
    assert main(["grad", str(model), "-o", str(out), *options, *chosen]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["path"] == str(out)
    assert facts["size_bytes"] == out.stat().st_size
    session = ort.InferenceSession(str(out), one_thread())
    assert [i["name"] for i in facts["inputs"]] == [i.name for i in session.get_inputs()]
    assert [i["shape"] for i in facts["outputs"]] == [
        o.shape for o in session.get_outputs()
    ]
    held = [i.name for i in session.get_overridable_initializers()]
    assert [i["name"] for i in facts["weights"]] == held == ["w1", "b1", "b2"]
    x = np.ones((4, 4), np.float32)
    y = session.run(["y"], {"x": x, "labels": np.zeros((4, 1), np.float32)})[0]
    feeds = {"x": x, "labels": y + 10}
    assert session.run(["loss"], feeds)[0] == pytest.approx(0.5 * (10 - 0.25))


def test_one_pattern_may_name_the_last_layers(model, tmp_path):
    out = tmp_path / "g.onnx"
    arguments = ["--mode", "jvp", "--wrt", "last:1"]
    assert main(["grad", str(model), "-o", str(out), *arguments]) == 0
    expected = grad(model, mode="jvp", wrt="last:1").SerializeToString()
    assert out.read_bytes() == expected


def test_the_weights_may_be_written_beside_it(tmp_path):
    """Also one that `numpy.savez` would take for its own parameter."""
    nodes = [helper.make_node("MatMul", ["x", "file"], ["y"])]
    model = build(nodes, [("x", ["N", 2])], ["y"], {"file": normal(2, 3)})
    onnx.save(model, tmp_path / "m.onnx")
    paths = [str(tmp_path / name) for name in ("m.onnx", "g.onnx", "w.npz")]
    assert main(["grad", paths[0], "-o", paths[1], "--weights", paths[2]]) == 0
    with np.load(paths[2], allow_pickle=False) as weights:
        assert weights.files == ["file"]
        np.testing.assert_array_equal(weights["file"], normal(2, 3))


def test_an_open_shape_may_be_given(tmp_path, capsys):
    model = build([helper.make_node("Sin", ["x"], ["y"])], [("x", ["N", "T", 2])], ["y"])
    onnx.save(model, tmp_path / "m.onnx")
    arguments = ["grad", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "g.onnx")]
    assert main([*arguments, "--mode", "jvp", "--batch", "3"]) == 2
    assert "'T'" in capsys.readouterr().err
    shape = ["--shape", "x=5,2", "--json"]
    assert main([*arguments, "--mode", "jvp", "--batch", "3", *shape]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [spec["shape"] for spec in facts["outputs"]] == [[3, 5, 2]] * 2


def test_people_see_inputs_weights_and_outputs(model, tmp_path, capsys):
    out = tmp_path / "g.onnx"
    assert main(["grad", str(model), "-o", str(out)]) == 0
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["input", "cotangent/y", "float32", "[1,", "1]"] in words
    assert ["weight", "b1", "float32", "[8]"] in words
    assert ["output", "gradient/b1", "float32", "[8]"] in words
    assert [*words[-1][:2]] == ["wrote", f"{out},"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-o", "m.onnx"], 2, "the model itself"),
        (["-o", "no/g.onnx"], 1, "cannot be written"),
        (["-o", "g.onnx", "--loss", "mse", "--loss-option", "delta=2"], 2, "takes: none"),
        (["-o", "g.onnx", "--loss-option", "dlta=2"], 2, "did you mean 'delta'"),
        (["-o", "g.onnx", "--loss-option", "delta"], 2, "key=value"),
        (["-o", "g.onnx", "--shape", "x=a"], 2, "input=3,224,224"),
        (["-o", "g.onnx", "--wrt", "w9"], 2, "matches no weight"),
        ([], 2, "Missing option '-o'"),
    ],
)
def test_bad_input_is_told_in_a_paragraph(model, capsys, arguments, code, words):
    paths = [str(model.parent / a) if a.endswith(".onnx") else a for a in arguments]
    assert main(["grad", str(model), *paths]) == code
    assert words in capsys.readouterr().err
    assert not (model.parent / "g.onnx").exists()
