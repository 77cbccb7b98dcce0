"""Features of layers: every operator has a group, and only what trains runs backward."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from edgetrain.compiler.build import Node
from edgetrain.compiler.cost import (
    _OPERATORS,
    MOVES_ONLY,
    node_amount,
    node_bytes,
    op_group,
)
from edgetrain.compiler.cut import CutFinder
from edgetrain.compiler.features import layer_features
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.rules.table import MULTI_RULES, RULES
from edgetrain.compiler.trainable import select_trainable
from edgetrain.op_groups import OpGroup, stage_features
from edgetrain.tensors import TensorSpec
from tests.lenet import lenet
from tests.small_models import build, normal


def of(model, trainable="all", batch=2):
    program = normalise(model, batch=batch)
    chosen = select_trainable(program, trainable)
    finder = CutFinder(program, chosen)
    return layer_features(program, chosen, finder.nodes, finder.layers()), finder


def test_no_operator_is_in_two_groups():
    ops = [op for words in _OPERATORS.values() for op in words.split()]
    assert len(ops) == len(set(ops))


def test_named_operators_exist():
    known = {*RULES, *MULTI_RULES, "Constant", "Shape", "ArgMax", "ArgMin", "Upsample"}
    assert {op for words in _OPERATORS.values() for op in words.split()} <= known
    assert set(_OPERATORS[OpGroup.LAYOUT].split()) >= MOVES_ONLY


@pytest.mark.parametrize(
    ("kernel", "group", "stride", "expected"),
    [
        ((16, 32, 3, 3), 1, 2, OpGroup.CONVOLUTION),
        ((16, 3, 3, 3), 1, 1, OpGroup.CONVOLUTION_PLAIN),
        ((6, 16, 3, 3), 1, 1, OpGroup.CONVOLUTION_PLAIN),
        ((16, 16, 3), 1, 1, OpGroup.CONVOLUTION_PLAIN),
        ((8, 8, 1, 1), 1, 1, OpGroup.POINTWISE),
        ((16, 1, 3, 3), 16, 1, OpGroup.DEPTHWISE),
        ((16, 1, 3, 3), 16, 2, OpGroup.DEPTHWISE_PLAIN),
        ((8, 1, 3, 3), 8, 1, OpGroup.DEPTHWISE_PLAIN),
        ((16, 4, 3, 3), 4, 1, OpGroup.DEPTHWISE_PLAIN),
    ],
)
def test_convolutions_are_told_apart(kernel, group, stride, expected):
    attributes = {"group": group, "strides": [stride] * (len(kernel) - 2)}
    node = Node("Conv", "c", ("x", "w"), ("y",), attributes)
    assert op_group(node, {"w": TensorSpec("w", "float32", kernel)}) is expected


def test_layers_add_up_to_the_whole():
    layers, finder = of(lenet())
    whole = stage_features(layers)
    flop = sum(amount.flop for amount in whole.forward.values())
    assert flop == sum(layer.flop for layer in finder.layers())
    assert sum(a.nodes for a in whole.forward.values()) == len(finder.nodes)
    assert whole.trainable_elements == 61_706


def test_a_first_layer_has_no_input_to_return_to():
    layers, _ = of(lenet())
    first, second = layers[0], layers[1]
    conv = OpGroup.CONVOLUTION_PLAIN
    assert first.backward[conv].flop == first.forward[conv].flop / 2
    assert second.backward[conv] == second.forward[conv]


def test_nothing_runs_backward_before_the_first_trained_weight():
    layers, _ = of(lenet(), "last:2")
    assert not layers[0].backward
    assert layers[0].trainable_elements == 0
    *_, before, last = layers
    assert before.backward[OpGroup.DENSE].flop == before.forward[OpGroup.DENSE].flop / 2
    assert last.backward == last.forward


def test_a_transposed_weight_counts_as_one():
    node = helper.make_node
    model = build(
        [
            node("Transpose", ["w"], ["wt"], perm=[1, 0]),
            node("MatMul", ["x", "wt"], ["y"]),
        ],
        [("x", ["N", 4])],
        ["y"],
        {"w": normal(3, 4)},
    )
    (layer,), _ = of(model)
    assert layer.backward[OpGroup.DENSE].flop == layer.forward[OpGroup.DENSE].flop / 2


def test_steps_of_a_recurrent_node_count():
    shapes = {"x": (7, 2, 3), "w": (1, 20, 3), "r": (1, 20, 5), "y": (7, 1, 2, 5)}
    values = {n: TensorSpec(n, "float32", shape) for n, shape in shapes.items()}
    node = Node("LSTM", "l", ("x", "w", "r"), ("y",), {"hidden_size": 5})
    assert node_amount(node, values).nodes == 7
    relu = Node("Relu", "e", ("y",), ("z",))
    assert node_amount(relu, values).nodes == 1


def test_a_plain_convolution_copies_its_windows():
    shapes = {"x": (2, 3, 8, 8), "w": (6, 3, 5, 5), "y": (2, 6, 4, 4)}
    values = {n: TensorSpec(n, "float32", shape) for n, shape in shapes.items()}
    node = Node("Conv", "c", ("x", "w"), ("y",))
    windows = 4 * (2 * 4 * 4) * (3 * 5 * 5)
    assert node_amount(node, values).nbytes == node_bytes(node, values) + 2 * windows


def test_bytes_count_every_input_once():
    values = {n: TensorSpec(n, np.dtype("float32").name, (2, 3)) for n in "xy"}
    assert node_bytes(Node("Mul", "m", ("x", "x"), ("y",)), values) == 48
    assert node_bytes(Node("Reshape", "m", ("x", "s"), ("y",)), values) == 0
