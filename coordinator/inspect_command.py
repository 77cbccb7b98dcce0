"""`edgetrain inspect`: whether a model can train, and where it can be cut."""

from __future__ import annotations

from pathlib import Path

import msgspec

from coordinator.figures import bytes_text, count_text
from coordinator.tables import Column, print_table
from edgetrain.compiler.build import Node
from edgetrain.compiler.cut import CutFinder
from edgetrain.compiler.load import load
from edgetrain.compiler.loss import labels_spec
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.program import Program
from edgetrain.compiler.rules.table import CONSTANT, rule_of
from edgetrain.compiler.stage import Recipe, compile_stages
from edgetrain.compiler.trainable import select_trainable
from edgetrain.compiler.values import value_table
from edgetrain.errors import GraphError, InputError, UnsupportedOpError
from edgetrain.losses import LOSSES
from edgetrain.manifest import Mode
from edgetrain.settings import choose
from edgetrain.tensors import TensorSpec


class CutFacts(msgspec.Struct, frozen=True):
    """A valid cut.

    Attributes:
        name: of the tensor to write in [plan] cuts; several are joined by ``+``.
        tensors: all that cross.
        bytes_a_sample: of them.
        flop_share: of the model's arithmetic that lies before it, 0 ... 1.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    bytes_a_sample: float
    flop_share: float


class Inspection(msgspec.Struct, frozen=True):
    """What a model is to a training run, in shapes of the batch asked for or its own.

    Attributes:
        parameters: elements of all weights.
        trainable: names of the weights that training can change.
        losses: that fit its first output.
        obstacle: why it cannot train, with the loss asked for or with any; empty if it can.
        without_rules: op types that no gradient can pass.
        remarks: what was done to the file for training, one sentence each.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    parameters: int
    trainable: tuple[str, ...]
    flop_a_sample: int
    cuts: tuple[CutFacts, ...]
    losses: tuple[str, ...]
    obstacle: str
    without_rules: tuple[str, ...]
    remarks: tuple[str, ...]


def inspect(path: Path, batch: int, loss: str | None) -> Inspection:
    """Read a model and try to compile it for training.

    Args:
        path: of the file.
        batch: samples a microbatch; the model's own where it runs with no other.
        loss: to try; None: all.

    Raises:
        ConfigError: there is no such loss.
        GraphError: the file cannot be read or normalised.
    """
    if loss is not None:
        choose("--loss", loss, LOSSES)
    program = normalise(load(path), batch=batch, own_batch=True)
    remarks = program.remarks
    if program.batch != batch:
        batch = program.batch
        own = (
            f"The model fixes its batch size at {batch}, and is shown and trained with it."
        )
        remarks = (own, *remarks)
    trainable = select_trainable(program, "all")
    finder = CutFinder(program, trainable)
    layers = finder.layers()
    total_flop = max(1, sum(layer.flop for layer in layers))
    cuts, before = [], 0
    for layer in layers[:-1]:
        before += layer.flop
        cut = layer.output
        cuts.append(
            CutFacts(cut.name, cut.crossing, cut.nbytes / batch, before / total_flop)
        )
    fitting, obstacle = _fit(program, loss)
    if fitting:
        obstacle = _obstacle(program, trainable, fitting[0])
    return Inspection(
        inputs=program.inputs,
        outputs=program.outputs,
        parameters=sum(weight.size for weight in program.weights.values()),
        trainable=tuple(name for name in program.weights if name in trainable),
        flop_a_sample=total_flop // batch,
        cuts=tuple(cuts),
        losses=fitting,
        obstacle=obstacle,
        without_rules=_without_rules(finder.nodes, program),
        remarks=remarks,
    )


def show(inspection: Inspection, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(inspection).decode())
        return
    i = inspection
    print(f"inputs      {', '.join(map(_described, i.inputs))}")
    print(f"outputs     {', '.join(map(_described, i.outputs))}")
    print(
        f"weights     {count_text(i.parameters)} in all, {len(i.trainable)} tensors train"
    )
    print(f"arithmetic  {count_text(i.flop_a_sample)}flop a sample, forward")
    if i.obstacle:
        print(f"training    not possible: {i.obstacle}")
    else:
        print(f"training    possible, with loss {' or '.join(i.losses)}")
    if i.without_rules:
        print(f"no rule     {', '.join(i.without_rules)}")
    for remark in i.remarks:
        print(f"note        {remark}")
    columns = (Column("valid cut"), Column("a sample", True), Column("before it", True))
    rows = [
        (cut.name, bytes_text(cut.bytes_a_sample), f"{cut.flop_share:.0%}")
        for cut in i.cuts
    ]
    if rows:
        print_table(columns, rows)
    else:
        print("cuts        none: the model trains on one device only")


def _fit(program: Program, asked: str | None) -> tuple[tuple[str, ...], str]:
    """The losses that fit the first output, and why the first that does not, does not."""
    fitting, reasons = [], []
    for name in LOSSES if asked is None else (asked,):
        try:
            labels_spec(name, program.outputs[0])
        except GraphError as error:
            reasons.append(str(error))
        else:
            fitting.append(name)
    return tuple(fitting), "" if fitting else reasons[0]


def _obstacle(program: Program, trainable: frozenset[str], loss: str) -> str:
    """Why it does not compile for training with that loss; empty if it does."""
    first_output = program.outputs[0].name
    recipe = Recipe(trainable, loss, (Mode.VJP,), output=first_output)
    try:
        compile_stages(program, (), recipe)
    except InputError as error:
        return str(error)
    return ""


def _without_rules(nodes: tuple[Node, ...], program: Program) -> tuple[str, ...]:
    values = value_table(program.model)
    missing = set()
    for node in nodes:
        if not any(values[name].is_float for name in node.outputs if name in values):
            continue
        try:
            rule_of(node)
        except UnsupportedOpError:
            missing.add(node.op_type)
    return tuple(sorted(missing - CONSTANT))


def _described(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype}{list(spec.shape)}"
