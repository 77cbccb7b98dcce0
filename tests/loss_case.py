"""A loss on given logits and labels, run as the graph that a device gets."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
from onnx.reference import ReferenceEvaluator

from edgetrain.compiler.build import GraphBuilder
from edgetrain.compiler.loss import LABELS, attach
from edgetrain.losses import PLAIN, LossOptions
from edgetrain.tensors import TensorSpec


def apply(
    name: str, output: np.ndarray, labels: np.ndarray, options: LossOptions = PLAIN
) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each sample, and the cotangent of their mean.

    In double precision onnx's own evaluator runs the graph, as ONNX Runtime lacks kernels.
    """
    goal = TensorSpec("z", output.dtype.name, output.shape)
    g = GraphBuilder({"z": goal}, {})
    criterion = attach(g, name, "z", options)
    results = [g.spec(criterion.loss), g.spec(criterion.cotangent)]
    model = g.model([goal, criterion.labels], results, "loss")
    onnx.checker.check_model(model, full_check=True)
    if output.dtype == np.float64:
        session = ReferenceEvaluator(model)
    else:
        session = ort.InferenceSession(model.SerializeToString(), one_thread())
    losses, cotangent = session.run(None, {"z": output, LABELS: labels})
    assert losses.shape == output.shape[:1]
    assert cotangent.shape == output.shape
    return losses, cotangent


def one_thread() -> ort.SessionOptions:
    """Quiet, and with one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return options
