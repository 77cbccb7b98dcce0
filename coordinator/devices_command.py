"""`edgetrain devices`: who is there, and what each can do."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from coordinator.figures import bytes_text, count_text
from coordinator.fleet import Fleet
from coordinator.tables import Column, print_table
from coordinator.train_command import check_broker
from edgetrain.transport.base import Transport
from edgetrain.wire.hello import DatasetInfo, Hello

_COLUMNS = (
    Column("device"),
    Column("engine"),
    Column("providers"),
    Column("gradient"),
    Column("memory", numeric=True),
    Column("speed", numeric=True),
    Column("data sets (train + eval samples)"),
)


def find_devices(transport: Transport, wait_s: float) -> list[Hello]:
    """The devices present, by name, once none has appeared for `wait_s`.

    Raises:
        ConfigError: the broker cannot be reached or refuses us.
        FleetError: two agents bear one name.
    """
    fleet = Fleet(transport)
    check_broker(fleet.open)
    try:
        return list(fleet.settled(wait_s).values())
    finally:
        fleet.close()


def show_devices(hellos: Collection[Hello], *, as_json: bool) -> None:
    if as_json:
        print(
            msgspec.json.encode([msgspec.to_builtins(hello) for hello in hellos]).decode()
        )
    elif not hellos:
        print("no devices: start agents (edgetrain-agent run --broker URL --name NAME)")
    else:
        print_table(_COLUMNS, [_row(hello) for hello in hellos])


def _row(hello: Hello) -> tuple[str, ...]:
    providers = [name.removesuffix("ExecutionProvider") for name in hello.providers]
    return (
        hello.device,
        hello.engine,
        ", ".join(providers),
        hello.gradient,
        bytes_text(hello.memory_bytes),
        f"{count_text(hello.flop_per_s)}flop/s",
        ", ".join(_dataset(info) for info in hello.datasets) or "-",
    )


def _dataset(info: DatasetInfo) -> str:
    return f"{info.name} ({info.train_samples} + {info.eval_samples})"
