"""The laws of differentiation on the onnx package's own node tests."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx_node_cases import NodeCase, node_cases
from onnx_node_counts import COUNTED_WITH, LAWFUL, LEFT_OUT

STEP = 5e-3
LAW = 1e-5
DIFFERENCES = 4e-3
FLOAT_EPSILON = float(np.finfo(np.float32).eps)
# Ops that draw anew on every run.
REDRAWN = {"Dropout"}
# Ops of which some case has elements at a kink or a jump, near a pole, or infinite, or so
# many terms that rounding hides the differences.
KINKED = {
    "Atanh", "Attention", "BatchNormalization", "Cast", "CastLike", "Elu", "GridSample",
    "LSTM", "LeakyRelu", "LogSoftmax", "LpNormalization", "MaxPool",
    "NegativeLogLikelihoodLoss", "Pow", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceMax", "ReduceMin", "ScatterND", "Selu",
    "SoftmaxCrossEntropyLoss", "Tan", "ThresholdedRelu",
}  # fmt: skip


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options)


def mismatch(case: NodeCase) -> float:
    """How far <u, J v> is from <J^T u, v>, relative to the size of the terms."""
    left = [case.u[y].astype(np.float64) * value for y, value in case.ahead.items()]
    right = [case.v[x].astype(np.float64) * value for x, value in case.back.items()]
    size = sum(float(np.abs(t).sum()) for t in left + right)
    difference = sum(float(t.sum()) for t in left) - sum(float(t.sum()) for t in right)
    return abs(difference) / size if size else 0.0


def largest(value: np.ndarray) -> float:
    """The largest finite magnitude."""
    return float(np.abs(value[np.isfinite(value)]).max(initial=0))


class Differences:
    """A case's outputs along v, and what their differences say of J v."""

    def __init__(self, case: NodeCase) -> None:
        self._case = case
        self._session = session(case.model)
        with np.errstate(invalid="ignore"):
            self.at = {t: self._run(t * STEP) for t in (-2, -1, -0.5, 0, 0.5, 1, 2)}

    def wrong(self, output: str) -> np.ndarray:
        """Where J v is not what the differences say, kinks and jumps left aside."""
        index = self._case.outputs.index(output)
        error = np.abs(self._central(index, 0.5) - self._case.ahead[output])
        return self.smooth(output) & (error > self._tolerance(index))

    def smooth(self, output: str) -> np.ndarray:
        """Where all estimates agree, as they do away from kinks and jumps."""
        index = self._case.outputs.index(output)
        fine, allowed = self._central(index, 0.5), self._tolerance(index)
        with np.errstate(invalid="ignore"):
            narrow = (self.at[0.5][index] - self.at[-0.5][index]) / STEP
            # The bend over a step shrinks with the step, unless there is a kink at 0.
            kink = np.abs(2 * self._bend(index, 0.5) - self._bend(index, 1))
            agree = np.abs(self._central(index, 1) - fine) < allowed / 2
            return (kink < allowed) & agree & (np.abs(narrow - fine) < allowed / 2)

    def _bend(self, index: int, width: float) -> np.ndarray:
        """What the slopes after and before 0 differ by."""
        now, after, before = (self.at[t][index] for t in (0, width, -width))
        with np.errstate(invalid="ignore"):
            return (after + before - 2 * now) / (width * STEP)

    def _run(self, t: float) -> list[np.ndarray]:
        case = self._case
        moved = {
            k: np.asarray(x + t * case.v[k], np.float32) for k, x in case.feeds.items()
        }
        found = self._session.run(list(case.outputs), moved)
        return [np.asarray(y, np.float64) for y in found]

    def _central(self, index: int, width: float) -> np.ndarray:
        """Of fourth order in the step, `width` steps to either side."""
        with np.errstate(invalid="ignore"):
            near = self.at[width][index] - self.at[-width][index]
            far = self.at[2 * width][index] - self.at[-2 * width][index]
            return (8 * near - far) / (12 * width * STEP)

    def _tolerance(self, index: int) -> float:
        """What truncation, and the rounding of inputs and outputs, may amount to."""
        feeds = self._case.feeds.values()
        terms = max(x.size for x in feeds)
        output = FLOAT_EPSILON * largest(self.at[0][index]) / STEP
        inputs = FLOAT_EPSILON * max(map(largest, feeds)) / STEP
        scale = largest(self._central(index, 0.5)) + 0.1
        return scale * (DIFFERENCES + 2 * inputs) + (4 + terms**0.5 / 8) * output


@pytest.mark.parametrize("op", LAWFUL)
def test_every_case_of_an_op_obeys_the_laws(op: str) -> None:
    cases = node_cases()[0].get(op, [])
    if not cases and onnx.__version__ != COUNTED_WITH:
        pytest.skip(f"onnx {onnx.__version__} has no such case")
    compared = 0
    for case in cases:
        assert mismatch(case) <= LAW, case.name
        if op in REDRAWN:
            continue
        differences = Differences(case)
        for output in case.ahead:
            assert not differences.wrong(output).any(), case.name
            compared += int(differences.smooth(output).sum())
            if op not in KINKED:
                assert differences.smooth(output).all(), case.name
    assert compared or op in REDRAWN


def test_no_case_is_left_out_silently() -> None:
    """Every case of the onnx package is tried, or counted under a reason."""
    if onnx.__version__ != COUNTED_WITH:
        pytest.skip(f"counted with onnx {COUNTED_WITH}, this is {onnx.__version__}")
    ready, left = node_cases()
    assert left == LEFT_OUT
    assert {op: len(cases) for op, cases in ready.items()} == LAWFUL
