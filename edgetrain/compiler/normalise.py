"""Any inference ONNX model to the compiler's working form, checked against the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy.typing as npt
import onnx

from edgetrain.compiler import agreement, intake, large, quantised, sites, ties, weights
from edgetrain.compiler import shapes as static
from edgetrain.compiler.admission import admit
from edgetrain.compiler.decompose import decompose
from edgetrain.compiler.draft import (
    Draft,
    held_constants,
    listing,
    remark_dropout,
    remark_frozen,
    remark_integers,
    remark_sharing,
    remark_types,
)
from edgetrain.compiler.fold import convert, fold, fold_control_flow
from edgetrain.compiler.masked_rows import guard_masked_rows
from edgetrain.compiler.program import IR_VERSION, Program
from edgetrain.compiler.tidy import (
    drop_aliases,
    drop_dead,
    lift_constants,
    settle_casts,
    subgraphs,
)
from edgetrain.compiler.values import tensor_spec
from edgetrain.errors import EngineError, GraphError

Array = npt.NDArray[Any]
Shapes = Mapping[str, tuple[int, ...]]


def normalise(  # noqa: PLR0913  a keyword for each choice that is the user's
    model: onnx.ModelProto,
    *,
    batch: int,
    shapes: Shapes | None = None,
    fixed: Mapping[str, float] | None = None,
    tie: bool = False,
    own_batch: bool = False,
) -> Program:
    """Bring a model to opset 20, static shapes and weights as inputs.

    The result is run beside the file's own graph on one random input. Half, bfloat16 and
    double tensors become floats. Where the file fixes another batch size, the common rows
    must come out equal. Weights before a rounding to integers stay constant.

    Args:
        model: as loaded, of opset 7 to the newest that onnx knows; it is not altered.
        batch: samples a microbatch: the leading extent of every data input.
        shapes: shape without the batch of an input that the file leaves open.
        fixed: inputs that are no data but have this value in every element, such as the
            first state of a recurrent net or its sampling rate.
        tie: make one weight of matrices that are equal, as they are or transposed.
        own_batch: take the size that the file fixes where it runs at no other; the result
            says which batch it has.

    Raises:
        GraphError: the model holds what cannot be trained, a shape is missing, the batch
            size is fixed inside the graph, or the result does not compute the same.
    """
    if batch < 1:
        raise GraphError(f"the batch size is {batch}; it must be at least 1")
    admit(model)
    held = sites.find(model)
    draft = _begin(model, held, batch, shapes or {}, fixed or {})
    draft.tie = tie
    foreign = {name: rows for name, rows in draft.extents.items() if rows != batch}
    try:
        _rewrite(draft, held, foreign)
        remark = agreement.verify(draft.trial, draft.sample)
    except (GraphError, EngineError) as error:
        again = partial(normalise, model, shapes=shapes, fixed=fixed, tie=tie)
        program = _at_own_batch(again, draft.extents, foreign)
        if program is not None and own_batch:
            return program
        raise _explained(error, foreign, batch, runs=program is not None) from error
    draft.remarks += [remark] if remark else []
    return _program(draft, held)


def _begin(
    model: onnx.ModelProto,
    held: Mapping[str, sites.Site],
    batch: int,
    shapes: Shapes,
    fixed: Mapping[str, float],
) -> Draft:
    """The file's graph in inference form, and a copy of it with static input shapes."""
    skeleton, apart = large.set_apart(model, held)
    original = intake.to_inference(intake.open_up(skeleton))
    intake.fix_inputs(original, fixed, batch)
    widened = intake.to_float32(original, intake.BFLOAT16)
    widened |= {held[name].source.dtype for name in apart} & {"bfloat16"}
    work = onnx.ModelProto()
    work.CopyFrom(original)
    extents = static.bind(work.graph, batch, shapes)
    sample = agreement.sample(work.graph, max([batch, *extents.values()]))
    draft = Draft(
        original=original,
        model=work,
        batch=batch,
        extents=extents,
        sample=sample,
        apart=apart,
        feeds=agreement.leading(sample, dict.fromkeys(sample, batch)),
        weights=agreement.as_float32(apart),
        constants=held_constants(original.graph, fixed),
    )
    for graph in (original.graph, work.graph):
        large.declare(graph, apart)
    remark_types(draft, widened)
    remark_integers(draft)
    return draft


def _at_own_batch(
    again: Callable[..., Program], extents: Mapping[str, int], foreign: Mapping[str, int]
) -> Program | None:
    """The program at the one batch size that the file fixes; None if it is none there."""
    own = set(foreign.values())
    if len(own) != 1:
        return None
    try:
        return again(batch=own.pop())
    except GraphError:
        if len(set(extents.values())) == 1:
            raise  # what fails at the file's own batch size too has another reason
        return None


def _explained(
    error: GraphError | EngineError, foreign: Mapping[str, int], batch: int, *, runs: bool
) -> GraphError:
    """What to tell the user; `runs` says whether the file's own batch size would do."""
    if not foreign:
        reason = str(error)
        if isinstance(error, EngineError):
            reason = f"the model does not run, so it cannot be trained: {reason}"
        return GraphError(reason)
    name, extent = next(iter(foreign.items()))
    own = (
        f"Take {extent} samples at a time (--batch {extent}; in a run file, leave [train]"
        " microbatches out), or export"
    )
    return GraphError(
        f"the model fixes its batch size: input {name!r} takes {extent}, and with"
        f" {batch} its rows are not independent or it does not run ({error})."
        f" {own if runs else 'Export'} it with a dynamic batch axis, or, if {name!r}"
        " is no data (a first state, say), give its value in [model] fixed"
    )


def _rewrite(
    draft: Draft, held: Mapping[str, sites.Site], foreign: Mapping[str, int]
) -> None:
    """Take the draft's model to its final form, collecting weights and remarks."""
    remark_dropout(draft)
    narrowed = intake.to_float32(draft.model)
    if "float16" in narrowed:
        draft.tolerance = agreement.HALF_TOLERANCE
    if narrowed:
        draft.feeds = agreement.as_float32(draft.feeds)
    remark_types(draft, narrowed)
    _lift_weights(draft, held)
    if any(any(subgraphs(node)) for node in draft.model.graph.node):
        fold_control_flow(draft.model, lambda: _lift_weights(draft, held))
    intake.refuse_control_flow(draft.model.graph)
    _tie(draft)
    fold(draft.model, draft.all_feeds)
    _rebatch(draft, foreign)
    draft.model = decompose(draft.model, draft.all_feeds)
    draft.model = convert(draft.model)
    fold(draft.model, draft.all_feeds)
    draft.model = static.infer(draft.model)
    settle_casts(draft.model.graph)
    guard_masked_rows(draft.model.graph)
    drop_aliases(draft.model.graph)
    drop_dead(draft.model.graph)
    if not draft.model.graph.node:
        raise GraphError(
            "the model computes nothing: its outputs are inputs, weights or constants;"
            " the file is damaged, export it again"
        )
    _drop_unused(draft)
    _freeze_quantised(draft)
    draft.model = static.complete(draft.model, draft.all_feeds)
    draft.model.ir_version = IR_VERSION
    remark_sharing(draft)
    remark_frozen(draft)


def _rebatch(draft: Draft, foreign: Mapping[str, int]) -> None:
    for old in set(foreign.values()):
        changed = static.rebatch(draft.model.graph, draft.feeds, old, draft.batch)
        if changed:
            draft.remarks.append(
                f"Reshape nodes that fix a batch of {old} in the file ({changed} of them)"
                f" take {draft.batch} in training."
            )


def _lift_weights(draft: Draft, held: Mapping[str, sites.Site]) -> None:
    graph = draft.model.graph
    lift_constants(graph)
    copies = weights.unshare(graph, held)
    if copies:
        draft.remarks.append(
            "Merged with a tensor of equal value when the file was exported, and tensors of"
            f" their own from now on: {listing(copies)}."
        )
    if not any(any(subgraphs(node)) for node in graph.node):
        drop_aliases(graph)
    draft.weights.update(weights.lift(graph, held))


def _drop_unused(draft: Draft) -> None:
    graph = draft.model.graph
    read = {name for node in graph.node for name in node.input}
    read.update(out.name for out in graph.output)
    unused = [name for name in draft.weights if name not in read]
    for name in unused:
        del draft.weights[name]
    kept = [info for info in graph.input if info.name not in unused]
    del graph.input[:]
    graph.input.extend(kept)
    if unused:
        draft.remarks.append(
            f"No output depends on these, which stay as they are: {listing(unused)}."
        )


def _program(draft: Draft, held: Mapping[str, sites.Site]) -> Program:
    graph = draft.model.graph
    states = {
        name
        for node in graph.node
        if node.op_type == "BatchNormalization"
        for name in node.input[3:5]
    }
    return Program(
        model=draft.model,
        weights=draft.weights,
        sources={name: held[name].source for name in draft.weights},
        inputs=tuple(tensor_spec(i) for i in graph.input if i.name not in draft.weights),
        outputs=tuple(tensor_spec(out) for out in graph.output),
        batch=draft.batch,
        states=frozenset(states & draft.weights.keys()),
        remarks=tuple(draft.remarks),
        ties=draft.ties,
    )


def _tie(draft: Draft) -> None:
    """Join the matrices that are one parameter, or offer to."""
    found = ties.find(draft.weights)
    if not found:
        return
    names = listing([f"{tie.name} (of {tie.of})" for tie in found])
    if not draft.tie:
        draft.remarks.append(
            "Equal to another matrix, as it is or transposed, and so perhaps one parameter"
            f" that the exporter wrote twice; apart unless [model] tie = true: {names}."
        )
        return
    ties.apply(draft.model.graph, found)
    for tie in found:
        del draft.weights[tie.name]
    draft.ties = found
    draft.remarks.append(f"Tied, and written to both tensors on export: {names}.")


def _freeze_quantised(draft: Draft) -> None:
    frozen = quantised.freeze(draft.model.graph, draft.weights)
    for name in frozen:
        del draft.weights[name]
    draft.constants = draft.constants.difference(frozen)
    if frozen:
        draft.remarks.append(
            "Constant in training, as a rounding to integers comes after them and no"
            f" gradient passes it: {listing(frozen)}."
        )
    if draft.integers and not draft.weights:
        raise GraphError(
            f"the model's weights are quantised ({draft.integers} tensors) and no float"
            " weight follows the last rounding, through which no gradient passes: train the"
            " float model that this file was made from, and quantise the result"
        )
