"""What is not a usable ONNX file is refused in one clear paragraph."""

from __future__ import annotations

import hashlib
from pathlib import Path

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import external_data_helper
from small_models import mlp, normal

from edgetrain.compiler.load import load, model_sha256
from edgetrain.errors import GraphError


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def refused(path: Path) -> str:
    with pytest.raises(GraphError) as caught:
        load(path)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    return text


def test_a_model_comes_back_as_it_was_written(tmp_path: Path) -> None:
    model = mlp()
    path = saved(model, tmp_path)
    assert load(path) == model
    assert model_sha256(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_external_data_is_read_and_missed(tmp_path: Path) -> None:
    model = mlp()
    external_data_helper.convert_model_to_external_data(model, size_threshold=0)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    (data,) = (p for p in tmp_path.iterdir() if p != path)
    assert load(path).graph.initializer[0].raw_data == normal(8, 4).tobytes()
    data.write_bytes(data.read_bytes()[:16])
    assert "damaged" in refused(path) or "external data" in refused(path)
    data.unlink()
    assert "external data" in refused(path)


def test_files_that_are_not_there_or_not_onnx(tmp_path: Path) -> None:
    missing = tmp_path / "none.onnx"
    assert "No such file" in refused(missing)
    with pytest.raises(GraphError, match="No such file"):
        model_sha256(missing)
    assert "cannot be read" in refused(tmp_path)
    other = tmp_path / "other.onnx"
    for content in (b"", b"\x00" * 64, b"PK\x03\x04 a zip archive", b"# a text file\n"):
        other.write_bytes(content)
        assert refused(other)


def test_a_model_without_nodes_is_empty(tmp_path: Path) -> None:
    model = mlp()
    del model.graph.node[:]
    assert "no whole ONNX graph" in refused(saved(model, tmp_path))


def test_damage_inside_the_graph_is_named(tmp_path: Path) -> None:
    dangling = mlp()
    dangling.graph.node[1].input[0] = "gone"
    text = refused(saved(dangling, tmp_path))
    assert "'relu' needs the value 'gone'" in text

    cut = mlp()
    cut.graph.initializer[0].raw_data = cut.graph.initializer[0].raw_data[:-4]
    assert "'w1'" in refused(saved(cut, tmp_path))
    assert "124 B" in refused(saved(cut, tmp_path))

    strange = mlp()
    strange.graph.initializer[0].data_type = 99
    assert "unknown type 99" in refused(saved(strange, tmp_path))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(0, len(mlp().SerializeToString()) - 1))
def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(mlp().SerializeToString()[:length])
    assert refused(path)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=64))
def test_random_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert refused(path)
