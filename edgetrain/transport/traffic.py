"""What a party has sent and received so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from edgetrain.wire.topics import Channel


def _nothing() -> Counter[Channel]:
    return Counter(dict.fromkeys(Channel, 0))


@dataclass(frozen=True, slots=True)
class Traffic:
    """Payload bytes by channel.

    Attributes:
        sent_bytes: handed to `Transport.send`.
        received_bytes: that arrived for `Transport.open`'s `receive`.
    """

    sent_bytes: Counter[Channel] = field(default_factory=_nothing)
    received_bytes: Counter[Channel] = field(default_factory=_nothing)
