"""Which weights a run trains."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from edgetrain.compiler.build import Node
from edgetrain.compiler.origin import origins, prepares, weights_of
from edgetrain.compiler.program import Program
from edgetrain.errors import ConfigError, GraphError

LINEAR_OPS: Final = frozenset(
    {"Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN"}
)


def select_trainable(
    program: Program, choice: str | Sequence[str], *, place: str = "[model] trainable"
) -> frozenset[str]:
    """The weights the optimizer updates; running statistics are never among them.

    Args:
        program: the model.
        choice: ``"all"``; ``"last:N"``: all weights from the N-th last linear op
            (convolution, dense, recurrent) to the end; or regular expressions, one of
            which must match the whole name.
        place: where the user wrote it, for messages.

    Raises:
        ConfigError: nothing matches, or a pattern is malformed.
        GraphError: the model has no weights.
    """
    names = [name for name in program.weights if name not in program.states]
    if not names:
        raise GraphError(
            "the model has no weights that can train: its file holds no float tensor that"
            " an output depends on, other than settings and running statistics"
        )
    if choice == "all":
        chosen = frozenset(names)
    elif isinstance(choice, str) and choice.startswith("last:"):
        chosen = _last(program, choice, place)
    else:
        patterns = [choice] if isinstance(choice, str) else choice
        chosen = frozenset(n for n in names if any(_matches(p, n, place) for p in patterns))
    if not chosen:
        shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        raise ConfigError(f"{place} = {choice!r} matches no weight of: {shown}")
    return chosen


def _last(program: Program, choice: str, place: str) -> frozenset[str]:
    text = choice.removeprefix("last:")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{place} = {choice!r}: write last:N with N >= 1")
    nodes = [Node.from_proto(proto) for proto in program.model.graph.node]
    constants = {tensor.name for tensor in program.model.graph.initializer}
    made_of = origins(nodes, program.weights, constants)
    return tail_weights(nodes, made_of, int(text)) - program.states


def tail_weights(
    nodes: Iterable[Node], made_of: Mapping[str, frozenset[str]], count: int
) -> frozenset[str]:
    """The weights used only from the `count`-th last linear op on.

    Args:
        nodes: in execution order; those that only prepare a weight may stand anywhere.
        made_of: the weights of each value that depends on nothing else.
        count: of linear ops with weights; all weights where there are fewer.
    """
    users = [node for node in nodes if not prepares(node, made_of)]
    reads = [weights_of(node, made_of) for node in users]
    linear = [i for i, n in enumerate(users) if n.op_type in LINEAR_OPS and reads[i]]
    first = linear[-count] if len(linear) >= count else 0
    before = frozenset[str]().union(*reads[:first])
    return frozenset[str]().union(*reads[first:]) - before


def _matches(pattern: str, name: str, place: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise ConfigError(f"{place}: {pattern!r} is no pattern: {error}") from error
