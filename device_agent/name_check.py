"""Makes sure that no other agent bears this device's name before it announces itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

from edgetrain.errors import ConfigError
from edgetrain.transport.base import Presence, Transport

LOOK_S: Final = 0.5
VANISH_S: Final = 3.0


def claim_name(
    watcher: Transport,
    *,
    look_s: float = LOOK_S,
    vanish_s: float = VANISH_S,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Look whether the watcher's name is free; wait a little for one just left behind.

    The broker takes a crashed agent's presence back by itself, but not at once: whoever
    restarts it quickly must not be turned away.

    Args:
        watcher: bears the name, is not open yet, and is closed on return.
        look_s: how long a presence may take to arrive.
        vanish_s: how long one that is there may take to go.
        clock: seconds, monotonic.

    Raises:
        ConfigError: another agent of that name is there and stays.
        TransportError: the broker cannot be reached or refuses us.
    """
    seen: SimpleQueue[Presence] = SimpleQueue()
    watcher.open(lambda _: None, on_presence=seen.put)
    try:
        taken = False
        deadline = clock() + look_s
        while True:
            try:
                presence = seen.get(timeout=max(0.0, deadline - clock()))
            except Empty:
                break
            if presence.device != watcher.name:
                continue
            if presence.gone:
                return
            if not taken:
                taken = True
                deadline = clock() + vanish_s
    finally:
        watcher.close()
    if taken:
        raise ConfigError(
            f"an agent named {watcher.name!r} is already on this broker: give this one"
            " another --name, or stop that one (after a power cut the broker may take up"
            " to 20 s to notice that it is gone)"
        )
