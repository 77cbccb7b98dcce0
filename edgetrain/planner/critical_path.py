"""What a simulated stretch of time consists of: the chain of causes that ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgetrain.planner.timeline_nodes import START, Hop, Node


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the critical path.

    Attributes:
        what: such as ``stage 1 on pi``, ``hop 0->1: links``, ``hop 0->1: broker`` or
            ``hop 0->1: delay``: latency, loss, and what publishing and handing over take.
        seconds: of the stretch, all its times on the path together.
        share: of the stretch, 0 to 1.
    """

    what: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """Why a stretch took as long as it did; the shares add up to it.

    Attributes:
        shares: the largest first.
        hops: messages between stages on the path.
        nodes: numbers of the computations and passages on the path, in order of time.
    """

    shares: tuple[Share, ...]
    hops: int
    nodes: tuple[int, ...]


def walk_back(
    nodes: Sequence[Node], last: int, since_s: float, name: Callable[[Node], str]
) -> CriticalPath:
    """Follow what each node waited for, from `last` back to `since_s`.

    Args:
        nodes: by their numbers; a cause comes before what it causes.
        last: number of the node that ends the stretch.
        since_s: when the stretch begins.
        name: what a computation or a passage counts as.

    Time O(nodes on the path).
    """
    seconds: dict[str, float] = {}
    path = []
    hops: set[tuple[int, Hop, object]] = set()
    now_s = nodes[last].end_s if last != START else since_s
    number, below = last, last
    while number != START and now_s > since_s:
        node = nodes[number]
        gap_s = now_s - max(min(node.end_s, now_s), since_s)
        if gap_s > 0.0:
            gap = _gap_name(node, nodes[below])
            seconds[gap] = seconds.get(gap, 0.0) + gap_s
        now_s -= gap_s
        if now_s > since_s:
            spent_s = now_s - max(node.start_s, since_s)
            seconds[name(node)] = seconds.get(name(node), 0.0) + spent_s
            now_s = node.start_s
            path.append(number)
            if node.hop is not None and min(node.hop) >= 0:
                hops.add((node.step, node.hop, node.action))
        below, number = number, node.cause
    if now_s > since_s:
        seconds["the coordinator"] = seconds.get("the coordinator", 0.0) + now_s - since_s
    total_s = sum(seconds.values())
    shares = [Share(what, spent_s, spent_s / total_s) for what, spent_s in seconds.items()]
    shares.sort(key=lambda share: (-share.seconds, share.what))
    return CriticalPath(tuple(shares), len(hops), tuple(reversed(path)))


def _gap_name(node: Node, after: Node) -> str:
    """What lies between the end of a node and the beginning of the one it lets begin."""
    if node.hop is not None:
        return f"hop {node.hop}: delay"
    return "the coordinator" if "commit" in (node.kind, after.kind) else "delay"
