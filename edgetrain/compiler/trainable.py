"""Which weights a run trains."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from edgetrain.compiler.build import Node
from edgetrain.compiler.program import Program
from edgetrain.errors import ConfigError

LINEAR_OPS: Final = frozenset(
    {"Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN"}
)


def select_trainable(program: Program, choice: str | Sequence[str]) -> frozenset[str]:
    """The weights the optimizer updates; running statistics are never among them.

    Args:
        program: the model.
        choice: ``"all"``; ``"last:N"``: all weights from the N-th last linear op
            (convolution, dense, recurrent) to the end; or regular expressions, one of
            which must match the whole name.

    Raises:
        ConfigError: nothing matches, or a pattern is malformed.
    """
    names = [name for name in program.weights if name not in program.states]
    if choice == "all":
        chosen = frozenset(names)
    elif isinstance(choice, str) and choice.startswith("last:"):
        chosen = _last(program, choice)
    else:
        patterns = [choice] if isinstance(choice, str) else choice
        chosen = frozenset(n for n in names if any(_matches(p, n) for p in patterns))
    if not chosen:
        shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        raise ConfigError(f"[model] trainable = {choice!r} matches no weight of: {shown}")
    return chosen


def _last(program: Program, choice: str) -> frozenset[str]:
    text = choice.removeprefix("last:")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"[model] trainable = {choice!r}: write last:N with N >= 1")
    nodes = [Node.from_proto(proto) for proto in program.model.graph.node]
    linear = [
        index
        for index, node in enumerate(nodes)
        if node.op_type in LINEAR_OPS and program.weights.keys() & set(node.inputs)
    ]
    first = linear[-int(text)] if len(linear) >= int(text) else 0
    used = {name for node in nodes[first:] for name in node.inputs}
    before = {name for node in nodes[:first] for name in node.inputs}
    return frozenset(
        n for n in program.weights if n in used - before and n not in program.states
    )


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise ConfigError(
            f"[model] trainable: {pattern!r} is no pattern: {error}"
        ) from error
