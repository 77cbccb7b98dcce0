"""What the compiler says a graph's values take is what they take."""

from __future__ import annotations

from hypothesis import given, seed, settings
from hypothesis import strategies as st

from edgetrain.compiler.build import Node
from edgetrain.compiler.live_bytes import live_peak
from edgetrain.compiler.order import depth_first, relisted
from tests.test_order import graphs, run_depth_first


@st.composite
def sized_graphs(draw):
    """Nodes over the inputs x and dy, some of them views; sizes; and what is kept."""
    nodes: list[Node] = []
    for number in range(draw(st.integers(1, 10))):
        names = ["x", "dy", *(name for node in nodes for name in node.outputs)]
        reads = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))
        count = draw(st.integers(1, 2))
        kind = (
            draw(st.sampled_from(["Sum", "Reshape", "Identity"])) if count == 1 else "Split"
        )
        outputs = tuple(f"v{number}:{i}" for i in range(count))
        nodes.append(Node(kind, f"n{number}", tuple(reads), outputs))
    made = [name for node in nodes for name in node.outputs]
    sizes = {name: draw(st.integers(0, 9)) for name in made}
    kept = draw(st.sets(st.sampled_from(made), min_size=1, max_size=3))
    inner = {made[0]: draw(st.integers(0, 20))}
    return nodes, sizes, kept, inner


def simulated(nodes, sizes, kept, inner) -> int:
    """Allocate and free, with a count of the reads to come, as an engine would."""
    makers = {name: node for node in nodes for name in node.outputs}

    def buffer(name: str) -> str:
        node = makers.get(name)
        if node is None or name in kept or node.op_type not in ("Reshape", "Identity"):
            return name
        return buffer(node.inputs[0])

    to_come = [buffer(name) for node in nodes for name in node.reads]
    ever = set(to_come)
    stay = {buffer(name) for name in kept}
    memory: dict[str, int] = {}
    most = 0
    for node in nodes:
        memory |= {n: sizes[n] for n in node.outputs if buffer(n) == n}
        most = max(most, sum(memory.values()) + inner.get(node.outputs[0], 0))
        for name in node.reads:
            to_come.remove(buffer(name))
        for name in list(memory):
            if name not in to_come and name in ever and name not in stay:
                del memory[name]
    return most


@seed(0)
@settings(max_examples=300, deadline=None)
@given(sized_graphs())
def test_the_peak_is_that_of_a_simulated_run(case):
    assert live_peak(*case) == simulated(*case)


@seed(0)
@settings(max_examples=100, deadline=None)
@given(graphs())
def test_the_order_is_the_engines(nodes):
    assert [node.output for node in depth_first(nodes)] == run_depth_first(nodes)


@seed(0)
@settings(max_examples=100, deadline=None)
@given(graphs())
def test_what_is_listed_anew_can_run_and_gives_the_same(nodes):
    ends = {n.output for n in nodes} - {name for node in nodes for name in node.reads}
    known = {"x", "dy"}
    for node in depth_first(relisted(nodes, ends)):
        assert known.issuperset(node.reads)
        known.update(node.outputs)
    assert ends <= known


def test_a_product_with_a_transposed_value_comes_last_and_reads_it_directly():
    nodes = [
        Node("Transpose", "t", ("x",), ("t",), {"perm": [0, 2, 1]}),
        Node("MatMul", "m", ("t", "dy"), ("m",)),
        Node("Relu", "r", ("x",), ("r",)),
    ]
    found = relisted(nodes, {"m", "r"})
    assert [node.output for node in found] == ["r", "m"]
    assert found[1].inputs == ("x", "dy")


def test_equal_values_are_computed_once_but_for_results():
    nodes = [Node("Relu", name, ("x",), (name,)) for name in ("a", "b", "y")]
    nodes.append(Node("Sum", "s", ("a", "b"), ("s",)))
    found = relisted(nodes, {"y", "s"})
    assert [node.output for node in found[-2:]] == ["y", "s"]
    assert found[-1].inputs == 2 * found[0].outputs
