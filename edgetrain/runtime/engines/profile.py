"""What a profile of ONNX Runtime's says of memory: its allocator's own counts."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from edgetrain.runtime.engines.base import Seen

IN_USE: Final = "mem_bytes_requested_in_use"
CHANGE: Final = "mem_requested_in_use_delta"
HIGHEST: Final = "mem_in_use_peak"


class _Event(msgspec.Struct):
    cat: str = ""
    ts: int = 0
    args: dict[str, Any] = {}


_EVENTS: Final[msgspec.json.Decoder[list[_Event]]] = msgspec.json.Decoder(list[_Event])


def seen(profile: bytes) -> Seen | None:
    """Read the profile of one run, the first of a session with an allocator of its own.

    Returns:
        None where the release is too old to count, or nothing ran.
    """
    try:
        events = _EVENTS.decode(profile)
    except msgspec.DecodeError:
        return None
    nodes = [event for event in events if event.cat == "Node" and IN_USE in event.args]
    if not nodes:
        return None
    first = min(nodes, key=lambda event: event.ts)
    before = int(first.args[IN_USE]) - int(first.args[CHANGE])
    tensors = max(int(event.args[IN_USE]) for event in nodes) - before
    highest = max(int(event.args[HIGHEST]) for event in nodes) - before
    return Seen(tensors, max(tensors, highest))
