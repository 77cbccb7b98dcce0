"""The gradient mode of every stage of a plan, from what is known of model and devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from edgetrain.abilities import BACKWARD, WEIGHTS
from edgetrain.compiler.cut import Cut
from edgetrain.compiler.nature import natures
from edgetrain.compiler.program import Program
from edgetrain.config import RunConfig
from edgetrain.estimator_spec import EstimatorSpec
from edgetrain.manifest import Mode
from edgetrain.planner.mode_rules import (
    AUTO,
    FORWARD_GRADIENT,
    FROZEN,
    HYBRID,
    SPSA,
    VJP,
    StageFacts,
)
from edgetrain.planner.modes import choose_modes
from edgetrain.wire.hello import Hello

BACKWARD_TO_FORWARD = 2.0


@dataclass(frozen=True, slots=True)
class Gradients:
    """How the stages of a plan obtain their gradients; an entry a stage.

    Attributes:
        reasons: one sentence each.
        estimators: how they estimate, where they do.
        returns: whether they return cotangents.
    """

    modes: tuple[Mode, ...]
    reasons: tuple[str, ...]
    estimators: tuple[EstimatorSpec, ...]
    returns: tuple[bool, ...]


class Chooser:
    """Chooses for one run.

    Args:
        config: what was asked.
        program: the model.
        trainable: the weights that are to train.
        devices: those that may get a stage.
        pretrained: tells whether the model is, at the cost of an evaluation.
    """

    def __init__(
        self,
        config: RunConfig,
        program: Program,
        trainable: Collection[str],
        devices: Mapping[str, Hello],
        pretrained: Callable[[], bool],
    ) -> None:
        self._config = config
        self._program = program
        self._trainable = frozenset(trainable)
        self._devices = devices
        self._ask_pretrained = pretrained

    def choose(self, names: Sequence[str], cuts: Sequence[Cut]) -> Gradients:
        """The modes for stages on those devices, divided by those cuts.

        Raises:
            PlanError: a mode is asked for where it cannot be.
        """
        found = natures(self._program, cuts, self._trainable)
        facts = [
            StageFacts(
                device=name,
                runs=frozenset(self._devices[name].runs),
                offered=self._devices[name].gradient,
                asked=self._config.train.gradient_of(stage, name),
                trains=nature.trains,
                branches=nature.branches,
                streams=nature.streams,
                convolutional=nature.convolutional,
            )
            for stage, (name, nature) in enumerate(zip(names, found, strict=True))
        ]
        spec = self._config.estimator
        choices = choose_modes(
            facts,
            pretrained=not all(_exact(f) for f in facts) and self._pretrained,
            available=frozenset(mode.value for mode in Mode),
            upstream=spec.upstream,
            shipped=self._config.model.source is not None,
        )
        return Gradients(
            tuple(Mode(choice.mode) for choice in choices),
            tuple(choice.reason for choice in choices),
            tuple(
                msgspec.structs.replace(spec, form=choice.form or spec.form)
                for choice in choices
            ),
            tuple(choice.returns for choice in choices),
        )

    def slowdown(self, name: str) -> float:
        """How much longer a device likely takes than for exact gradients."""
        hello, spec = self._devices[name], self._config.estimator
        asked = self._config.train.gradient_of(-1, name)
        if _exact(StageFacts(name, frozenset(hello.runs), hello.gradient, asked)):
            return 1.0
        forwards = {
            HYBRID: 1 + 2 * spec.tangents,
            FORWARD_GRADIENT: 3 + 2 * spec.tangents,
            SPSA: 1 + spec.sides * spec.tangents,
        }
        mode = next((w for w in (asked, hello.gradient) if w != AUTO), HYBRID)
        exact = 1 + BACKWARD_TO_FORWARD
        return forwards.get(mode, exact) / exact

    @cached_property
    def _pretrained(self) -> bool:
        return self._ask_pretrained()


def _exact(facts: StageFacts) -> bool:
    """Whether the stage is exact, or frozen, whatever the others are."""
    words = {facts.asked, facts.offered} - {AUTO}
    return words <= {VJP, FROZEN} and (bool(words) or {BACKWARD, WEIGHTS} <= facts.runs)
