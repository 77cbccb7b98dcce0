"""Quantised forms of exported models, as ONNX Runtime's own tools make them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnxruntime import quantization
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a quantised file is made.

    Attributes:
        source: the exported float model.
        quantise: reads the first path and writes the second.
    """

    source: str
    quantise: Callable[[Path, Path], None]


class _Calibration(quantization.CalibrationDataReader):
    """Four random images."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        shape = (2, 3, 32, 32)
        self._rest = [generator.standard_normal(shape, np.float32) for _ in range(4)]

    def get_next(self) -> dict[str, np.ndarray] | None:
        return {"x": self._rest.pop()} if self._rest else None


def _static(source: Path, to: Path, *, form: quantization.QuantFormat) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.onnx"
        quantization.quant_pre_process(source, ready)
        quantization.quantize_static(ready, to, _Calibration(), quant_format=form)


def _dynamic(source: Path, to: Path) -> None:
    quantization.quantize_dynamic(source, to)


def _four_bits(source: Path, to: Path) -> None:
    quantizer = MatMulNBitsQuantizer(onnx.load(source), block_size=32)
    quantizer.process()
    quantizer.model.save_model_to_file(str(to))


QUANTISED: Final[Mapping[str, Recipe]] = {
    "qdq_resnet": Recipe(
        "torch_resnet_leg", partial(_static, form=quantization.QuantFormat.QDQ)
    ),
    "qoperator_resnet": Recipe(
        "torch_resnet_leg", partial(_static, form=quantization.QuantFormat.QOperator)
    ),
    "dynamic_int8_vit": Recipe("torch_vit_leg", _dynamic),
    "dynamic_int8_lstm": Recipe("torch_lstm_leg", _dynamic),
    "four_bit_vit": Recipe("torch_vit_dyn", _four_bits),
}
