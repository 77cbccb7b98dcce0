"""docs/grad.md and docs/losses.md: what they tell people to type works."""

from __future__ import annotations

import json
import re
import sys
import tomllib

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from loss_case import one_thread
from readme import ROOT, blocks, commands, section, type_in

from edgetrain.config import ModelConfig
from edgetrain.losses import OPTIONS, LossOptions

PAGE = "docs/grad.md"
EXAMPLE = "## Worked example: training in plain ONNX Runtime"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("grad")
    source = ROOT / "examples" / "own_model" / "make_model.py"
    (path / "make_model.py").write_text(source.read_text())
    return path


@pytest.fixture(scope="module")
def trained(folder):
    """The worked example, typed in as it stands; what training prints."""
    text = section(EXAMPLE, PAGE)
    make, differentiate, evaluate = commands(text)
    for number, block in enumerate(blocks(text, "python")):
        (folder / f"{number}.py").write_text(block)
    type_in(make, folder)
    type_in(differentiate, folder)
    printed = type_in(f"{sys.executable} 0.py", folder)
    type_in(f"{sys.executable} 1.py", folder)
    type_in(evaluate, folder)
    return printed


def test_the_worked_example_trains(folder, trained):
    losses = [float(text) for text in re.findall(r"loss (\d\.\d+)", trained)]
    assert len(losses) == 5
    assert losses[-1] < 0.3 < losses[0]
    score = json.loads(
        type_in("edgetrain evaluate trained.onnx --data eval.npz --json", folder)
    )
    assert score["accuracy"] > 0.9


def test_the_device_s_part_needs_only_onnxruntime_and_numpy():
    device, _ = blocks(section(EXAMPLE, PAGE), "python")
    imported = re.findall(r"^(?:import|from) (\w+)", device, re.MULTILINE)
    assert imported == ["numpy", "onnxruntime"]


@pytest.mark.usefixtures("trained")
def test_the_example_in_python_gives_products_with_the_hessian(folder):
    (block,) = blocks(section("## From Python", PAGE), "python")
    (folder / "python.py").write_text(block)
    type_in(f"{sys.executable} python.py", folder)
    hessian = onnx.load(folder / "hessian.onnx")
    session = ort.InferenceSession(hessian.SerializeToString(), one_thread())
    weights = {i.name: i.shape for i in session.get_overridable_initializers()}
    names = [i.name for i in session.get_inputs()]
    assert [n for n in names if n.startswith("tangent/dense")] == [
        f"tangent/{w}" for w in weights
    ]
    rng = np.random.default_rng(0)
    feeds = {"labels": np.arange(32) % 10, "tangent/pixels": np.zeros((32, 64))}
    feeds["pixels"] = rng.random((32, 64))

    def products(direction: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        wanted = [f"tangent/gradient/{w}" for w in weights]
        tangents = {f"tangent/{w}": v for w, v in direction.items()}
        given = {
            k: v if k == "labels" else v.astype(np.float32)
            for k, v in (feeds | tangents).items()
        }
        found = session.run(wanted, given)
        return dict(zip(weights, found, strict=True))

    u, v = ({w: rng.normal(size=s) for w, s in weights.items()} for _ in range(2))
    left = sum((u[w] * p).sum() for w, p in products(v).items())
    right = sum((v[w] * p).sum() for w, p in products(u).items())
    assert left == pytest.approx(right, rel=1e-3)
    assert abs(left) > 1e-3


def test_the_page_on_losses_names_every_loss_and_option():
    text = (ROOT / "docs" / "losses.md").read_text()
    (shown,) = blocks(text, "toml")
    model = tomllib.loads(shown)["model"]
    options = LossOptions(**model.pop("loss_options"))
    assert ModelConfig(loss_options=options, **model).loss_options.label_smoothing == 0.1
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    for loss, options in OPTIONS.items():
        (row,) = (row for row in rows if f"`{loss}`" in row.split("|")[1])
        assert set(options) == set(re.findall(r"`(\w+)`", row.split("|")[3]))
