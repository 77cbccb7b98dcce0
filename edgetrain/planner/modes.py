"""Which gradient mode each stage gets, and why: from plain facts, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from edgetrain.abilities import BACKWARD, JVP, WEIGHTS
from edgetrain.errors import PlanError
from edgetrain.estimator_spec import FORWARD

AUTO: Final = "auto"
VJP: Final = "vjp"
IDENTITY: Final = "identity"
HYBRID: Final = "hybrid"
FROZEN: Final = "frozen"
# In the order in which they are tried.
ORDER: Final = (
    VJP, IDENTITY, HYBRID, "local_vjp", "local", "forward_gradient", "spsa", FROZEN,
)  # fmt: skip
SPSA_WEIGHTS: Final = 10_000  # more than that one scalar a draw does not teach


class Arrival(IntEnum):
    """What comes back to a stage from the one after it."""

    NOTHING = 0
    ESTIMATE = 1
    STAND_IN = 2  # another value's cotangent, by a residual stream
    EXACT = 3


@dataclass(frozen=True, slots=True)
class StageFacts:
    """A stage and its device, as far as the choice goes.

    Attributes:
        runs: what the engine runs, of `edgetrain.abilities.ABILITIES`.
        offered: the one mode that the device declares, or ``"auto"``.
        asked: the mode that the run asks for, or ``"auto"``.
        trains: elements of the weights that are to train.
        branches: it is residual, and layers that end its branches are among them.
        streams: its residual stream begins before it.
        convolutional: it convolves with weights.
    """

    device: str
    runs: frozenset[str]
    offered: str = AUTO
    asked: str = AUTO
    trains: int = 1
    branches: bool = False
    streams: bool = False
    convolutional: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """What a stage does.

    Attributes:
        reason: one sentence.
        form: of its estimates, where not as asked; see `EstimatorSpec.form`.
        returns: whether cotangents go on to the stage before.
    """

    mode: str
    reason: str
    form: str = ""
    returns: bool = True


@dataclass(frozen=True, slots=True)
class _Place:
    """A stage in its pipeline: facts, what arrives, and who is to blame if it is little."""

    facts: StageFacts
    arrives: Arrival
    source: str
    first: bool
    last: bool
    pretrained: bool
    all_jvp: bool

    @property
    def runs(self) -> frozenset[str]:
        """A device that declares a mode without a backward is given no backward."""
        facts = self.facts
        exact = facts.offered in (AUTO, VJP, FROZEN)
        return facts.runs if exact else facts.runs - {BACKWARD}


@dataclass(frozen=True, slots=True)
class _Rule:
    """When a mode is possible, and when it is wise; both say why not.

    Attributes:
        runs: what the engine must run.
        least: what must arrive, or more.
        because: completes "the device ...".
    """

    runs: frozenset[str]
    least: Arrival
    because: str
    possible: Callable[[_Place], str] = lambda _: ""
    wise: Callable[[_Place], str] = lambda _: ""


def _early(place: _Place) -> str:
    early = place.pretrained and place.first and place.facts.convolutional
    return (
        "the first layers of a pretrained convolutional net are best left as they are"
        if early
        else ""
    )


def _residual(place: _Place) -> str:
    return "" if place.facts.branches else "no layer here ends a residual branch"


def _learnt(place: _Place) -> str:
    return _early(place) if place.pretrained else "the model is not pretrained"


def _inner(place: _Place) -> str:
    return "the last stage has the loss itself" if place.last else ""


def _few(place: _Place) -> str:
    few = place.facts.trains <= SPSA_WEIGHTS
    return _early(place) if few else f"{place.facts.trains} weights are too many for it"


def _pushed(place: _Place) -> str:
    return "" if place.all_jvp else "a later stage runs no jvp graphs"


_PLAIN: Final = frozenset((WEIGHTS,))
_RULES: Final[Mapping[str, _Rule]] = {
    VJP: _Rule(
        frozenset((BACKWARD, WEIGHTS)),
        Arrival.ESTIMATE,
        "runs backward graphs, so its gradients are exact",
    ),
    IDENTITY: _Rule(
        _PLAIN,
        Arrival.STAND_IN,
        "lets its residual branches learn from the cotangent at their stream's end",
        _residual,
        _learnt,
    ),
    HYBRID: _Rule(
        _PLAIN,
        Arrival.EXACT,
        "estimates its gradients from the exact cotangent that arrives",
        wise=_early,
    ),
    "local_vjp": _Rule(
        frozenset((BACKWARD, WEIGHTS)),
        Arrival.NOTHING,
        "learns from a head at its end, exactly",
        _inner,
    ),
    "local": _Rule(_PLAIN, Arrival.NOTHING, "learns from heads of its own", _inner, _early),
    "forward_gradient": _Rule(
        frozenset((JVP, WEIGHTS)),
        Arrival.NOTHING,
        "learns from tangents that travel to the loss",
        _pushed,
        _early,
    ),
    "spsa": _Rule(
        _PLAIN, Arrival.NOTHING, "learns from differences of the loss", wise=_few
    ),
    FROZEN: _Rule(frozenset(), Arrival.NOTHING, "keeps its weights"),
}
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

    Returns:
        A choice a stage.

    Raises:
        PlanError: a mode is asked for where it cannot be.
    """
    arrives, source = Arrival.EXACT, ""
    choices: list[Choice] = []
    for number in range(len(stages) - 1, -1, -1):
        facts = stages[number]
        place = _Place(
            facts,
            arrives,
            source,
            first=number == 0,
            last=number == len(stages) - 1,
            pretrained=pretrained,
            all_jvp=all(JVP in later.runs for later in stages[number:]),
        )
        mode, reason = _choose(place, number, available)
        returned = _returned(mode, place, noise=upstream and not pretrained)
        if returned is not arrives:
            source = f"stage {number}, {mode!r} on {facts.device!r}"
        form = "" if JVP in facts.runs else FORWARD
        returns = number == 0 or returned is not Arrival.NOTHING
        choices.append(Choice(mode, f"{facts.device} {reason}", form, returns))
        arrives = returned
    return tuple(choices[::-1])


def _choose(place: _Place, number: int, available: Collection[str]) -> tuple[str, str]:
    facts = place.facts
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
        refusals[mode] = _refusal(mode, place) or _RULES[mode].wise(place)
        if not refusals[mode]:
            return mode, _reason(mode, refusals)
    raise PlanError(f"stage {number} on {facts.device!r}: no gradient mode is possible")


def _refusal(mode: str, place: _Place) -> str:
    """Why a mode is not possible there; empty: it is."""
    rule, facts = _RULES[mode], place.facts
    lacking = sorted(rule.runs - place.runs)
    if mode not in (VJP, FROZEN) and not facts.trains:
        return "there is nothing to train"
    if lacking and (facts.trains or BACKWARD in lacking):
        return f"its engine runs no {' and no '.join(lacking)} graphs"
    if place.arrives < rule.least:
        return f"{_WORDS[place.arrives]} from {place.source}"
    return rule.possible(place)


def _reason(mode: str, refusals: Mapping[str, str]) -> str:
    """With what speaks against the modes that come before, most wanted first."""
    against = dict.fromkeys(refusals[m] for m in (VJP, HYBRID) if refusals.get(m))
    because = _RULES[mode].because
    if not against:
        return because
    shown = list(against) if mode == FROZEN else list(against)[:1]
    return f"{because}: {', and '.join(shown)}"


def _returned(mode: str, place: _Place, *, noise: bool) -> Arrival:
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
