"""What a person sees while a run goes on. The only door to rich."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coordinator.figures import HEADINGS, DeviceRow, Snapshot, bytes_text, cells, count_text

PLAIN_EVERY_S: Final = 5.0
_PLAIN_WIDTH: Final = 140
_BAR_WIDTH: Final = 24
_ONE_LINE_WIDTH: Final = 100
_REFRESH_HZ: Final = 8


class Progress(Protocol):
    """Shows a run. `update` is cheap enough for every step; `close` may come twice."""

    def update(self, snapshot: Snapshot) -> None: ...

    def say(self, text: str) -> None:
        """Write a line that stays."""

    def closing_table(self, rows: Sequence[DeviceRow]) -> None:
        """Write what each device did."""

    def close(self) -> None: ...


class TerminalProgress:
    """Bars that are redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=_REFRESH_HZ)

    def update(self, snapshot: Snapshot) -> None:
        self._live.update(_view(snapshot))
        if not self._live.is_started:
            self._live.start(refresh=True)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def closing_table(self, rows: Sequence[DeviceRow]) -> None:
        self.close()
        self._console.print(_table(rows, self._console.width))

    def close(self) -> None:
        if self._live.is_started:
            self._live.stop()


class PlainProgress:
    """A line every few seconds, for logs and pipes."""

    def __init__(
        self,
        console: Console,
        clock: Callable[[], float],
        *,
        every_s: float = PLAIN_EVERY_S,
    ) -> None:
        self._console = console
        self._clock = clock
        self._every_s = every_s
        self._last_s = -math.inf

    def update(self, snapshot: Snapshot) -> None:
        now_s = self._clock()
        if snapshot.step < snapshot.steps and now_s - self._last_s < self._every_s:
            return
        self._last_s = now_s
        busy = ", ".join(f"{device.name} {device.busy:.0%}" for device in snapshot.devices)
        self.say(f"{_position(snapshot)}  {_figures(snapshot)}  busy: {busy or '-'}")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def closing_table(self, rows: Sequence[DeviceRow]) -> None:
        self._console.print(_table(rows, self._console.width))

    def close(self) -> None:
        pass


class SilentProgress:
    """Nothing, for output that a program reads."""

    def update(self, snapshot: Snapshot) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def closing_table(self, rows: Sequence[DeviceRow]) -> None:
        pass

    def close(self) -> None:
        pass


def open_progress(
    stream: TextIO, clock: Callable[[], float], *, silent: bool = False
) -> Progress:
    """The progress that suits a stream: bars on a terminal, plain lines elsewhere.

    Args:
        stream: where to write.
        clock: in seconds, from any start.
        silent: show nothing at all.
    """
    if silent:
        return SilentProgress()
    console = Console(file=stream)
    if console.is_terminal and not console.is_dumb_terminal:
        return TerminalProgress(console)
    return PlainProgress(Console(file=stream, width=_PLAIN_WIDTH), clock)


def _position(snapshot: Snapshot) -> str:
    return f"step {snapshot.step}/{snapshot.steps}  epoch {snapshot.epoch + 1}"


def _figures(snapshot: Snapshot) -> str:
    parts = [f"loss {snapshot.loss:.4f}"]
    if snapshot.accuracy is not None:
        parts.append(f"accuracy {snapshot.accuracy:.4f}")
    parts.append(f"{count_text(snapshot.samples_per_s)} samples/s")
    parts.append(f"{bytes_text(snapshot.bytes_per_s)}/s")
    return "  ".join(parts)


def _view(snapshot: Snapshot) -> RenderableType:
    head = Table.grid(padding=(0, 2))
    head.add_row(
        _bar(snapshot.step, snapshot.steps),
        Text(_position(snapshot)),
        Text(_figures(snapshot)),
    )
    devices = Table.grid(padding=(0, 2))
    for device in snapshot.devices:
        devices.add_row(
            _bar(device.busy, 1), Text(device.name), Text(f"busy {device.busy:.0%}")
        )
    return Group(head, devices)


def _bar(completed: float, total: float) -> ProgressBar:
    return ProgressBar(
        total, completed, width=_BAR_WIDTH, complete_style="green", finished_style="green"
    )


def _table(rows: Sequence[DeviceRow], width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in HEADINGS:
        words = heading in {"device", "gradient"}
        table.add_column(heading, justify="left" if words else "right")
    for row in sorted(rows, key=lambda row: row.stage):
        texts = cells(row)
        if width < _ONE_LINE_WIDTH:
            texts = tuple(text.replace(" (", "\n(") for text in texts)
        table.add_row(*(Text(text) for text in texts))
    return table
