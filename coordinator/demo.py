"""`edgetrain demo`: a small CNN learns digits on three devices, one without backprop."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec
import onnx

from coordinator.demo_model import digits_model, write_digits
from coordinator.evaluate_command import evaluate
from coordinator.progress import open_progress
from coordinator.run_folder import make_folder
from coordinator.train_command import INTERRUPTED, Options, conclude, execute, summary
from edgetrain.config import RunConfig, load

RUN_FILE: Final = """\
# The demo as a run file: train it again with `edgetrain train demo.toml`.
[model]
path = "digits.onnx"

[data]
train = "train.npz"
eval = "eval.npz"

[train]
epochs = 8
batch_size = 32
optimizer = "adam"
lr = 0.003
lr_schedule = "cosine"

[plan]
cuts = ["relu1", "flat"] # one convolution, one convolution, two dense layers
pin = { first = "cam", last = "laptop" }

[fleet]
broker = "embedded"

# A camera whose accelerator only does inference, a board at half this machine's speed,
# and a laptop. Each is a process of its own.
[[fleet.simulate]]
name = "cam"
gradient = "hybrid"

[[fleet.simulate]]
name = "pi"
speed = 0.5

[[fleet.simulate]]
name = "laptop"
"""


def demo(out: Path | None, *, as_json: bool) -> int:
    """Write model, data and run file into a folder, train there, and check the result.

    Args:
        out: the folder; None: a new one under ``runs``.
        as_json: print one object, as `train`, with ``accuracy_before``.

    Returns:
        The exit code: 0, or 130 when it was stopped before its end.

    Raises:
        EdgeTrainError: as `execute`.
    """
    folder = make_folder(out, stem="demo", now=datetime.now().astimezone())
    config, held_out = write_demo(folder)
    progress = open_progress(sys.stdout, time.monotonic, silent=as_json)
    progress.say(f"a CNN learns to read digits on three simulated devices; see {folder}")
    before = evaluate(config.model, held_out)
    outcome = execute(config, Options(folder / "run", as_json), progress)
    trained = msgspec.structs.replace(config.model, path=outcome.model)
    after = evaluate(trained, held_out)
    if as_json:
        facts = {**msgspec.to_builtins(summary(outcome)), "accuracy": after.accuracy}
        facts["accuracy_before"] = before.accuracy
        print(msgspec.json.encode(facts).decode())
    else:
        conclude(outcome, progress)
        progress.say(
            f"accuracy on held-out digits, each file run by plain ONNX Runtime:"
            f" {before.accuracy:.4f} before, {after.accuracy:.4f} after"
        )
    return INTERRUPTED if outcome.interrupted else 0


def write_demo(folder: Path) -> tuple[RunConfig, Path]:
    """Write ``digits.onnx``, ``train.npz``, ``eval.npz`` and ``demo.toml``.

    Returns:
        What the run file says, and the held-out samples.
    """
    onnx.save(digits_model(), folder / "digits.onnx")
    _, held_out = write_digits(folder)
    run_file = folder / "demo.toml"
    run_file.write_text(RUN_FILE, encoding="utf-8")
    return load(run_file), held_out
