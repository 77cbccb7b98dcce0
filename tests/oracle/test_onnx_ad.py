"""Rules against onnx-ad's, where both have one, on the rules' own cases.

onnx-ad (MIT, by Joris Gillis) is an independent differentiation of ONNX into ONNX. Cases
that it refuses, or whose graph ONNX Runtime does not run, are counted.
"""

from __future__ import annotations

import collections

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper
from rule_cases import CASES
from test_rules import Primal, differentiate, primal

onnx_ad = pytest.importorskip("onnx_ad")
pytestmark = pytest.mark.oracle

TOLERANCE = 1e-4
AT_LEAST = 480  # cases
OPS = 105


class NotComparableError(Exception):
    """onnx-ad has no such rule, or its graph does not run."""


def forward_model(p: Primal):
    node = p.node
    feeds = {name: p.feeds[name] for name in node.inputs if name in p.feeds}
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for n, v in feeds.items()
    ]
    outputs = [
        helper.make_tensor_value_info(
            n, helper.np_dtype_to_tensor_dtype(p.values[n].dtype), p.values[n].shape
        )
        for n in node.outputs
        if n
    ]
    constants = [
        numpy_helper.from_array(p.g.value(n), n)
        for n in dict.fromkeys(node.inputs)
        if n and p.g.is_constant(n)
    ]
    graph = helper.make_graph([node.to_proto()], "case", infos, outputs, constants)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    )


def theirs(p: Primal, u: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Cotangents by onnx-ad, its seeds shaped as ours with one more axis."""
    try:
        model = onnx_ad.reverse(
            forward_model(p),
            inputs=p.wrt,
            outputs=p.outputs,
            prefix="adj_",
            dim="one",
            layout="onnx",
        )
        options = ort.SessionOptions()
        options.log_severity_level = 4
        session = ort.InferenceSession(model.SerializeToString(), options)
        feeds = {i.name: p.feeds.get(i.name) for i in session.get_inputs()}
        for y in p.outputs:
            feeds[f"adj_{y}"] = u[f"u/{y}"][..., None]
        for i in session.get_inputs():
            if feeds[i.name] is None:  # outputs that are not differentiated
                feeds[i.name] = np.zeros([d or 1 for d in i.shape], np.float32)
        found = session.run([f"adj_{x}" for x in p.wrt], feeds)
    except Exception as error:  # whatever it or the engine raises
        raise NotComparableError(f"{type(error).__name__}: {error}") from error
    return {x: value[..., 0] for x, value in zip(p.wrt, found, strict=True)}


# Where onnx-ad 0.3.0 gives something else than central differences do, which
# `test_rules.py` holds ours to.
DIFFERENT = {
    "Conv": {"many channels", "asymmetric", "one axis", "thin", "padded beyond"},  # pads
    "BatchNormalization": {"image", "vector", "sequence"},  # statistics are constants
    "Pad": {"value"},  # the value is a constant
    "Clip": {"crossed"},  # lower bound above the upper one
    "ReduceProd": {"zeros"},  # 0 / 0
    "Resize": {"crop filled"},
    "OneHot": {"known", "at run time"},  # values are constants
    "GRU": {"reset after no options"},
}


def test_where_both_have_a_rule_they_agree() -> None:
    agree: collections.Counter[str] = collections.Counter()
    different: dict[str, set[str]] = collections.defaultdict(set)
    refused: collections.Counter[str] = collections.Counter()
    for case in CASES:
        p = primal(case)
        u, _, ours = differentiate(p, p.wrt)
        try:
            found = theirs(p, u)
        except NotComparableError:
            refused[case.op] += 1
            continue
        if all(close(ours[name], value) for name, value in found.items()):
            agree[case.op] += 1
        else:
            different[case.op].add(case.label)
    assert dict(different) == DIFFERENT
    assert agree.total() >= AT_LEAST
    assert len(agree) >= OPS
    assert agree.total() + refused.total() + sum(map(len, different.values())) == len(CASES)


def close(ours: np.ndarray, value: np.ndarray) -> bool:
    size = np.abs(value).max(initial=0.0) + 1e-2
    return bool(np.isfinite(value).all()) and bool(
        np.allclose(ours, value, rtol=0, atol=TOLERANCE * size)
    )
