"""Fleets of real agents on one machine: as processes, or as threads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Self
from urllib.parse import quote

import msgspec

from device_agent.agent import Agent
from device_agent.config import DatasetConfig
from device_agent.equip import Limits, equip
from device_agent.simulation import simulation_options
from edgetrain.abilities import ABILITIES
from edgetrain.conditions import Conditions, Happening
from edgetrain.errors import ConfigError, EdgeTrainError
from edgetrain.settings import check_device_name, check_distinct, decode
from edgetrain.sim.shaped import behind_link
from edgetrain.sim.timetable import Timetable
from edgetrain.simulated_device import SimulatedDevice
from edgetrain.train_config import AUTO
from edgetrain.transport.address import BrokerAddress
from edgetrain.transport.base import Transport
from edgetrain.transport.broker import end_child
from edgetrain.wire.topics import NAMESPACE

PASSWORD_VARIABLE: Final = "EDGETRAIN_BROKER_PASSWORD"  # noqa: S105  not the password
_END_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class SimDevice:
    """A device to simulate.

    Attributes:
        name: its own in the fleet.
        speed: share of this machine's speed, above 0, at most 1.
        gradient: the one mode it accepts, or ``"auto"``.
        memory_bytes: it lends; None: half of what is free.
        datasets: files of samples that stay on it, train and eval, by name.
        runs: what its engine runs beside plain forwards; it refuses other graphs.
        link, latency_s, jitter_s, loss, timetable, paced, seed: see `Conditions`; an entry
            of the timetable may be a table, as in a run file.
    """

    name: str
    speed: float = 1.0
    gradient: str = AUTO
    memory_bytes: int | None = None
    datasets: Mapping[str, tuple[Path, Path | None]] = field(default_factory=dict)
    runs: tuple[str, ...] = ABILITIES
    link: float | str | None = None
    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    timetable: Sequence[Happening | Mapping[str, object]] = ()
    paced: tuple[float, float] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_device_name("SimDevice", self.name)
        self.conditions.check(f"SimDevice {self.name!r}:")

    @classmethod
    def of(cls, device: SimulatedDevice) -> Self:
        """The device that a run file describes."""
        conditions = {key: getattr(device, key) for key in Conditions.__struct_fields__}
        return cls(
            device.name,
            gradient=device.gradient,
            memory_bytes=device.memory_bytes,
            runs=device.runs,
            **conditions,
        )

    @property
    def conditions(self) -> Conditions:
        """How the device and its link behave."""
        keys = Conditions.__struct_fields__
        table = {key: msgspec.to_builtins(getattr(self, key)) for key in keys}
        try:
            return decode(Conditions, table, folder=Path())
        except ConfigError as error:
            raise ConfigError(f"SimDevice {self.name!r}: {error}") from error


class ProcessFleet:
    """Agents as processes on a broker. A context manager: they run within it.

    They end with it, and with this process, however that ends.

    Args:
        url: of the broker, with user and password; the password reaches the agents by
            their environment, not by their command lines, which everyone can read.
        devices: one agent each.
        namespace: of the topics.
        ca_file: authorities that may have signed the broker's certificate.
        insecure: whether ``mqtt://`` to another machine will do.
    """

    def __init__(
        self,
        url: str,
        devices: Sequence[SimDevice],
        namespace: str = NAMESPACE,
        *,
        ca_file: Path | None = None,
        insecure: bool = False,
    ) -> None:
        check_distinct("the fleet", [device.name for device in devices])
        self._address = BrokerAddress.parse(url)
        self._devices = tuple(devices)
        self._namespace = namespace
        self._options_of_all = ["--insecure"] if insecure else []
        if ca_file is not None:
            self._options_of_all.append(f"--ca-file={ca_file.absolute()}")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._folder: Path | None = None

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="edgetrain-fleet-"))
        try:
            for device in self._devices:
                self._processes[device.name] = self._start(device, self._folder)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all agents and remove their logs. Safe to call twice."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            end_child(process, _END_TIMEOUT_S)
        self._processes.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self, name: str) -> None:
        """End an agent as a crash or a power cut does."""
        process = self._processes[name]
        process.kill()
        end_child(process, _END_TIMEOUT_S)

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def logs(self, name: str) -> str:
        """What an agent has logged so far."""
        return "" if self._folder is None else _log(self._folder, name).read_text("utf-8")

    def ended(self) -> dict[str, str]:
        """The last line of every agent that is no longer running, by name."""
        return {
            name: (self.logs(name).splitlines() or [""])[-1]
            for name, process in self._processes.items()
            if process.poll() is not None
        }

    def _start(self, device: SimDevice, folder: Path) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)  # handed on whole: a Python may need any of it
        if self._address.password is not None:
            environment[PASSWORD_VARIABLE] = self._address.password
        module = "edgetrain.sim.agent_process"
        with _log(folder, device.name).open("wb") as output:
            return subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", module, "run", *self._options(device)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # a Ctrl-C is for whoever started the fleet
            )

    def _options(self, device: SimDevice) -> list[str]:
        options = {
            "broker": _without_password(self._address),
            "name": device.name,
            "namespace": self._namespace,
            "gradient": device.gradient,
            "runs": ",".join(device.runs),
            **simulation_options(device.conditions),
        }
        if device.memory_bytes is not None:
            options["memory"] = str(device.memory_bytes)
        texts = [f"--{key}={value}" for key, value in options.items()]
        texts += self._options_of_all
        for name, files in device.datasets.items():
            paths = ",".join(str(path.absolute()) for path in files if path is not None)
            texts.append(f"--dataset={name}={paths}")
        return texts


class ThreadFleet:
    """Agents as threads of this process, on any transport. A context manager.

    Args:
        transports: makes the transport, not yet open, of the device so named.
        devices: one agent each.
    """

    def __init__(
        self, transports: Callable[[str], Transport], devices: Sequence[SimDevice]
    ) -> None:
        check_distinct("the fleet", [device.name for device in devices])
        self._devices = tuple(devices)
        self._timetables = {d.name: Timetable(d.conditions) for d in devices}
        self._transports = {
            d.name: behind_link(
                transports(d.name),
                d.conditions,
                self._timetables[d.name],
                partial(self._die, d.name),
            )
            for d in devices
        }
        self._agents: dict[str, Agent] = {}
        self._threads: dict[str, threading.Thread] = {}
        self.errors: dict[str, EdgeTrainError] = {}

    def __enter__(self) -> Self:
        for device in self._devices:
            self._agents[device.name] = self._agent(device)
        for name in self._agents:
            thread = threading.Thread(
                target=self._run, args=(name,), name=name, daemon=True
            )
            self._threads[name] = thread
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all agents. Safe to call twice."""
        for agent in self._agents.values():
            agent.stop()
        for thread in self._threads.values():
            thread.join(_END_TIMEOUT_S)
        self._agents.clear()
        self._threads.clear()

    def kill(self, name: str) -> None:
        """End an agent's connection without a goodbye, as a crash does."""
        self._die(name)
        self._threads[name].join(_END_TIMEOUT_S)

    def _die(self, name: str) -> None:
        self._transports[name].kill()
        agent = self._agents.get(name)  # none: the fleet was closed meanwhile
        if agent is not None:
            agent.stop()

    def _agent(self, device: SimDevice) -> Agent:
        limits = Limits(
            memory_bytes=device.memory_bytes,
            gradient=device.gradient,
            runs=device.runs,
            conditions=device.conditions,
        )
        datasets = {name: DatasetConfig(*files) for name, files in device.datasets.items()}
        timetable = self._timetables[device.name]
        equipment = equip(device.name, limits, datasets, timetable)
        return Agent(self._transports[device.name], equipment)

    def _run(self, name: str) -> None:
        try:
            self._agents[name].run()
        except EdgeTrainError as error:  # for whoever looks; the others go on
            self.errors[name] = error


def _log(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"


def _without_password(address: BrokerAddress) -> str:
    url = str(address)
    if address.username is None:
        return url
    scheme, _, place = url.partition("://")
    return f"{scheme}://{quote(address.username, safe='')}@{place}"
