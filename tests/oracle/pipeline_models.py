"""PyTorch models that are exported, trained in a pipeline, and trained by PyTorch."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")
nn = torch.nn


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(16 * 5 * 5, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, 10),
        )

    def forward(self, x):
        return self.classifier(self.features(x))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(20, 32),
            nn.Tanh(),
            nn.Linear(32, 32),
            nn.ReLU(),
            nn.Linear(32, 24),
            nn.GELU(),
            nn.Linear(24, 5),
        )

    def forward(self, x):
        return self.layers(x)


class Encoder(nn.Module):
    """An embedding, one post-norm encoder layer, and a classifier on the mean token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.layer(self.embed(x)).mean(dim=1))


class Residual(nn.Module):
    """Convolutions with BatchNorm and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        )
        self.first = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        )
        self.second = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        y = self.second(torch.relu(self.first(x)))
        return self.head(torch.relu(x + y).mean(dim=(2, 3)))


class Inverted(nn.Module):
    """A MobileNetV2 block: expand, depthwise, project, with BatchNorm and ReLU6."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(3, 12, 1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU6(),
            nn.Conv2d(12, 12, 3, stride=2, padding=1, groups=12, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU6(),
            nn.Conv2d(12, 8, 1, bias=False),
            nn.BatchNorm2d(8),
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.block(x).mean(dim=(2, 3)))


@dataclass(frozen=True, slots=True)
class Case:
    make: Callable[[], object]
    shape: tuple[int, ...]
    classes: int


CASES: Mapping[str, Case] = {
    "lenet": Case(LeNet, (1, 28, 28), 10),
    "mlp": Case(Mlp, (20,), 5),
    "encoder": Case(Encoder, (6, 12), 5),
    "residual": Case(Residual, (3, 8, 8), 5),
    "inverted": Case(Inverted, (3, 8, 8), 5),
}


def make(name: str, seed: int = 0):
    """The model with weights of which no two are alike, so that names can be told apart."""
    torch.manual_seed(seed)
    model = CASES[name].make()
    with torch.no_grad():
        for parameter in (*model.parameters(), *model.buffers()):
            if parameter.dtype.is_floating_point and parameter.std() == 0:
                parameter.add_(0.05 * torch.rand_like(parameter))
            elif parameter.ndim == 1 and parameter.dtype.is_floating_point:
                parameter.add_(0.01 * torch.rand_like(parameter))
    return model


def samples(name: str, count: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    case = CASES[name]
    x = rng.standard_normal((count, *case.shape)).astype(np.float32)
    return x, rng.integers(0, case.classes, count)


def export(name: str, model, path: Path, *, dynamo: bool) -> onnx.ModelProto:
    """Write the model as its exporter does, batch left open, normalisation kept apart."""
    x = torch.from_numpy(samples(name, 2)[0])
    names = {"input_names": ["x"], "output_names": ["y"]}
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            batch = {"x": {0: torch.export.Dim("batch")}}
            program = torch.onnx.export(
                model, (x,), dynamo=True, dynamic_shapes=batch, optimize=False, **names
            )
            onnx.save(program.model_proto, path)
        else:
            buffer = io.BytesIO()
            torch.onnx.export(
                model,
                (x,),
                buffer,
                dynamo=False,
                dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
                training=torch.onnx.TrainingMode.PRESERVE,
                do_constant_folding=False,
                **names,
            )
            path.write_bytes(buffer.getvalue())
    return onnx.load(path)


def state(model) -> dict[str, np.ndarray]:
    return {
        name: value.detach().numpy().copy()
        for name, value in model.state_dict().items()
        if value.dtype.is_floating_point
    }


def pair(
    before: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray]
) -> dict[str, tuple[str, bool]]:
    """For each of PyTorch's tensors, the file's equal weight, and if it is transposed."""
    pairs = {}
    for name, value in before.items():
        for other, weight in weights.items():
            if weight.shape == value.shape and np.array_equal(weight, value):
                pairs[name] = (other, False)
            elif weight.shape == value.shape[::-1] and np.array_equal(weight, value.T):
                pairs.setdefault(name, (other, True))
    missing = before.keys() - pairs.keys()
    assert not missing, f"not in the file: {missing}"
    return pairs


def largest_difference(
    after: Mapping[str, np.ndarray],
    weights: Mapping[str, np.ndarray],
    pairs: Mapping[str, tuple[str, bool]],
) -> tuple[float, str]:
    """Over all tensors, relative to each tensor's largest element, and which it is."""
    worst = (0.0, "")
    for name, (other, transposed) in pairs.items():
        weight = weights[other].T if transposed else weights[other]
        scale = np.abs(after[name]).max()
        difference = np.abs(weight - after[name])
        if name.endswith("in_proj_bias"):
            # Softmax ignores what all keys have in common, so the key bias has a gradient
            # of zero, and an adaptive optimizer turns its rounding into steps.
            width = len(difference) // 3
            difference = np.delete(difference, slice(width, 2 * width))
        worst = max(worst, (float(difference.max() / scale), name))
    return worst
