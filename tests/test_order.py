"""The order in which nodes are listed: valid, the same nodes, and lean when run."""

from __future__ import annotations

from hypothesis import given, seed, settings
from hypothesis import strategies as st

from edgetrain.compiler.build import Node
from edgetrain.compiler.order import lean_order


@st.composite
def graphs(draw) -> list[Node]:
    """Nodes in execution order, over the inputs x and dy."""
    nodes: list[Node] = []
    for number in range(draw(st.integers(1, 12))):
        names = ["x", "dy", *(node.output for node in nodes)]
        reads = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))
        nodes.append(Node("Sum", f"n{number}", tuple(reads), (f"v{number}",)))
    return nodes


def run_depth_first(nodes: list[Node]) -> list[str]:
    """Run nodes as ONNX Runtime's default order does; the outputs in that order."""
    place = {node.output: index for index, node in enumerate(nodes)}
    read = {name for node in nodes for name in node.reads}
    done: list[str] = []

    def run(index: int) -> None:
        node = nodes[index]
        if node.output in done:
            return
        for before in sorted((place[n] for n in node.reads if n in place), reverse=True):
            run(before)
        done.append(node.output)

    for index in reversed(range(len(nodes))):
        if nodes[index].output not in read:
            run(index)
    return done


def peak(nodes: list[Node]) -> int:
    """The most values that are alive at once, results and inputs apart."""
    order = run_depth_first(nodes)
    by_output = {node.output: node for node in nodes}
    last = {n: i for i, v in enumerate(order) for n in by_output[v].reads}
    alive, most = set(), 0
    for index, value in enumerate(order):
        alive |= {value} & last.keys()
        most = max(most, len(alive))
        alive = {name for name in alive if last[name] > index}
    return most


def backward(layers: int) -> list[Node]:
    """A chain: each layer has a mask of its stash, a cotangent and a weight gradient."""
    nodes, dy = [], "dy"
    for layer in reversed(range(layers)):
        mask, masked, gradient, dx = (f"{kind}{layer}" for kind in ("m", "d", "g", "x"))
        nodes += [
            Node("Greater", mask, (f"stash{layer}",), (mask,)),
            Node("Mul", masked, (dy, mask), (masked,)),
            Node("MatMul", dx, (masked, f"w{layer}"), (dx,)),
            Node("MatMul", gradient, (f"stash{layer}", masked), (gradient,)),
        ]
        dy = dx
    return nodes[:-2] + nodes[-1:]


@seed(0)
@settings(max_examples=100, deadline=None)
@given(graphs())
def test_the_same_nodes_each_after_what_it_reads(nodes):
    ordered = lean_order(nodes, {"dy"})
    assert sorted(map(id, ordered)) == sorted(map(id, nodes))
    known = {"x", "dy"}
    for node in ordered:
        assert known.issuperset(node.reads)
        known.update(node.outputs)


def test_a_chain_holds_no_more_when_it_is_longer():
    assert peak(lean_order(backward(3), {"dy"})) == peak(lean_order(backward(30), {"dy"}))
    assert peak(lean_order(backward(30), {"dy"})) <= 3
    assert peak(backward(30)) > 30, "as it was emitted, it does"
