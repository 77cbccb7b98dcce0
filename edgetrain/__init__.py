"""edgetrain: train an ONNX model across devices that only have an inference engine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from edgetrain.compiler.grad import grad as grad

# What is offered here but loaded on first use only: a device has no onnx.
_LAZY: Final = {"grad": "edgetrain.compiler.grad"}


def __getattr__(name: str) -> Any:  # noqa: ANN401  whatever the name stands for
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
