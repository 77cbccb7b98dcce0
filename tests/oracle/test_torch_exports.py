"""Files of both PyTorch exporters normalise to the function PyTorch computes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import pytest

from edgetrain.compiler import reference
from edgetrain.compiler.export import differences, export
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.program import Program
from edgetrain.compiler.values import value_table

torch = pytest.importorskip("torch")
nn = torch.nn
pytestmark = pytest.mark.oracle

BATCH = 3


class ResidualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.short = nn.Conv2d(4, 8, 1, stride=2, bias=False)
        self.bn3 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        y = torch.relu(y + self.bn3(self.short(x)))
        return self.fc(y.mean((2, 3)))


class InvertedResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(4, 16, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU6(),
            nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU6(),
            nn.Conv2d(16, 4, 1, bias=False),
            nn.BatchNorm2d(4),
        )
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4, 5)
        )

    def forward(self, x):
        return self.head(x + self.block(x))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.0, batch_first=True, activation="gelu"
        )
        self.head = nn.Linear(8, 5)

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens)).mean(1))


def perceptron():
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(12, 16),
        nn.Tanh(),
        nn.Linear(16, 8),
        nn.ReLU(),
        nn.Linear(8, 5),
    )


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


@dataclass(frozen=True)
class Case:
    """A module and the shape of one sample: floats, or tokens of a small vocabulary."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: bool = False


CASES = {
    "mlp": Case(perceptron, (3, 4)),
    "lenet": Case(lenet, (1, 12, 12)),
    "resnet": Case(ResidualBlock, (4, 8, 8)),
    "mobilenet": Case(InvertedResidual, (4, 8, 8)),
    "encoder": Case(Encoder, (6,), tokens=True),
}


def module_of(case: Case) -> nn.Module:
    """With distinct values everywhere, also in what PyTorch initialises to ones."""
    torch.manual_seed(1)
    module = case.make()
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor) * 0.2)
    return module


def input_of(case: Case, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, *case.shape)
    if case.tokens:
        return torch.randint(0, 11, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def exported(
    module: nn.Module, x, *, dynamo: bool, training: bool = False
) -> onnx.ModelProto:
    module.train(training)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            program = torch.onnx.export(
                module,
                (x,),
                dynamo=True,
                verbose=False,
                input_names=["x"],
                output_names=["y"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
            )
            program.save(file)
        else:
            mode = torch.onnx.TrainingMode
            torch.onnx.export(
                module,
                (x,),
                file,
                dynamo=False,
                input_names=["x"],
                output_names=["y"],
                dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
                training=mode.TRAINING if training else mode.EVAL,
                do_constant_folding=not training,
            )
    module.eval()
    return onnx.load_from_string(file.getvalue())


def expect_equal(module: nn.Module, program: Program, x) -> None:
    values = reference.run(program.model, {"x": x.numpy(), **program.weights})
    with torch.no_grad():
        expected = module(x).numpy()
    scale = np.abs(expected).max()
    np.testing.assert_allclose(values["y"], expected, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("dynamo", [False, True], ids=["legacy", "dynamo"])
@pytest.mark.parametrize("name", CASES)
def test_both_exporters(name: str, dynamo: bool) -> None:
    case = CASES[name]
    module = module_of(case)
    model = exported(module, input_of(case), dynamo=dynamo)
    program = normalise(model, batch=BATCH)
    expect_equal(module, program, input_of(case, seed=4))
    value_table(program.model)
    same = export(model, program, program.weights)
    assert same.SerializeToString() == model.SerializeToString()
    moved = {k: v + np.float32(0.125) for k, v in program.weights.items()}
    assert differences(model, export(model, program, moved)) == []
    matrices = [p for p in module.parameters() if p.ndim > 1]
    assert sum(value.ndim > 1 for value in program.weights.values()) >= len(matrices)


@pytest.mark.parametrize("name", ["resnet", "mobilenet"])
def test_a_training_export_keeps_every_parameter_by_name(name: str) -> None:
    case = CASES[name]
    module = module_of(case)
    model = exported(module, input_of(case), dynamo=False, training=True)
    program = normalise(model, batch=BATCH)
    expect_equal(module, program, input_of(case, seed=4))
    state = {
        key: value.numpy()
        for key, value in module.state_dict().items()
        if value.is_floating_point()
    }
    assert program.weights.keys() == state.keys()
    for key, value in state.items():
        np.testing.assert_array_equal(program.weights[key], value)
    assert program.states == {key for key in state if "running" in key}


def test_equal_parameters_merged_by_the_legacy_exporter_come_apart() -> None:
    module = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.LayerNorm(6))
    x = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(0))
    model = exported(module, x, dynamo=False)
    program = normalise(model, batch=BATCH)
    expect_equal(module, program, x)
    assert program.weights.keys() == module.state_dict().keys()
    assert len(program.remarks) == 1
    new = {
        key: value + np.float32(index)
        for index, (key, value) in enumerate(program.weights.items())
    }
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(new[key]))
    expect_equal(module, normalise(export(model, program, new), batch=BATCH), x)
