"""Export small networks with both of PyTorch's exporters, and half and int8 forms of some.

Names end in the exporter: `_leg` the legacy one (TorchScript), `_dyn` the one of
torch.export. Weights are random, from a fixed seed. The files go to `.cache/inputs/models`;
what is there already is left alone. Needs PyTorch (``make oracle`` installs it).

Run as ``python scripts/export_models.py [--cache DIR] [NAME ...]``.
"""

from __future__ import annotations

import argparse
import io
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import networks
import onnx
import torch
from quantised import QUANTISED
from torch import nn
from wheels import CACHE

SEED: Final = 0


@dataclass(frozen=True, slots=True)
class Export:
    """One file.

    Attributes:
        make: builds the module.
        sample: makes its inputs.
        names: of the inputs.
        dynamo: which exporter.
        training: exported in training form.
        dtype: of the module's parameters and float inputs.
    """

    make: Callable[[], nn.Module]
    sample: Callable[[], tuple[torch.Tensor, ...]]
    names: tuple[str, ...] = ("x",)
    dynamo: bool = False
    training: bool = False
    dtype: torch.dtype = torch.float32


def _both(name: str, make: Callable[[], nn.Module], *shape: int) -> dict[str, Export]:
    def sample() -> tuple[torch.Tensor, ...]:
        return (torch.randn(2, *shape),)

    return {
        f"torch_{name}_leg": Export(make, sample),
        f"torch_{name}_dyn": Export(make, sample, dynamo=True),
    }


def _tokens(length: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (torch.randint(0, 100, (2, length)),)


def _sentence() -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 1000, (2, 16)), torch.ones(2, 16, dtype=torch.int64)


def _image() -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, 3, 32, 32),)


_SENTENCE_INPUTS: Final = ("ids", "mask")
EXPORTS: Final[Mapping[str, Export]] = {
    "torch_encoder_leg": Export(networks.Encoder, _tokens(16)),
    "torch_encoder_dyn": Export(networks.Encoder, _tokens(16), dynamo=True),
    "torch_gru_leg": Export(networks.gru, _tokens(16)),
    "torch_gru_dyn": Export(networks.gru, _tokens(16), dynamo=True),
    "torch_lstm_leg": Export(networks.lstm, _tokens(16)),
    "torch_lstm_dyn": Export(networks.lstm, _tokens(16), dynamo=True),
    **_both("mbv2", networks.MobileNet, 3, 32, 32),
    "torch_mbv2_leg_train": Export(networks.MobileNet, _image, training=True),
    "torch_mbv2_dyn_train": Export(networks.MobileNet, _image, dynamo=True, training=True),
    **_both("resnet", networks.ResNet, 3, 32, 32),
    "torch_resnet_leg_train": Export(networks.ResNet, _image, training=True),
    "torch_resnet_dyn_train": Export(networks.ResNet, _image, dynamo=True, training=True),
    **_both("unet", networks.UNet, 3, 32, 32),
    **_both("vit", networks.ViT, 3, 32, 32),
    "minilm_leg": Export(networks.MiniLM, _sentence, _SENTENCE_INPUTS),
    "minilm_dyn": Export(networks.MiniLM, _sentence, _SENTENCE_INPUTS, dynamo=True),
    "half_resnet": Export(networks.ResNet, _image, dtype=torch.float16),
    "half_vit": Export(networks.ViT, _image, dynamo=True, dtype=torch.float16),
    "bf16_vit": Export(networks.ViT, _image, dynamo=True, dtype=torch.bfloat16),
}


def build(wanted: Export) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The module, with random weights, and inputs for it."""
    torch.manual_seed(SEED)
    module = wanted.make().to(wanted.dtype)
    sample = tuple(
        x.to(wanted.dtype) if x.is_floating_point() else x for x in wanted.sample()
    )
    return module, sample


def export(wanted: Export, module: nn.Module, sample: tuple[torch.Tensor, ...]) -> bytes:
    """The serialized ONNX model of a module, which is left in training form or not."""
    module.train(wanted.training)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if wanted.dynamo:
            batch = torch.export.Dim("batch")
            program = torch.onnx.export(
                module,
                sample,
                dynamo=True,
                verbose=False,
                input_names=list(wanted.names),
                output_names=["y"],
                dynamic_shapes=tuple({0: batch} for _ in sample),
            )
            program.save(file)
        else:
            mode = torch.onnx.TrainingMode
            torch.onnx.export(
                module,
                sample,
                file,
                dynamo=False,
                input_names=list(wanted.names),
                output_names=["y"],
                dynamic_axes={name: {0: "batch"} for name in (*wanted.names, "y")},
                training=mode.TRAINING if wanted.training else mode.EVAL,
                do_constant_folding=not wanted.training,
            )
    return file.getvalue()


def make(name: str, folder: Path) -> Path:
    """The model called `name`, in the folder from now on."""
    path = folder / f"{name}.onnx"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    if name in EXPORTS:
        wanted = EXPORTS[name]
        path.write_bytes(export(wanted, *build(wanted)))
    else:
        recipe = QUANTISED[name]
        recipe.quantise(make(recipe.source, folder), path)
    onnx.checker.check_model(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="default: %(default)s")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    arguments = parser.parse_args()
    known = [*EXPORTS, *QUANTISED]
    for name in arguments.names or known:
        if name not in known:
            sys.exit(f"no model is called {name!r}; there are: {', '.join(known)}")
        path = make(name, arguments.cache / "inputs" / "models")
        print(f"{path} ({path.stat().st_size} B)")


if __name__ == "__main__":
    main()
