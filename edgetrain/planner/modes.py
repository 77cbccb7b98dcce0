"""Which gradient mode each stage gets, and why: from plain facts, stage by stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from edgetrain.abilities import BACKWARD, JVP
from edgetrain.errors import PlanError
from edgetrain.estimator_spec import FORWARD
from edgetrain.planner.mode_rules import (
    AUTO,
    CARRYING,
    FROZEN,
    HYBRID,
    IDENTITY,
    ORDER,
    RULES,
    VJP,
    Arrival,
    Place,
    StageFacts,
)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a stage does.

    Attributes:
        reason: one sentence.
        form: of its estimates, where not as asked; see `EstimatorSpec.form`.
        returns: whether cotangents, or slopes, go on to the stage before.
    """

    mode: str
    reason: str
    form: str = ""
    returns: bool = True


_WORDS: Final = {
    Arrival.NOTHING: "nothing comes back",
    Arrival.ESTIMATE: "only an estimate comes back",
    Arrival.STAND_IN: "only another value's cotangent comes back",
}


def choose_modes(
    stages: Sequence[StageFacts],
    *,
    pretrained: bool,
    available: Collection[str],
    upstream: bool = True,
    shipped: bool = False,
) -> tuple[Choice, ...]:
    """Choose from the last stage to the first, as each depends on what comes back to it.

    Where nothing is asked, the first mode of `ORDER` that the engine runs, that what
    arrives suffices for, and that is known to help in such a place. An estimated cotangent
    goes upstream only if the model is not pretrained: there it does harm.

    Args:
        stages: in pipeline order.
        pretrained: the weights have learnt the task, or one near it.
        available: the modes there are.
        upstream: whether an estimated cotangent may be returned at all.
        shipped: heads of stages come with weights that have learnt.

    Returns:
        A choice a stage.

    Raises:
        PlanError: a mode is asked for where it cannot be.
    """
    arrives, source = Arrival.EXACT, ""
    choices: list[Choice] = []
    for number in range(len(stages) - 1, -1, -1):
        facts = stages[number]
        place = Place(
            facts,
            arrives,
            source,
            number,
            pretrained=pretrained,
            shipped=shipped,
            later=tuple(choice.mode for choice in reversed(choices)),
        )
        mode, reason = _choose(place, available)
        returned = _returned(mode, place, noise=upstream and not pretrained)
        if returned is not arrives:
            source = f"stage {number}, {mode!r} on {facts.device!r}"
        form = "" if JVP in facts.runs else FORWARD
        returned_any = returned is not Arrival.NOTHING or mode in CARRYING  # slopes
        returns = number == 0 or returned_any
        choices.append(Choice(mode, f"{facts.device} {reason}", form, returns))
        arrives = returned
    return _agreed(choices[::-1])


def _agreed(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Stages that carry each other's noise do it in one form."""
    carrying = [choice for choice in choices if choice.mode in CARRYING]
    form = FORWARD if any(choice.form for choice in carrying) else ""
    return tuple(
        replace(choice, form=form) if choice.mode in CARRYING else choice
        for choice in choices
    )


def _choose(place: Place, available: Collection[str]) -> tuple[str, str]:
    facts, number = place.facts, place.number
    if AUTO not in (facts.asked, facts.offered) and facts.asked != facts.offered:
        raise _cannot(number, facts, f"that device offers only {facts.offered!r}")
    if facts.asked != AUTO:
        refusal = _refusal(facts.asked, place)
        if refusal:
            raise _cannot(number, facts, refusal)
        return facts.asked, f"was asked for {facts.asked!r}"
    if facts.offered != AUTO:
        refusal = _refusal(facts.offered, place)
        said = f"declares itself {facts.offered!r} only"
        return (FROZEN, f"{said}, but {refusal}") if refusal else (facts.offered, said)
    refusals: dict[str, str] = {}
    for mode in (word for word in ORDER if word in available):
        refusals[mode] = _refusal(mode, place) or _unwise(mode, place)
        if not refusals[mode]:
            return mode, _reason(mode, refusals)
    raise PlanError(f"stage {number} on {facts.device!r}: no gradient mode is possible")


def _refusal(mode: str, place: Place) -> str:
    """Why a mode is not possible there; empty: it is."""
    rule, facts = RULES[mode], place.facts
    lacking = sorted(rule.runs - place.runs)
    if lacking and (facts.trains or BACKWARD in lacking):
        return f"its engine runs no {' and no '.join(lacking)} graphs"
    if place.arrives < rule.least:
        return f"{_WORDS[place.arrives]} from {place.source}"
    return rule.possible(place)


def _unwise(mode: str, place: Place) -> str:
    """Why a mode is not chosen there by itself; empty: it is."""
    if mode not in (VJP, FROZEN) and not place.facts.trains:
        return "there is nothing to train"
    return RULES[mode].wise(place)


def _reason(mode: str, refusals: Mapping[str, str]) -> str:
    """With what speaks against the modes that come before, most wanted first."""
    against = dict.fromkeys(refusals[m] for m in (VJP, HYBRID) if refusals.get(m))
    because = RULES[mode].because
    if not against:
        return because
    shown = list(against) if mode == FROZEN else list(against)[:1]
    return f"{because}: {', and '.join(shown)}"


def _returned(mode: str, place: Place, *, noise: bool) -> Arrival:
    """What a stage in that mode sends back."""
    if mode == VJP:
        return place.arrives
    if mode == FROZEN:
        return place.arrives if BACKWARD in place.runs else Arrival.NOTHING
    if mode == IDENTITY and place.facts.streams:
        return Arrival.STAND_IN
    if mode == HYBRID and noise:
        return Arrival.ESTIMATE
    return Arrival.NOTHING


def _cannot(number: int, facts: StageFacts, why: str) -> PlanError:
    return PlanError(
        f"[train] gradient asks {facts.asked!r} of stage {number} on device"
        f" {facts.device!r}, but {why}: leave it 'auto', or place that stage elsewhere"
    )
