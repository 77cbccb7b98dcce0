"""The topic scheme: who writes where, so that a broker's ACL can tell devices apart.

    {ns}/up/{device}/presence               retained; empty means gone
    {ns}/dev/{to}/from/{source}/{channel}   everything else

A device named `me` writes `up/me/#` and `dev/+/from/me/#`, and reads `dev/me/#`: three
patterns that an ACL can hold for all devices at once, and no source can be forged.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

from edgetrain.errors import ConfigError, WireError

NAMESPACE: Final = "edgetrain"
COORDINATOR: Final = "coordinator"

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)


class Channel(StrEnum):
    """What a message is, and so how it goes.

    DATA has a connection of its own, so that tensors never delay the others. FLOW carries
    receipts of DATA, any of which may be lost.
    """

    CONTROL = "control"
    DATA = "data"
    FLOW = "flow"


def check_name(name: str, *, allow_coordinator: bool = False) -> str:
    """Return the name when a device (or a namespace) may bear it.

    Raises:
        ConfigError: it is empty, long, has other characters, or is the coordinator's.
    """
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{name!r} cannot be a name: use 1 to 64 letters, digits, '_', '.' or '-'"
        )
    if name == COORDINATOR and not allow_coordinator:
        raise ConfigError(
            f"{name!r} is the coordinator's own name: give the device another"
        )
    return name


def presence(namespace: str, device: str) -> str:
    return f"{namespace}/up/{device}/presence"


def presence_filter(namespace: str) -> str:
    """Matches the presence of every device."""
    return presence(namespace, "+")


def inbox(namespace: str, to: str, source: str, channel: Channel) -> str:
    return f"{namespace}/dev/{to}/from/{source}/{channel}"


def inbox_filter(namespace: str, to: str, channel: Channel) -> str:
    """Matches what anyone sends to `to` on one channel."""
    return inbox(namespace, to, "+", channel)


def parse_presence(topic: str) -> str:
    """The device a presence topic belongs to.

    Raises:
        WireError: it is not a presence topic.
    """
    match topic.split("/"):
        case [_, "up", device, "presence"] if _NAME.fullmatch(device):
            return device
    raise WireError(f"not a presence topic: {topic!r}")


def parse_inbox(topic: str) -> tuple[str, str, Channel]:
    """Receiver, source and channel of an inbox topic.

    Raises:
        WireError: it is not an inbox topic.
    """
    match topic.split("/"):
        case [_, "dev", to, "from", source, ("control" | "data" | "flow") as channel] if (
            _NAME.fullmatch(to) and _NAME.fullmatch(source)
        ):
            return to, source, Channel(channel)
    raise WireError(f"not an inbox topic: {topic!r}")
