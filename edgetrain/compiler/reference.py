"""The compiler's own door to ONNX Runtime: plain runs, nothing optimised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from google.protobuf.message import EncodeError
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

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
        EngineError: ONNX Runtime cannot load or run it.
    """
    if outputs is not None:
        model = _with_outputs(model, outputs)
    try:
        session = ort.InferenceSession(
            model.SerializeToString(), _options(), providers=["CPUExecutionProvider"]
        )
        wanted = {i.name for i in session.get_inputs()}
        values = session.run(
            None, {k: np.asarray(v) for k, v in feeds.items() if k in wanted}
        )
    except _ERRORS as error:
        reason = " ".join(str(error).split())
        raise EngineError(f"ONNX Runtime: {reason}") from error
    names = [out.name for out in session.get_outputs()]
    return {
        name: np.asarray(value)
        for name, value in zip(names, values, strict=True)
        if isinstance(value, (np.ndarray, np.generic))
    }


def _options() -> ort.SessionOptions:
    options = ort.SessionOptions()
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
