"""Write docs/operators.md: the ONNX operators that can be differentiated."""

from __future__ import annotations

from pathlib import Path

from edgetrain.compiler.decompose import FUNCTIONS, REWRITES
from edgetrain.compiler.rules.base import MultiRule, OpRule, Saves
from edgetrain.compiler.rules.choices import CHOICES
from edgetrain.compiler.rules.table import CONSTANT, MULTI_RULES, RULES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operators.md"
PARTS = {
    Saves.FIRST: "first input",
    Saves.REST: "other inputs",
    Saves.OUTPUT: "output",
    Saves.EXTRA: "other outputs",
}
HEAD = """\
# Operators

Written by `scripts/list_operators.py` from the table of rules; do not edit.

Each operator below can be differentiated backward (VJP: from a cotangent of the output to \
cotangents of the inputs) and forward (JVP: from tangents of the inputs to the tangent of \
the output). The backward graph reads the values named under *reads*, so a stage that is \
split keeps them between its forward and its backward run. The last column says where the \
derivative is not unique, or is none, and what is returned there.

{count} operators have a rule:

| operator | modes | reads | where the derivative is not unique |
|---|---|---|---|
"""
TAIL = """
The derivative of {constant} is 0 wherever there is one, and taken as 0 everywhere. \
Nothing passes through integers and booleans either.

{written} from the opset named on are first written out in older operators, as the \
standard defines them.

Any other operator is refused where a gradient would have to pass it, by name; before the \
first trained weight, and where all it reads is constant, every operator may stand.
"""


def row(op_type: str, rule: OpRule | MultiRule) -> str:
    reads = ", ".join(text for part, text in PARTS.items() if part in rule.saves)
    return f"| {op_type} | VJP, JVP | {reads} | {CHOICES.get(op_type, '')} |"


def listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def page() -> str:
    rules: dict[str, OpRule | MultiRule] = {**RULES, **MULTI_RULES}
    since = {**FUNCTIONS, **{op: opset for op, (opset, _) in REWRITES.items()}}
    written = [f"{op} ({opset})" for op, opset in sorted(since.items())]
    rows = "\n".join(row(op, rules[op]) for op in sorted(rules))
    tail = TAIL.format(constant=listed(sorted(CONSTANT)), written=listed(written))
    return f"{HEAD.format(count=len(rules))}{rows}\n{tail}"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
