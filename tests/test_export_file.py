"""A model with data files is written with its tensors where they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, external_data_helper
from small_models import mlp

from edgetrain.compiler.export_file import export_file
from edgetrain.compiler.load import load, load_skeleton
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.program import Program
from edgetrain.errors import GraphError

FILES = {"w1": "first.bin", "b1": "first.bin", "w2": "more/second.bin"}  # b2 stays inside


def spread(folder: Path, dtype: str = "float32") -> Path:
    """A model whose tensors lie in two data files and in itself; one has a gap."""
    model = mlp(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    for tensor in model.graph.initializer:
        if tensor.name not in FILES:
            continue
        path = folder / FILES[tensor.name]
        path.parent.mkdir(exist_ok=True)
        held = path.read_bytes() if path.exists() else b"header"
        held += bytes(-len(held) % 16)
        path.write_bytes(held + tensor.raw_data)
        external_data_helper.set_external_data(
            tensor, FILES[tensor.name], len(held), len(tensor.raw_data)
        )
        tensor.ClearField("raw_data")
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def moved(program: Program) -> dict[str, np.ndarray]:
    return {name: value + np.float32(0.5) for name, value in program.weights.items()}


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "bfloat16"])
def test_weights_reach_every_file_and_nothing_else_changes(
    tmp_path: Path, dtype: str
) -> None:
    source, target = spread(tmp_path / "user", dtype), tmp_path / "run" / "trained.onnx"
    program = normalise(load(source), batch=2)
    before = {path: path.read_bytes() for path in source.parent.rglob("*.*")}
    target.parent.mkdir()
    export_file(source, target, program, moved(program))
    assert all(path.read_bytes() == data for path, data in before.items())
    again = normalise(load(target), batch=2)
    for name, value in moved(program).items():
        np.testing.assert_allclose(again.weights[name], value, rtol=1e-2)
    old, new = load_skeleton(source), load_skeleton(target)
    changed = [
        a.name
        for a, b in zip(old.graph.initializer, new.graph.initializer, strict=True)
        if a != b
    ]
    assert changed == ["b2"]
    copy = target.parent / "first.bin"
    assert copy.stat().st_size == (source.parent / "first.bin").stat().st_size
    assert copy.read_bytes()[:6] == b"header"


def test_unchanged_weights_give_the_same_bytes_everywhere(tmp_path: Path) -> None:
    source, target = spread(tmp_path / "user"), tmp_path / "run" / "model.onnx"
    target.parent.mkdir()
    export_file(source, target, normalise(load(source), batch=1), {})
    for name in ("model.onnx", *set(FILES.values())):
        assert (target.parent / name).read_bytes() == (source.parent / name).read_bytes()


def test_a_model_in_one_file_may_be_written_beside_itself(tmp_path: Path) -> None:
    source, target = tmp_path / "model.onnx", tmp_path / "trained.onnx"
    source.write_bytes(mlp().SerializeToString())
    program = normalise(load(source), batch=1)
    export_file(source, target, program, moved(program))
    assert [path.name for path in sorted(tmp_path.iterdir())] == [source.name, target.name]
    np.testing.assert_array_equal(
        normalise(load(target), batch=1).weights["w1"], moved(program)["w1"]
    )


def test_what_cannot_be_written_is_a_graph_error(tmp_path: Path) -> None:
    source = spread(tmp_path / "user")
    program = normalise(load(source), batch=1)
    with pytest.raises(GraphError, match="would overwrite the data files"):
        export_file(source, source.parent / "trained.onnx", program, {})
    (tmp_path / "run").mkdir()
    with pytest.raises(GraphError, match="'other' is not a weight"):
        export_file(source, tmp_path / "run" / "t.onnx", program, {"other": np.ones(1)})
    (source.parent / "first.bin").unlink()
    with pytest.raises(GraphError, match=r"cannot be written: .*first\.bin"):
        export_file(source, tmp_path / "run" / "t.onnx", program, {})


@pytest.mark.parametrize("location", ["../outside.bin", "/outside.bin", ""])
def test_data_files_outside_the_folder_are_refused(tmp_path: Path, location: str) -> None:
    model = mlp()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    source = tmp_path / "model.onnx"
    onnx.save(model, source)
    program = normalise(mlp(), batch=1)
    with pytest.raises(GraphError, match="not inside the model's folder"):
        export_file(source, tmp_path / "run" / "trained.onnx", program, {})
