"""A fleet's folder: its authority, its broker, and a folder for every party.

DIR/fleet.json            what has been issued and revoked
DIR/ca/                   the authority; its key signs everyone, and never leaves
DIR/broker/               for the broker's machine
DIR/coordinator/          for whoever trains
DIR/devices/NAME/         for that device
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from coordinator import provision_texts as texts
from coordinator.certificates import (
    CERTIFICATE_DAYS,
    Credentials,
    issue_broker,
    issue_device,
    make_authority,
    revocation_list,
)
from coordinator.private_files import (
    PUBLIC_MODE,
    SECRET_MODE,
    locked,
    make_folder,
    read_file,
    write_file,
)
from edgetrain.errors import ConfigError
from edgetrain.settings import check_device_name, check_distinct, nearest, require
from edgetrain.transport.tls import check_private
from edgetrain.wire.signature import make_key
from edgetrain.wire.topics import COORDINATOR, NAMESPACE

STATE_FILE: Final = "fleet.json"
DEFAULT_PORT: Final = 8883
LOCAL_HOSTS: Final = ("localhost", "127.0.0.1", "::1")

_HOST: Final = re.compile(r"[A-Za-z0-9.-]{1,253}|[0-9A-Fa-f:.]{2,45}")


class Revoked(msgspec.Struct, frozen=True):
    device: str
    serial: str
    at: datetime


class State(msgspec.Struct, frozen=True):
    """What a fleet's folder stands for.

    Attributes:
        broker_folder: where the broker's folder lies on the broker's machine.
        devices: serial number of each one's certificate, in hex, as a number may not fit.
    """

    hosts: tuple[str, ...]
    port: int
    namespace: str
    broker_folder: str
    days: int
    devices: dict[str, str] = {}
    revoked: tuple[Revoked, ...] = ()

    @property
    def url(self) -> str:
        host = self.hosts[0]
        return f"mqtts://{f'[{host}]' if ':' in host else host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Request:
    """A fleet to be made.

    Attributes:
        hosts: the broker's names and addresses; parties use the first.
        broker_folder: see `State`; None: where it is made.
        replace: a fleet that is there is moved aside.
        days: certificates count so long.
    """

    hosts: tuple[str, ...]
    devices: tuple[str, ...] = ()
    port: int = DEFAULT_PORT
    namespace: str = NAMESPACE
    broker_folder: Path | None = None
    replace: bool = False
    days: int = CERTIFICATE_DAYS

    def __post_init__(self) -> None:
        require(bool(self.hosts), "--host: name the broker's host or address")
        for host in self.hosts:
            require(
                _HOST.fullmatch(host) is not None,
                f"--host {host!r} is neither a host's name nor an address",
            )
        require(0 < self.port < 1 << 16, f"--port {self.port}: must be from 1 to 65535")
        require(self.days > 0, f"--days {self.days}: must be 1 or more")
        check_device_name("--namespace", self.namespace)
        for name in self.devices:
            _check_name("--devices", name)
        check_distinct("--devices", self.devices)


def init_fleet(folder: Path, request: Request, now: datetime) -> State:
    """Make a fleet's folder, whole or not at all.

    Raises:
        ConfigError: it is there already, or cannot be made.
    """
    folder = Path(os.path.abspath(folder))  # noqa: PTH100  resolve() would follow links
    _check_free(folder, replace=request.replace)
    mark = secrets.token_hex(4)
    draft = folder.with_name(f".{folder.name}.{mark}")
    make_folder(draft)
    try:
        state = _fill(draft, folder, request, now)
        if folder.exists():
            folder.replace(folder.with_name(f"{folder.name}.old-{mark}"))
        draft.replace(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be made ({error.strerror or error})"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return state


def add_device(folder: Path, name: str, now: datetime) -> Path:
    """Make a device's folder, and let it in.

    Raises:
        ConfigError: the name will not do or is taken, or `folder` is no fleet's.
    """
    _check_name("NAME", name)
    with locked(folder):
        state = read_state(folder)
        if name in state.devices:
            raise ConfigError(
                f"{folder}: there is a device {name!r}; `edgetrain fleet revoke` puts its"
                " certificate out, then it can be added anew"
            )
        serial = _write_device(folder, state, name, now)
        state = msgspec.structs.replace(state, devices={**state.devices, name: serial})
        _write_state(folder, state, now)
        return folder / "devices" / name


def revoke_device(folder: Path, name: str, now: datetime) -> None:
    """Put a device's certificate out, take its rights, and remove its folder here.

    Raises:
        ConfigError: there is no such device, or `folder` is no fleet's.
    """
    with locked(folder):
        state = read_state(folder)
        if name not in state.devices:
            raise ConfigError(
                f"{folder}: no device {name!r}; {nearest(name, state.devices)}"
            )
        left = {other: s for other, s in state.devices.items() if other != name}
        gone = (*state.revoked, Revoked(name, state.devices[name], now))
        _write_state(
            folder, msgspec.structs.replace(state, devices=left, revoked=gone), now
        )
        shutil.rmtree(folder / "devices" / name, ignore_errors=True)


def read_state(folder: Path) -> State:
    """What a fleet's folder says of itself.

    Raises:
        ConfigError: it is no fleet's.
    """
    path = folder / STATE_FILE
    try:
        return msgspec.json.decode(read_file(path), type=State)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: not what `edgetrain fleet` wrote: {error}") from error


def _check_free(folder: Path, *, replace: bool) -> None:
    """Refuse a place that holds something, unless it is a fleet that is to go aside."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / STATE_FILE).is_file():
        raise ConfigError(f"{folder} is there already, and is no fleet's: name another")
    if not replace:
        raise ConfigError(
            f"{folder} is there already: to make a new authority, which puts out every"
            " certificate of the old one, say --replace; to add a device, `edgetrain fleet"
            " add`"
        )


def _check_name(place: str, name: str) -> None:
    check_device_name(place, name)
    require(
        not name.startswith("."), f"{place}: {name!r} names a folder too: begin with no '.'"
    )


def _fill(draft: Path, folder: Path, request: Request, now: datetime) -> State:
    for name in ("ca", "broker", "coordinator", "devices"):
        make_folder(draft / name)
    mark = secrets.token_hex(4)  # else two fleets' authorities could not be told apart
    authority = make_authority(f"edgetrain fleet {mark}", now)
    _write_pair(draft / "ca", "ca", authority)
    place = request.broker_folder or folder / "broker"
    state = State(request.hosts, request.port, request.namespace, str(place), request.days)
    hosts = tuple(dict.fromkeys((*request.hosts, *LOCAL_HOSTS)))
    broker = draft / "broker"
    _write_pair(broker, "broker", issue_broker(authority, hosts, now, request.days))
    write_file(broker / "ca.crt", authority.certificate)
    conf = texts.mosquitto_conf(place, request.port)
    write_file(broker / "mosquitto.conf", conf.encode())
    write_file(broker / "README", texts.broker_readme(place).encode())
    _write_coordinator(draft, state, authority, now)
    serials = {name: _write_device(draft, state, name, now) for name in request.devices}
    state = msgspec.structs.replace(state, devices=serials)
    _write_state(draft, state, now)
    return state


def _write_coordinator(
    folder: Path, state: State, authority: Credentials, now: datetime
) -> None:
    place = folder / COORDINATOR
    issued = issue_device(authority, COORDINATOR, now, state.days)
    _write_pair(place, COORDINATOR, issued)
    private, public = make_key()
    write_file(place / "signing.key", private, SECRET_MODE)
    write_file(place / "coordinator.pub", public)
    write_file(place / "ca.crt", authority.certificate)
    settings = texts.coordinator_toml(state.url, state.namespace)
    write_file(place / "fleet.toml", settings.encode())
    write_file(place / "README", texts.coordinator_readme().encode())


def _write_device(folder: Path, state: State, name: str, now: datetime) -> str:
    """Make a device's folder at once; return its certificate's serial number."""
    authority = _read_authority(folder)
    issued = issue_device(authority, name, now, state.days)
    draft = folder / "devices" / f".{name}.{secrets.token_hex(4)}"
    make_folder(draft)
    try:
        _write_pair(draft, "device", issued)
        write_file(draft / "ca.crt", authority.certificate)
        public = read_file(folder / COORDINATOR / "coordinator.pub")
        write_file(draft / "coordinator.pub", public)
        settings = texts.agent_toml(state.url, name, state.namespace)
        write_file(draft / "agent.toml", settings.encode())
        write_file(draft / "README", texts.device_readme(name).encode())
        draft.replace(folder / "devices" / name)
    except OSError as error:
        raise ConfigError(f"{draft}: cannot be made ({error.strerror or error})") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return f"{issued.serial:x}"


def _write_state(folder: Path, state: State, now: datetime) -> None:
    """Note what counts, and all that follows from it at the broker.

    The note comes first: whatever is interrupted, the next change writes the rest again.
    """
    write_file(folder / STATE_FILE, msgspec.json.encode(state), SECRET_MODE)
    revoked = {int(entry.serial, 16): entry.at for entry in state.revoked}
    path = folder / "broker" / "revoked.crl"
    previous = read_file(path) if path.exists() else None
    write_file(path, revocation_list(_read_authority(folder), revoked, now, previous))
    rules = texts.access_list(state.namespace, state.devices)
    write_file(folder / "broker" / "acl", rules.encode(), SECRET_MODE)


def _read_authority(folder: Path) -> Credentials:
    check_private(folder / "ca" / "ca.key")
    return Credentials(
        read_file(folder / "ca" / "ca.crt"), read_file(folder / "ca" / "ca.key")
    )


def _write_pair(folder: Path, stem: str, pair: Credentials) -> None:
    write_file(folder / f"{stem}.key", pair.key, SECRET_MODE)
    write_file(folder / f"{stem}.crt", pair.certificate, PUBLIC_MODE)
