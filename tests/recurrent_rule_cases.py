"""Nodes on which the rules of the recurrent operators are tried."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from rule_case import Case

STEPS, BATCH, FEATURES, HIDDEN = 4, 2, 3, 5
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}


def recurrent(
    op: str,
    label: str,
    attributes: dict[str, Any] | None = None,
    *,
    optional: tuple[str, ...] = ("bias", "h", "c"),
    steps: int = STEPS,
) -> Case:
    """A node whose `optional` inputs, of bias, lengths, h, c and peepholes, are there.

    With Relu, each unit is well on one side of zero, where it has a derivative.
    """
    attributes = {"hidden_size": HIDDEN, **(attributes or {})}
    kinks = "Relu" in attributes.get("activations", ())
    count = DIRECTIONS[attributes.get("direction", "forward")]
    rows = GATES[op] * HIDDEN
    shapes = {
        "x": (steps, BATCH, FEATURES),
        "w": (count, rows, FEATURES),
        "r": (count, rows, HIDDEN),
        "bias": (count, 2 * rows),
        "lengths": (BATCH,),
        "h": (count, BATCH, HIDDEN),
        "c": (count, BATCH, HIDDEN),
        "peepholes": (count, 3 * HIDDEN),
    }
    inputs: list[np.ndarray | None] = []
    for index, (name, shape) in enumerate(shapes.items()):
        value = np.random.default_rng(index).normal(size=shape) * (0.2 if kinks else 0.6)
        if kinks and name == "bias":
            value += np.where(np.arange(shape[1]) % HIDDEN % 2, 1, -1)
        there = name in ("x", "w", "r", *optional)
        inputs.append(value.astype(np.float32) if there else None)
    if inputs[4] is not None:
        inputs[4] = np.full(BATCH, steps, np.int32)
    kept = inputs if op == "LSTM" else inputs[:6]
    outputs = 3 if op == "LSTM" else 2
    return Case(op, label, tuple(kept), attributes, outputs, fixed=(4,))


def _cases() -> list[Case]:
    cases = []
    for op, direction in itertools.product(GATES, DIRECTIONS):
        cases.append(recurrent(op, direction, {"direction": direction}))
    for direction in DIRECTIONS:
        after = {"linear_before_reset": 1, "direction": direction}
        cases.append(recurrent("GRU", f"reset after {direction}", after))
        optional = ("bias", "h", "c", "peepholes")
        label = f"peepholes {direction}"
        cases.append(recurrent("LSTM", label, {"direction": direction}, optional=optional))
    for op in GATES:
        cases.append(recurrent(op, "no options", optional=()))
        cases.append(recurrent(op, "one step", steps=1))
        cases.append(recurrent(op, "lengths", optional=("bias", "lengths")))
        both = {"direction": "bidirectional"}
        cases.append(recurrent(op, "no states", both, optional=("bias",)))
    return [
        *cases,
        recurrent("GRU", "reset after no options", {"linear_before_reset": 1}, optional=()),
        recurrent("LSTM", "peepholes alone", optional=("peepholes",)),
        recurrent("RNN", "hard sigmoid", {"activations": ["HardSigmoid"]}),
        *(recurrent(op, f"relu {len(names)}", {"activations": names, **more})
          for op, names, more in _with_relu()),
    ]  # fmt: skip


def _with_relu() -> list[tuple[str, list[str], dict[str, Any]]]:
    both = {"direction": "bidirectional"}
    return [
        ("RNN", ["Relu"], {}),
        ("RNN", ["Relu", "Sigmoid"], both),
        ("GRU", ["Tanh", "Relu"], {}),
        ("GRU", ["Tanh", "Relu", "Sigmoid", "Tanh"], {"linear_before_reset": 1, **both}),
        ("LSTM", ["HardSigmoid", "Relu", "Sigmoid"], {}),
        ("LSTM", ["Sigmoid", "Tanh", "Relu", "Sigmoid", "Relu", "Tanh"], both),
    ]


RECURRENT_CASES = _cases()
