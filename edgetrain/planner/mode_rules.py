"""When each gradient mode is possible, and when it is wise: one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from edgetrain.abilities import BACKWARD, WEIGHTS

AUTO: Final = "auto"
VJP: Final = "vjp"
IDENTITY: Final = "identity"
HYBRID: Final = "hybrid"
FROZEN: Final = "frozen"
LOCAL_VJP: Final = "local_vjp"
LOCAL: Final = "local"
FORWARD_GRADIENT: Final = "forward_gradient"
SPSA: Final = "spsa"
# In the order in which they are tried.
ORDER: Final = (
    VJP, IDENTITY, HYBRID, LOCAL_VJP, LOCAL, FORWARD_GRADIENT, SPSA, FROZEN,
)  # fmt: skip
CARRYING: Final = frozenset((FORWARD_GRADIENT, SPSA))
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
class Place:
    """A stage in its pipeline: facts, what arrives, and who is to blame if it is little.

    `later` are the modes of the stages after it.
    """

    facts: StageFacts
    arrives: Arrival
    source: str
    number: int
    pretrained: bool
    shipped: bool
    later: tuple[str, ...]

    @property
    def runs(self) -> frozenset[str]:
        """A device that declares a mode without a backward is given no backward."""
        facts = self.facts
        exact = facts.offered in (AUTO, VJP, LOCAL_VJP, FROZEN)
        return facts.runs if exact else facts.runs - {BACKWARD}


@dataclass(frozen=True, slots=True)
class Rule:
    """When a mode is possible, and when it is wise; both say why not.

    Attributes:
        runs: what the engine must run.
        least: what must arrive, or more.
        because: completes "the device ...".
    """

    runs: frozenset[str]
    least: Arrival
    because: str
    possible: Callable[[Place], str] = lambda _: ""
    wise: Callable[[Place], str] = lambda _: ""


def _early(place: Place) -> str:
    early = place.pretrained and place.number == 0 and place.facts.convolutional
    return (
        "the first layers of a pretrained convolutional net are best left as they are"
        if early
        else ""
    )


def _residual(place: Place) -> str:
    return "" if place.facts.branches else "no layer here ends a residual branch"


def _learnt(place: Place) -> str:
    return _early(place) if place.pretrained else "the model is not pretrained"


def _inner(place: Place) -> str:
    return "the last stage has the loss itself" if not place.later else ""


def _headed(place: Place) -> str:
    untaught = place.pretrained and not place.shipped
    return "a head that knows nothing spoils a pretrained stage" if untaught else ""


def _few(place: Place) -> str:
    few = place.facts.trains <= SPSA_WEIGHTS
    return _early(place) if few else f"{place.facts.trains} weights are too many for it"


def _carried(mode: str) -> Callable[[Place], str]:
    def check(place: Place) -> str:
        stages = enumerate(place.later, place.number + 1)
        others = [f"stage {n} after it is {m!r}" for n, m in stages if m != mode]
        return f"{others[0]} and carries no noise" if others else ""

    return check


_PLAIN: Final = frozenset((WEIGHTS,))
RULES: Final[Mapping[str, Rule]] = {
    VJP: Rule(
        frozenset((BACKWARD, WEIGHTS)),
        Arrival.ESTIMATE,
        "runs backward graphs, so its gradients are exact",
    ),
    IDENTITY: Rule(
        _PLAIN,
        Arrival.STAND_IN,
        "lets its residual branches learn from the cotangent at their stream's end",
        _residual,
        _learnt,
    ),
    HYBRID: Rule(
        _PLAIN,
        Arrival.EXACT,
        "estimates its gradients from the exact cotangent that arrives",
        wise=_early,
    ),
    LOCAL_VJP: Rule(
        frozenset((BACKWARD, WEIGHTS)),
        Arrival.NOTHING,
        "learns from a head at its end, exactly",
        wise=_inner,
    ),
    LOCAL: Rule(
        _PLAIN,
        Arrival.NOTHING,
        "learns from a head at its end",
        wise=lambda place: _inner(place) or _headed(place),
    ),
    FORWARD_GRADIENT: Rule(
        _PLAIN,
        Arrival.NOTHING,
        "learns from noise that is carried on to the loss",
        _carried(FORWARD_GRADIENT),
        _early,
    ),
    SPSA: Rule(
        _PLAIN,
        Arrival.NOTHING,
        "learns from differences of the loss",
        _carried(SPSA),
        _few,
    ),
    FROZEN: Rule(frozenset(), Arrival.NOTHING, "keeps its weights"),
}
