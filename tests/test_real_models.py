"""Files of other people's tools train, exactly, or are refused with the way out."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from fetch_models import MODELS
from inputs import CACHE
from model_settings import SETTINGS
from trial import GRADIENT_TOLERANCE, Setting, Stage, attempt, gradient_error

from edgetrain.compiler.load import load
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.stage import Recipe, compile_stages
from edgetrain.manifest import Mode

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
TRAINS = (
    "oww_alexa",  # PyTorch of 2022
    "oww_hey_mycroft",  # tf2onnx, LSTM
    "oww_silero_vad",  # branches on shapes, weights within them
    "silero_vad",  # spox, nested branches
    "livekit_embedding",  # tf2onnx, convolutions
    "text_direction",  # PaddlePaddle, weights in Constant nodes
    "plcmos",  # GRU
    "torch_encoder_leg",
    "torch_encoder_dyn",
    "torch_lstm_dyn",
    "torch_mbv2_leg_train",
    "torch_unet_dyn",
    "half_resnet",
    "bf16_vit",
    "dynamic_int8_vit",
)
REFUSED = {
    "oww_hey_jarvis": "If node 'If_32' depends on the data",
    "ddddocr_common_old": "DynamicQuantizeLSTM.*train the float model",
    "qdq_resnet": "quantised.*train the float model",
}


def cached_model(name: str) -> Path:
    path = CACHE / "models" / f"{name}.onnx"
    if not path.exists():
        script = "fetch_models.py" if name in MODELS else "export_models.py"
        pytest.skip(f"{name} is not in the cache: run python scripts/{script}")
    return path


@pytest.mark.parametrize("name", TRAINS)
def test_it_trains_and_its_file_gets_the_weights(name: str) -> None:
    outcome = attempt(name, cached_model(name), SETTINGS.get(name, Setting()))
    assert (outcome.outcome, outcome.reason) == ("trains", "")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_train_says_why(name: str) -> None:
    outcome = attempt(name, cached_model(name), SETTINGS.get(name, Setting()))
    assert outcome.outcome == "refused"
    assert re.search(REFUSED[name], outcome.reason)


class Skewed(Stage):
    """A stage whose gradient is wrong by a tenth in one tensor."""

    def gradient(self, weights: np.ndarray) -> np.ndarray:
        gradient = super().gradient(weights)
        spec = max(self.specs, key=lambda spec: spec.elements)
        gradient[spec.offset : spec.offset + spec.elements] *= 1.1
        return gradient


def test_the_trial_notices_a_wrong_gradient() -> None:
    program = normalise(load(cached_model("oww_alexa")), batch=2)
    (output,) = (spec.name for spec in program.outputs)
    recipe = Recipe(frozenset(program.weights), "mse", (Mode.VJP,))
    (bundle,) = compile_stages(program, [], recipe)
    assert gradient_error(Stage(program, bundle, output, 0), 0) < GRADIENT_TOLERANCE
    assert gradient_error(Skewed(program, bundle, output, 0), 0) > GRADIENT_TOLERANCE


def test_the_page_names_every_fetched_file_and_enough_of_them_train() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    names = {row.split("`")[1] for row in rows}
    assert set(MODELS) <= names
    assert sum("| trains" in row for row in rows) >= 60
    assert not any("| fails" in row for row in rows)
