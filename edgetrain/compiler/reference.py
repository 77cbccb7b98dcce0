"""The compiler's own door to ONNX Runtime: plain runs, nothing optimised."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from google.protobuf.message import EncodeError
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from edgetrain.arena import ARENA, settings
from edgetrain.compiler import limits
from edgetrain.errors import EngineError

Array = npt.NDArray[Any]

_ERRORS: Final = (
    ort_state.Fail,
    ort_state.InvalidArgument,
    ort_state.InvalidGraph,
    ort_state.InvalidProtobuf,
    ort_state.NoModel,
    ort_state.NotImplemented,
    ort_state.RuntimeException,
    EncodeError,  # over protobuf's 2 GB
    RuntimeError,
    ValueError,
)
_SILENT: Final = 4
_CODE_OR_PLACE: Final = re.compile(
    r"\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : |/onnxruntime_src/\S+:\d+ "
)
_LONGEST: Final = 400  # characters of a message
# Of model and inputs together: above it, what a run needs may be just as large.
_SMALL_BYTES: Final = 1 << 28


def run(
    model: onnx.ModelProto,
    feeds: Mapping[str, Array],
    outputs: Iterable[str] | None = None,
) -> dict[str, Array]:
    """Run a model once on one CPU thread with every graph optimisation off.

    Args:
        model: may hold sequences and other non-tensors; those are not returned.
        feeds: value of each graph input; others are ignored.
        outputs: any values of the main graph, not only its outputs; all outputs if None.

    Raises:
        EngineError: ONNX Runtime cannot load or run it, or a small model wants more than
            `limits.MAX_RUN_BYTES` of memory (unless an engine has run in this process).
    """
    if outputs is not None:
        model = _with_outputs(model, outputs)
    try:
        data = model.SerializeToString()
        given_bytes = len(data) + sum(value.nbytes for value in feeds.values())
        session = ort.InferenceSession(
            data,
            _options(bounded=given_bytes < _SMALL_BYTES),
            providers=["CPUExecutionProvider"],
        )
        wanted = {i.name for i in session.get_inputs()}
        values = session.run(
            None,
            {k: np.asarray(v) for k, v in feeds.items() if k in wanted},
            _run_options(),
        )
    except _ERRORS as error:
        raise EngineError(f"ONNX Runtime: {_reason(error)}") from error
    names = [out.name for out in session.get_outputs()]
    return {
        name: np.asarray(value)
        for name, value in zip(names, values, strict=True)
        if isinstance(value, (np.ndarray, np.generic))
    }


def _reason(error: Exception) -> str:
    """The message on one line, without codes and places in ONNX Runtime's own source."""
    text = _CODE_OR_PLACE.sub("", " ".join(str(error).split()))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _bound_memory() -> None:
    """Register the allocator that sessions may share; ONNX Runtime holds it for good."""
    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    bounded = settings(limits.MAX_RUN_BYTES)
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg(bounded))


def _run_options() -> ort.RunOptions:
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def _options(*, bounded: bool) -> ort.SessionOptions:
    options = ort.SessionOptions()
    if bounded and ARENA.claim(__name__, _bound_memory):
        options.add_session_config_entry("session.use_env_allocators", "1")
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = _SILENT
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return copy
