"""docs/operators.md says what the table of rules says."""

from __future__ import annotations

import runpy
from pathlib import Path

import onnx

from edgetrain.compiler.decompose import FUNCTIONS, REWRITES
from edgetrain.compiler.program import OPSET
from edgetrain.compiler.rules.choices import CHOICES
from edgetrain.compiler.rules.table import CONSTANT, MULTI_RULES, RULES

ROOT = Path(__file__).resolve().parent.parent
OPERATORS = {*RULES, *MULTI_RULES}
PROMISED = 90


def test_the_page_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "list_operators.py"))
    assert (ROOT / "docs" / "operators.md").read_text() == script["page"](), (
        "run scripts/list_operators.py"
    )


def test_there_are_as_many_rules_as_promised() -> None:
    assert len(OPERATORS) >= PROMISED


def test_every_rule_is_of_an_operator_of_our_opset() -> None:
    for op_type in OPERATORS | CONSTANT:
        assert onnx.defs.get_schema(op_type, OPSET, "").since_version <= OPSET
    assert OPERATORS.isdisjoint(CONSTANT)


def test_choices_are_about_operators_that_have_rules() -> None:
    assert set(CHOICES) <= OPERATORS
    assert all(text and not text.endswith(".") for text in CHOICES.values())


def test_what_is_written_out_is_an_operator_of_the_standard() -> None:
    for op_type, opset in FUNCTIONS.items():
        schema = onnx.defs.get_schema(op_type, opset, "")
        assert schema.has_function or schema.has_context_dependent_function
        assert schema.since_version == opset
        assert op_type not in RULES or opset > OPSET
    for op_type, (opset, _) in REWRITES.items():
        assert onnx.defs.get_schema(op_type, opset, "").since_version == opset
