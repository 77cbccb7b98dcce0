"""`edgetrain fleet`: identities for a broker, a coordinator and devices."""

from __future__ import annotations

import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from coordinator import provision
from coordinator.certificates import CERTIFICATE_DAYS
from edgetrain.wire.topics import NAMESPACE

_RELOAD: Final = (
    "then copy broker/acl and broker/revoked.crl to the broker's machine, if that is"
    " another one, and make it read them: kill -HUP $(pidof mosquitto)"
)

app = typer.Typer(
    help="Make and change the identities of a fleet: authority, broker, devices.",
    no_args_is_help=True,
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The fleet's folder.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The device's name.")]


@app.command()
def init(  # noqa: PLR0913  one parameter an option
    folder: Folder,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="The broker's name or address; repeatable."),
    ] = None,
    devices: Annotated[str, typer.Option("--devices", metavar="A,B", help="Names.")] = "",
    port: Annotated[int, typer.Option("--port", help="Of the broker.")] = (
        provision.DEFAULT_PORT
    ),
    namespace: Annotated[
        str, typer.Option("--namespace", help="First word of all topics.")
    ] = NAMESPACE,
    broker_folder: Annotated[
        Path | None,
        typer.Option("--broker-folder", help="Where broker/ will lie on its machine."),
    ] = None,
    days: Annotated[
        int, typer.Option("--days", help="How long certificates count.")
    ] = CERTIFICATE_DAYS,
    replace: Annotated[
        bool, typer.Option("--replace", help="Move a fleet that is there aside.")
    ] = False,
) -> None:
    """Make an authority, and all that broker, coordinator and devices need."""
    request = provision.Request(
        hosts=tuple(host or (socket.gethostname(),)),
        devices=tuple(name for name in devices.split(",") if name),
        port=port,
        namespace=namespace,
        broker_folder=broker_folder,
        replace=replace,
        days=days,
    )
    state = provision.init_fleet(folder, request, datetime.now(UTC))
    print(f"{folder}: a fleet of {len(state.devices)} devices, its broker at {state.url}")
    print(f"broker:      mosquitto -c {folder / 'broker' / 'mosquitto.conf'}")
    print(f"coordinator: edgetrain devices --fleet {folder / 'coordinator' / 'fleet.toml'}")
    for name in state.devices:
        print(
            f"device:      copy {folder / 'devices' / name} to {name}, and run agent.toml"
        )
    print(f"keep {folder / 'ca' / 'ca.key'} where nobody else can read it")


@app.command()
def add(folder: Folder, name: Name) -> None:
    """Let one more device in."""
    place = provision.add_device(folder, name, datetime.now(UTC))
    print(f"copy {place} to {name}; {_RELOAD}")


@app.command()
def revoke(folder: Folder, name: Name) -> None:
    """Shut a device out: lost, stolen, sold."""
    provision.revoke_device(folder, name, datetime.now(UTC))
    print(f"{name} is revoked; {_RELOAD}")
    print(
        "until then it can still get in; after it, a connection that it has open can"
        " neither read nor write. Restarting the broker ends that connection too"
    )
