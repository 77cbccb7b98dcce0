r"""A step of onnxruntime-training-cpu beside PyTorch's, timed as step.py times ours.

    python3.11 -m venv .venv-ort-training
    .venv-ort-training/bin/pip install \
        onnxruntime-training-cpu==1.19.2 onnx==1.17.0 torch==2.13.0
    .venv-ort-training/bin/python benchmarks/ort_training.py --json theirs.json

In an environment of its own: that package and onnxruntime both install a module of that
name, and onnx 1.17 is the last that writes files which 1.19.2 reads. One thread, SGD, the
networks, weights and batches of step.py. Each time is divided by a step of PyTorch eager
in the same round; medians over the rounds. Before a case is timed, its loss is checked to
fall as eager's does. Set the result beside ours with benchmarks/compare.py.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import eager
import networks
import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnxruntime.training import artifacts
from onnxruntime.training.api import CheckpointState, Module, Optimizer
from torch import Tensor, nn

CHECKED_STEPS = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One network at one batch size; milliseconds of eager, and the ratio to it."""

    model: str
    batch: int
    eager_ms: float
    ort_training: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(networks.NETWORKS))
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    batches = [int(word) for word in options.batches.split(",")]
    rows: list[Row] = []
    for name in options.models.split(","):
        rows += measured(name, batches, options.rounds)
    if rows:
        mean = statistics.geometric_mean(row.ort_training for row in rows)
        print(f"geometric mean: {mean:.3f}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def measured(name: str, batches: list[int], rounds: int) -> Iterator[Row]:
    """A row for each batch size, or none where the runtime cannot train the network."""
    for batch in batches:
        model, x, labels = eager.draw(name, batch)
        try:
            step = ort_step(trainable_form(exported(model, x)), x, labels)
        except RuntimeError as error:
            print(f"{name:10} skipped: {_reason(error)}", flush=True)
            return
        row = measure(name, (model.train(), x, labels), step, rounds)
        print(_line(row), flush=True)
        yield row


def measure(
    name: str,
    case: tuple[nn.Module, Tensor, Tensor],
    step: Callable[[], float],
    rounds: int,
) -> Row:
    _check(eager.eager_step(*copy.deepcopy(case)), step)
    steps = {"eager": eager.eager_step(*case), "ort": step}
    times = {k: np.array(v) for k, v in eager.interleave(steps, rounds).items()}
    eager_s = times["eager"]
    ratio = float(np.median(times["ort"] / eager_s))
    return Row(name, len(case[1]), 1e3 * float(np.median(eager_s)), ratio)


def exported(model: nn.Module, x: Tensor) -> onnx.ModelProto:
    """The network in inference form but for BatchNorm, which takes batch statistics."""
    torch.backends.mha.set_fastpath_enabled(False)
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        path = Path(folder) / "model.onnx"
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (x,),
            path,
            dynamo=False,
            input_names=["x"],
            output_names=["y"],
            training=torch.onnx.TrainingMode.PRESERVE,
            do_constant_folding=False,
        )
        return onnx.load(path)


def trainable_form(model: onnx.ModelProto) -> onnx.ModelProto:
    """What the gradient builder needs, changed in place.

    - The exporter ties weights that start equal, by an Identity of one of them: each gets
      its own data again, or they would train as one.
    - The gradient of LayerNormalization reads its optional outputs, mean and deviation.
    """
    graph = model.graph
    weights = {weight.name: weight for weight in graph.initializer}
    for node in list(graph.node):
        if node.op_type == "Identity" and node.input[0] in weights:
            own = graph.initializer.add()
            own.CopyFrom(weights[node.input[0]])
            own.name = node.output[0]
            graph.node.remove(node)
        elif node.op_type == "LayerNormalization":
            y = node.output[0]
            node.output[1:] = [f"{y}.mean", f"{y}.inverse_deviation"]
    return model


def ort_step(model: onnx.ModelProto, x: Tensor, labels: Tensor) -> Callable[[], float]:
    """A step by the training runtime; it returns the loss before the update.

    Raises:
        RuntimeError: the runtime has no gradient, or no kernel for it, of some operator.
    """
    statistics_of_norms = {
        name
        for node in model.graph.node
        if node.op_type == "BatchNormalization"
        for name in node.input[3:]
    }
    names = [weight.name for weight in model.graph.initializer]
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        with _quiet_stderr():
            artifacts.generate_artifacts(
                model,
                requires_grad=[n for n in names if n not in statistics_of_norms],
                frozen_params=[n for n in names if n in statistics_of_norms],
                loss=artifacts.LossType.CrossEntropyLoss,
                optimizer=artifacts.OptimType.SGD,
                artifact_directory=folder,
            )
        state = CheckpointState.load_checkpoint(f"{folder}/checkpoint")
        module = Module(f"{folder}/training_model.onnx", state, session_options=options)
        optimizer = Optimizer(f"{folder}/optimizer_model.onnx", module)
    optimizer.set_learning_rate(eager.LR)
    inputs = x.numpy(), labels.numpy()

    def step() -> float:
        loss = module(*inputs)
        optimizer.step()
        module.lazy_reset_grad()
        return float(loss)

    return step


def _check(reference: Callable[[], Tensor], step: Callable[[], float]) -> None:
    """Ends the benchmark unless both start at one loss and lower it alike."""
    expected = np.array([float(reference()) for _ in range(CHECKED_STEPS)])
    got = np.array([step() for _ in range(CHECKED_STEPS)])
    start = expected[0]
    alike = np.allclose(got[0] - got, start - expected, rtol=0.01, atol=3e-6 * start)
    if not alike or abs(got[0] - start) > 1e-5 * start:
        sys.exit(f"not the same training: losses {got} beside eager's {expected}")


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """The gradient builder logs every pass there, whatever severity is set."""
    kept = os.dup(2)
    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _reason(error: RuntimeError) -> str:
    """The last clause of the message: before it stand C++ signatures."""
    return str(error).rsplit("[ONNXRuntimeError] : ", 1)[-1].strip().splitlines()[0]


def _line(row: Row) -> str:
    return (
        f"{row.model:10} batch {row.batch:3}  eager {row.eager_ms:8.2f} ms"
        f"  ort-training {row.ort_training:5.2f}"
    )


if __name__ == "__main__":
    main()
