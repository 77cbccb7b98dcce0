"""What holds a simulated device back: its speed, its link, and when they change."""

from __future__ import annotations

import math
from typing import Final

from edgetrain.settings import Section, rate_bytes_per_s, require

UNLIMITED: Final = "unlimited"
MAX_EVENTS: Final = 1000
MAX_AT_S: Final = 1e6
MAX_DOWN_S: Final = 86_400.0
MAX_DELAY_S: Final = 60.0
MAX_LOSS: Final = 0.9  # beyond it a connection does not hold
MIN_SPEED: Final = 1e-4


class Happening(Section, frozen=True):
    """One entry of a timetable: at `at_s`, exactly one of the others.

    Attributes:
        at_s: since the first training step was allowed to begin.
        speed: from then on.
        link: from then on; ``"unlimited"`` ends shaping.
        down_s: nothing leaves or arrives for so long.
        kill: the agent ends as in a crash or a power cut.
    """

    at_s: float
    speed: float | None = None
    link: float | str | None = None
    down_s: float | None = None
    kill: bool = False

    def check(self, place: str) -> None:
        """Refuse values out of range.

        Raises:
            ConfigError: naming `place`, the value and what is allowed.
        """
        _within(place, "at_s", self.at_s, MAX_AT_S)
        given = [self.speed, self.link, self.down_s, self.kill or None]
        require(
            sum(value is not None for value in given) == 1,
            f"{place} must say one thing that happens: speed, link, down_s or kill = true,"
            " such as {at_s = 20, speed = 0.25}",
        )
        if self.speed is not None:
            _check_speed(place, self.speed)
        if self.link is not None:
            link_bytes_per_s(f"{place} link", self.link)
        if self.down_s is not None:
            _within(place, "down_s", self.down_s, MAX_DOWN_S)

    @property
    def link_bytes_per_s(self) -> float | None:
        """Bytes/s from then on, infinite where unlimited; None: as before."""
        return None if self.link is None else link_bytes_per_s("link", self.link)

    @property
    def text(self) -> str:
        """As it stands in a run file."""
        parts = [f"at_s = {self.at_s!r}"]
        if self.speed is not None:
            parts.append(f"speed = {self.speed!r}")
        if self.link is not None:
            link = f'"{self.link}"' if isinstance(self.link, str) else repr(self.link)
            parts.append(f"link = {link}")
        if self.down_s is not None:
            parts.append(f"down_s = {self.down_s!r}")
        if self.kill:
            parts.append("kill = true")
        return f"{{{', '.join(parts)}}}"


class Conditions(Section, frozen=True):
    """How a device and its link behave.

    Attributes:
        speed: share of this machine's speed, above 0, at most 1.
        link: bytes/s in each direction, or text such as ``"100 Mbit/s"``; None: unshaped.
        latency_s: of the way to the broker; the way back takes as long.
        jitter_s: the most that is added to it, drawn evenly for each message.
        loss: share of messages that need a retransmission, 0 to 0.9. They come late,
            and what is behind them waits: TCP is beneath, so nothing disappears.
        timetable: what changes, and when; times count from the first training step.
        paced: seconds that each forward and each backward takes, in place of `speed`.
        seed: of jitter and loss.
    """

    speed: float = 1.0
    link: float | str | None = None
    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    timetable: tuple[Happening, ...] = ()
    paced: tuple[float, float] | None = None
    seed: int = 0

    def check(self, place: str) -> None:
        """Refuse values out of range.

        Raises:
            ConfigError: naming `place`, the key, the value and what is allowed.
        """
        _check_speed(place, self.speed)
        if self.link is not None:
            link_bytes_per_s(f"{place} link", self.link)
        _within(place, "latency_s", self.latency_s, MAX_DELAY_S)
        _within(place, "jitter_s", self.jitter_s, MAX_DELAY_S)
        _within(place, "loss", self.loss, MAX_LOSS)
        require(self.seed >= 0, f"{place} seed = {self.seed}: must be 0 or more")
        if self.paced is not None:
            for seconds in self.paced:
                _within(place, "paced", seconds, MAX_DELAY_S)
            require(
                self.speed == 1,
                f"{place} has both speed and paced: a paced device's times are fixed, so"
                " leave out speed; a timetable may change it",
            )
        require(
            len(self.timetable) <= MAX_EVENTS,
            f"{place} timetable has {len(self.timetable)} entries: at most {MAX_EVENTS}",
        )
        for index, happening in enumerate(self.timetable):
            happening.check(f"{place} timetable[{index}]:")

    @property
    def link_bytes_per_s(self) -> float:
        """Bytes/s, infinite where the link is unshaped."""
        return math.inf if self.link is None else link_bytes_per_s("link", self.link)

    @property
    def slow_the_engine(self) -> bool:
        """Whether runs of graphs are to be held back at any time."""
        changes = any(h.speed is not None for h in self.timetable)
        return self.speed < 1 or self.paced is not None or changes

    @property
    def shape_the_link(self) -> bool:
        """Whether messages are to be held back, or watched for a timetable's start."""
        delays = self.latency_s + self.jitter_s + self.loss
        return self.link_bytes_per_s < math.inf or delays > 0 or bool(self.timetable)


def link_bytes_per_s(place: str, link: float | str) -> float:
    """Bytes/s of a link; infinite for ``"unlimited"``.

    Raises:
        ConfigError: it is no rate, or out of range.
    """
    return math.inf if link == UNLIMITED else rate_bytes_per_s(place, link)


def _check_speed(place: str, speed: float) -> None:
    require(
        MIN_SPEED <= speed <= 1,
        f"{place} speed = {speed:g}: must be at least {MIN_SPEED:g} and at most 1, a share"
        " of this machine's speed",
    )


def _within(place: str, key: str, value: float, high: float) -> None:
    require(0 <= value <= high, f"{place} {key} = {value:g}: must be in 0 ... {high:g}")
