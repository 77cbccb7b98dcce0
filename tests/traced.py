"""A meter that misses nothing: it asks Python's allocator, which numpy uses too."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from edgetrain.runtime.activation import Meter
from edgetrain.runtime.engines.base import Array


class TracedMeter(Meter):
    """Counts all that is allocated within its context; far too slow but for tests."""

    def __enter__(self) -> Self:
        tracemalloc.start()
        self._before = tracemalloc.get_traced_memory()[0]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        tracemalloc.stop()

    def note(self, arrays: Iterable[Array], work_bytes: int = 0) -> None:  # noqa: ARG002
        """All arrays are known."""
        self.work(work_bytes)

    def work(self, nbytes: int) -> None:
        if tracemalloc.is_tracing():
            super().work(nbytes)
            so_far = tracemalloc.get_traced_memory()[1] - self._before
            self._peak_bytes = max(self._peak_bytes, so_far)

    @property
    def live_bytes(self) -> int:
        return tracemalloc.get_traced_memory()[0] - self._before
