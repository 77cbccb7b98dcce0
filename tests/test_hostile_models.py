"""Damaged and absurd files: refused in one clear paragraph, or they work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from mutate_models import Mill, Outcome, report, run_all
from onnx import TensorProto, helper
from small_models import build, conditional, convnet, mlp, normal

from edgetrain.compiler import limits
from edgetrain.compiler.cut import CutFinder
from edgetrain.compiler.load import load
from edgetrain.compiler.normalise import normalise
from edgetrain.errors import GraphError

node = helper.make_node
MUTANTS = 600


def refusal(model: onnx.ModelProto, batch: int = 2) -> str:
    """Why it is not taken; the words make one paragraph."""
    with pytest.raises(GraphError) as info:
        normalise(model, batch=batch)
    text = str(info.value)
    assert "\n" not in text
    assert 20 < len(text) < 800
    return text


def calling(functions: list[onnx.FunctionProto], first: str) -> onnx.ModelProto:
    model = mlp()
    model.graph.node.insert(0, node(first, ["x"], ["called"], domain="own"))
    model.graph.node[1].input[0] = "called"
    model.functions.extend(functions)
    model.opset_import.append(helper.make_opsetid("own", 1))
    return model


def function(name: str, *calls: str) -> onnx.FunctionProto:
    values = ["a", *(f"v{i}" for i in range(len(calls)))]
    nodes = [
        node(call, [values[i]], [values[i + 1]], domain="own" if call != "Relu" else "")
        for i, call in enumerate(calls)
    ]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, ["a"], values[-1:], nodes, opsets)


# Thousands of files: scripts/mutate_models.py


def test_damaged_files_are_refused_or_work() -> None:
    outcomes = list(run_all(range(MUTANTS), seed=0, jobs=1))
    assert not [o for o in outcomes if o.is_defect], report(outcomes)
    assert {"works", "refused: GraphError"} <= {o.kind for o in outcomes}


def test_a_case_is_its_seed_and_number() -> None:
    cases = [Mill(7).case(n) for n in range(20)]
    assert cases == [Mill(7).case(n) for n in range(20)]
    assert len({data for _, _, data in cases}) == 20


@pytest.mark.parametrize(
    ("kind", "is_defect"),
    [
        ("works", False),
        ("refused: GraphError", False),
        ("crash", True),
        ("hang", True),
        ("memory", True),
        ("foreign: KeyError", True),
        ("unclear: GraphError", True),
    ],
)
def test_what_counts_as_a_defect(kind: str, is_defect: bool) -> None:
    outcome = Outcome(3, "dense", "cycle", kind, "why")
    assert outcome.is_defect == is_defect
    assert ("case 3 (dense, cycle)" in report([outcome])) == is_defect


# Names


@pytest.mark.parametrize(
    "damage",
    [
        lambda g: g.node[1].output.__setitem__(0, "h"),
        lambda g: g.node[1].output.__setitem__(0, "w2"),
        lambda g: g.node[1].output.__setitem__(0, "x"),
        lambda g: g.initializer.add().CopyFrom(g.initializer[0]),
        lambda g: g.input.add().CopyFrom(g.input[0]),
        lambda g: g.output.add().CopyFrom(g.output[0]),
    ],
)
def test_a_name_means_one_value(damage: Callable[[onnx.GraphProto], None]) -> None:
    model = mlp()
    damage(model.graph)
    assert "twice" in refusal(model)


def test_what_a_branch_reads_must_exist() -> None:
    model = conditional(condition_from_data=False)
    inner = next(a.g for n in model.graph.node if n.op_type == "If" for a in n.attribute)
    inner.node[0].input[0] = "nowhere"
    assert "'nowhere', which nothing produces" in refusal(model)


def test_branches_give_what_their_node_gives() -> None:
    model = conditional(condition_from_data=False)
    chosen = next(n for n in model.graph.node if n.op_type == "If")
    chosen.output.append("more")
    assert "with another number" in refusal(model)


def test_names_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(mlp().SerializeToString().replace(b"relu", b"r\xff\xfeu"))
    with pytest.raises(GraphError, match="not UTF-8"):
        load(path)


def test_equal_names_of_nodes_do_no_harm() -> None:
    model = mlp()
    for part in model.graph.node:
        part.name = "h"
    assert normalise(model, batch=2).outputs[0].shape == (2, 1)


# Nodes


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda g: g.node[0].input.__delitem__(slice(1, None)), "has 1 inputs and takes 2"),
        (lambda g: g.node[1].input.append("h"), "has 2 inputs and takes 1"),
        (lambda g: g.node[2].input.__setitem__(1, ""), "lacks its input 'B'"),
        (lambda g: g.node[1].output.append("more"), "has 2 outputs"),
        (lambda g: setattr(g.node[1], "op_type", "NoSuchOp"), "no operator that opset 20"),
        (lambda g: setattr(g.node[1], "op_type", "Cast"), "lacks its attribute 'to'"),
        (
            lambda g: setattr(g.node[0].attribute[0], "type", 1),
            "'transB' of the wrong kind",
        ),
        (lambda g: setattr(g.node[0].attribute[0], "type", 0), "'transB' of no known kind"),
        (lambda g: setattr(g.node[0].attribute[0], "i", -1), "'transB' = -1"),
        (lambda g: setattr(g.node[0].attribute[0], "ref_attr_name", "t"), "of a function"),
        (lambda g: g.node[0].attribute.add().CopyFrom(g.node[0].attribute[0]), "twice"),
    ],
)
def test_nodes_are_what_the_standard_says(
    damage: Callable[[onnx.GraphProto], None], words: str
) -> None:
    model = mlp()
    damage(model.graph)
    assert words in refusal(model)


def test_a_node_of_no_value_and_one_of_two() -> None:
    for count in (0, 2):
        model = convnet(13)
        constant = next(n for n in model.graph.node if n.op_type == "Constant")
        value = constant.attribute[0]
        del constant.attribute[:]
        constant.attribute.extend([value, helper.make_attribute("value_int", 1)][:count])
        assert f"has {count} values" in refusal(model)


# Tensors


@pytest.mark.parametrize("dims", [[-1, 4], [2**62, 2**62], [0, 2**62, 2**62], [1] * 65])
def test_shapes_that_no_tensor_has(dims: list[int]) -> None:
    model = mlp()
    model.graph.initializer[0].dims[:] = dims
    assert "which no tensor has" in refusal(model)


@pytest.mark.parametrize("place", ["initializer", "attribute"])
def test_tensors_are_as_long_as_their_shape(place: str) -> None:
    model = convnet(13)
    constant = next(n for n in model.graph.node if n.op_type == "Constant")
    tensors = model.graph.initializer
    tensor = tensors[0] if place == "initializer" else constant.attribute[0].t
    tensor.dims[0] += 1
    assert "its type and shape need" in refusal(model)


def test_strings_and_data_that_was_not_read() -> None:
    model = mlp()
    model.graph.initializer[1].CopyFrom(
        helper.make_tensor("b1", TensorProto.STRING, [8], ["text"] * 8)
    )
    assert "holds strings" in refusal(model)
    model = mlp()
    model.graph.initializer[0].data_location = TensorProto.EXTERNAL
    assert "in another file" in refusal(model)


@pytest.mark.parametrize(
    "facts",
    [
        {"location": "none.bin"},
        {"location": "../secret.bin"},
        {"location": "/dev/zero"},
        {"location": "model.onnx", "offset": "-1"},
        {"location": "model.onnx", "length": str(2**62)},
        {"location": "model.onnx", "offset": "words"},
        {},
    ],
)
def test_external_data_stays_beside_the_file(tmp_path: Path, facts: dict[str, str]) -> None:
    (tmp_path / "secret.bin").write_bytes(bytes(128))
    folder = tmp_path / "inner"
    folder.mkdir()
    model = mlp()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in facts.items():
        tensor.external_data.add(key=key, value=value)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(GraphError, match="external data"):
        load(folder / "model.onnx")


# Nesting


def test_functions_that_call_themselves() -> None:
    itself = [function("one", "one")]
    assert "calls itself" in refusal(calling(itself, "one"))
    others = [function("one", "two"), function("two", "Relu", "one")]
    assert "calls itself" in refusal(calling(others, "one"))


def test_functions_that_double_sixty_times() -> None:
    ladder = [function(f"f{i}", f"f{i + 1}", f"f{i + 1}") for i in range(60)]
    ladder.append(function("f60", "Relu"))
    assert "nodes with its functions written out" in refusal(calling(ladder, "f0"))
    few = calling(ladder[-3:], "f58")
    assert normalise(few, batch=2).outputs[0].shape == (2, 1)


def test_graphs_within_graphs() -> None:
    model = conditional(condition_from_data=False)
    outer = next(n for n in model.graph.node if n.op_type == "If")
    for _ in range(limits.MAX_DEPTH):
        inner = onnx.NodeProto()
        inner.CopyFrom(outer)
        del outer.attribute[0].g.node[:]
        outer.attribute[0].g.node.append(inner)
    assert "graphs within graphs" in refusal(model)


def test_a_weight_behind_thousands_of_transposes() -> None:
    """Longer than Python's stack is deep."""
    count = 3000
    nodes = [node("Transpose", [f"w{i}"], [f"w{i + 1}"], perm=[1, 0]) for i in range(count)]
    nodes.append(node("MatMul", ["x", f"w{count}"], ["y"]))
    model = build(nodes, [("x", ["N", 4])], ["y"], {"w0": normal(4, 4)})
    program = normalise(model, batch=2)
    assert len(CutFinder(program, frozenset(["w0"])).nodes) == count + 1


# What computes nothing


def test_models_without_inputs_outputs_or_arithmetic() -> None:
    model = mlp()
    del model.graph.output[:]
    assert "no outputs" in refusal(model)
    model = mlp()
    model.graph.output[0].name = "w1"
    assert "computes nothing" in refusal(model)
    model = mlp()
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.UNDEFINED
    assert "no known element type" in refusal(model)
