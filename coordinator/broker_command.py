"""`edgetrain broker`: the embedded broker on its own, for agents on this machine."""

from __future__ import annotations

import threading

import msgspec

from coordinator.stop import signals_to
from edgetrain.errors import RunError
from edgetrain.transport.broker import embedded_broker

_CHECK_S = 0.5


def run_broker(port: int, *, as_json: bool) -> None:
    """Run it until a signal comes, after saying where it is.

    Args:
        port: to listen on; 0: any that is free.
        as_json: say it as ``{"url": ..., "kind": ...}``.

    Raises:
        TransportError: it does not start.
        RunError: it ended by itself.
    """
    ended = threading.Event()
    with signals_to(ended.set), embedded_broker(port=port) as broker:
        if as_json:
            facts = {"url": broker.url, "kind": broker.kind}
            print(msgspec.json.encode(facts).decode(), flush=True)
        else:
            print(f"{broker.kind} listens at {broker.url}")
            print("reachable from this machine only, until Ctrl-C; agents join it by")
            print(f"  edgetrain-agent run --broker {broker.url} --name NAME", flush=True)
        while not ended.wait(_CHECK_S):
            if not broker.is_running:
                raise RunError("the broker ended by itself; start it again")
