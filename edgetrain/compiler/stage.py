"""From a normalised model and its cuts to one bundle a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from edgetrain.bundle import Bundle
from edgetrain.compiler.assemble import Assembler
from edgetrain.compiler.build import Node
from edgetrain.compiler.cut import Cut, CutFinder
from edgetrain.compiler.loss import target
from edgetrain.compiler.part import Part
from edgetrain.compiler.program import Program
from edgetrain.compiler.rays import check_modes, settled
from edgetrain.compiler.stash import Keep
from edgetrain.errors import GraphError, PlanError
from edgetrain.estimator_spec import DEFAULT, EstimatorSpec
from edgetrain.losses import PLAIN, LossOptions
from edgetrain.manifest import CARRYING, DECOUPLED, Manifest, Mode
from edgetrain.tensors import TensorSpec

_EXACT: Final = frozenset((Mode.VJP, Mode.LOCAL_VJP))


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to make of a program.

    Attributes:
        trainable: weights the optimizer updates.
        loss: name of the loss.
        modes: gradient mode of each stage; as many as there are stages.
        batch_statistics: BatchNormalization of exact stages normalises by its microbatch
            and keeps running statistics. Otherwise, and in all other modes, it uses the
            file's running statistics as constants.
        output: the output the loss applies to, where the model has several.
        model_sha256: of the user's file.
        blocks: of each stage's device, for a fast path; empty: portable graphs only.
        loss_options: what the loss is told.
        keep: what the forward of an exact stage hands to its backward.
        keeps: the same, a stage each, where stages differ.
        estimator: how gradients are estimated, where they are.
        estimators: the same, a stage each, where stages differ.
        returns: of each stage, whether it returns cotangents; empty: all do.
        seed: of the weights that heads begin with.
        ranges: of activations, where a forward is quantised.
    """

    trainable: frozenset[str]
    loss: str
    modes: tuple[Mode, ...]
    batch_statistics: bool = True
    output: str = ""
    model_sha256: str = ""
    blocks: tuple[int, ...] = ()
    loss_options: LossOptions = PLAIN
    keep: Keep = Keep.LEAST
    keeps: tuple[Keep, ...] = ()
    estimator: EstimatorSpec = DEFAULT
    estimators: tuple[EstimatorSpec, ...] = ()
    returns: tuple[bool, ...] = ()
    seed: int = 0
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def compile_stages(program: Program, cuts: Sequence[Cut], recipe: Recipe) -> list[Bundle]:
    """Cut a program and compile each stage.

    Stages are compiled from last to first: a stage returns a cotangent for exactly those
    activations that some trainable weight upstream influences, and no others.

    Args:
        program: the normalised model.
        cuts: ascending; one fewer than there are stages.
        recipe: what each stage must be able to do.

    Returns:
        One bundle a stage, in pipeline order, the weights being the program's.

    Raises:
        GraphError: the loss does not fit, or an op has no differentiation rule.
        PlanError: cuts out of order, or modes that cannot be mixed.
    """
    if len(recipe.modes) != len(cuts) + 1:
        raise PlanError(f"{len(recipe.modes)} gradient modes for {len(cuts) + 1} stages")
    check_modes(recipe.modes)
    parts = _parts(program, cuts, recipe)
    assembler = Assembler(program, recipe.trainable, recipe.model_sha256)
    bundles: list[Bundle] = []
    after: Manifest | None = None
    for part in reversed(parts):
        _check_reached(part, after.cotangents_out if after else (), recipe)
        bundle = assembler.assemble(part, after)
        after = bundle.manifest
        bundles.append(bundle)
    return bundles[::-1]


def pick_output(
    program: Program, name: str, *, place: str = "[model] output"
) -> TensorSpec:
    """The output a loss applies to; `place` is where the user names it.

    Raises:
        GraphError: there is no such output, or there are several and none is named.
    """
    names = [spec.name for spec in program.outputs]
    if name and name not in names:
        raise GraphError(f"{place} = {name!r}: the outputs are {', '.join(names)}")
    if not name and len(names) > 1:
        raise GraphError(
            f"the model has several outputs ({', '.join(names)}): name the one the loss"
            f" applies to with {place}"
        )
    return next(spec for spec in program.outputs if spec.name == (name or names[0]))


def _parts(program: Program, cuts: Sequence[Cut], recipe: Recipe) -> list[Part]:
    finder = CutFinder(program, recipe.trainable)
    positions = [0, *(cut.position for cut in cuts), len(finder.nodes)]
    if sorted(set(positions)) != positions:
        raise PlanError("the cuts are not in ascending order, or one leaves a stage empty")
    output = pick_output(program, recipe.output)
    makers = {name: node for node in finder.nodes for name in node.outputs}
    goal = target(recipe.loss, output, makers, recipe.loss_options)
    if goal not in {
        name for node in finder.nodes[positions[-2] :] for name in node.outputs
    }:
        raise PlanError(
            f"the last cut separates the loss from {goal!r}, the value it applies to:"
            " cut earlier"
        )
    influenced = {
        carries: _influenced(finder.nodes, positions, recipe, carries=carries)
        for carries in (False, True)
    }
    parts = []
    for stage, mode in enumerate(recipe.modes):
        start, stop = positions[stage : stage + 2]
        first, last = stage == 0, stage == len(recipe.modes) - 1
        parts.append(
            Part(
                stage=stage,
                stages=len(recipe.modes),
                mode=mode,
                nodes=finder.nodes[start:stop],
                receives=program.inputs if first else cuts[stage - 1].crossing,
                sends=() if last else cuts[stage].crossing,
                influenced=influenced[mode in CARRYING],
                loss=recipe.loss,
                loss_options=recipe.loss_options,
                goal=goal,
                target=goal if last else "",
                output=output.name,
                batch_statistics=recipe.batch_statistics and mode in _EXACT,
                keep=recipe.keeps[stage] if recipe.keeps else recipe.keep,
                block=recipe.blocks[stage] if recipe.blocks else 0,
                estimator=settled(
                    mode,
                    recipe.estimators[stage] if recipe.estimators else recipe.estimator,
                ),
                returns=recipe.returns[stage] if recipe.returns else True,
                first=start,
                samples=program.batch,
                seed=recipe.seed,
                ranges=recipe.ranges,
            )
        )
    return parts


def _influenced(
    nodes: Sequence[Node], positions: Sequence[int], recipe: Recipe, *, carries: bool
) -> frozenset[str]:
    """Every value of which a weight that some stage trains wants the cotangent.

    With `carries`, those that the stages alone influence whose noise is carried on.
    """
    reached: set[str] = set()
    for mode, start, stop in zip(recipe.modes, positions, positions[1:], strict=False):
        if mode in DECOUPLED:
            continue
        learns = mode in CARRYING if carries else mode is not Mode.FROZEN
        trained = recipe.trainable if learns else frozenset()
        for node in nodes[start:stop]:
            if any(name in reached or name in trained for name in node.inputs):
                reached.update(name for name in node.outputs if name)
    return frozenset(reached)


def _check_reached(part: Part, cotangents_in: Sequence[str], recipe: Recipe) -> None:
    """Refuse a stage that a decoupled stage after it cuts off from the loss.

    Raises:
        PlanError: naming both, and what to do.
    """
    blocking = [
        stage
        for stage, mode in enumerate(recipe.modes)
        if stage > part.stage and mode in DECOUPLED
    ]
    learns = part.mode not in DECOUPLED and part.mode is not Mode.FROZEN
    if not learns or not blocking or recipe.trainable.isdisjoint(part.read):
        return
    if part.made.isdisjoint(cotangents_in):
        stage = blocking[0]
        raise PlanError(
            f"stage {part.stage} ({part.mode}) would learn nothing: stage {stage} is"
            f" {recipe.modes[stage]}, it learns from a loss of its own and sends nothing"
            f" back. Set [train] gradient of stage {part.stage} to 'local_vjp', 'local' or"
            " 'frozen' too"
        )
