"""Fixtures to test one's own models and run files on fleets one does not own.

pytest imports this in every run, so it imports nothing heavy before a fixture is used.

    def test_it_learns(edgetrain_fleet):
        fleet = edgetrain_fleet([SimDevice("a"), SimDevice("b", gradient="hybrid")])
        assert fleet.train({"model": {...}, "data": {...}}).score.accuracy > 0.9
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from coordinator.session import Outcome
    from edgetrain.config import RunConfig
    from edgetrain.sim.fleet import ProcessFleet, SimDevice, ThreadFleet
    from edgetrain.transport.base import Transport
    from edgetrain.transport.broker import Broker


class RunningFleet:
    """Simulated devices that wait for a run.

    Attributes:
        agents: to look at them, or to end one.
        transport: makes a coordinator's transport, not yet open.

    Args:
        agents: already started.
        names: of the devices.
        transport: see above.
        folder: for run folders, and where relative paths of a run start.
    """

    def __init__(
        self,
        agents: ProcessFleet | ThreadFleet,
        names: Sequence[str],
        transport: Callable[[], Transport],
        folder: Path,
    ) -> None:
        self.agents = agents
        self._names = tuple(names)
        self.transport = transport
        self._folder = folder

    def train(self, config: RunConfig | Mapping[str, Any]) -> Outcome:
        """Run a configuration, or a table as a run file holds it, on these devices.

        A table without ``[fleet] devices`` takes all of them.

        Raises:
            InputError: model, data or configuration do not do.
            RunError: the run failed.
        """
        from coordinator.progress import SilentProgress
        from coordinator.session import train
        from coordinator.watch import Watch
        from edgetrain.config import RunConfig, parse

        if not isinstance(config, RunConfig):
            section = {"devices": list(self._names), **config.get("fleet", {})}
            config = parse({**config, "fleet": section}, folder=self._folder)
        out = self._folder / f"run-{secrets.token_hex(4)}"
        return train(config, self.transport(), Watch(SilentProgress()), out)


class StartFleet(Protocol):
    """Starts devices for one test.

    Args:
        devices: one agent each.
        memory: agents are threads of this process on an in-memory network; False: they are
            processes on an embedded broker.
    """

    def __call__(
        self, devices: Sequence[SimDevice], *, memory: bool = True
    ) -> RunningFleet: ...


@pytest.fixture(scope="session")
def edgetrain_broker() -> Iterator[Broker]:
    """An embedded broker for the whole test run; `.url` tells where it is."""
    from edgetrain.transport.broker import embedded_broker

    with embedded_broker() as broker:
        yield broker


@pytest.fixture
def edgetrain_fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StartFleet]:
    """Starts simulated devices, and ends them when the test is over."""
    with ExitStack() as stack:

        def start(devices: Sequence[SimDevice], *, memory: bool = True) -> RunningFleet:
            names = [device.name for device in devices]
            agents, transport = (
                _threads(devices)
                if memory
                else _processes(devices, request.getfixturevalue("edgetrain_broker").url)
            )
            stack.enter_context(agents)
            return RunningFleet(agents, names, transport, tmp_path)

        yield start


def _threads(
    devices: Sequence[SimDevice],
) -> tuple[ThreadFleet, Callable[[], Transport]]:
    from edgetrain.sim.fleet import ThreadFleet
    from edgetrain.transport.memory import MemoryHub, MemoryTransport
    from edgetrain.wire.topics import COORDINATOR

    hub = MemoryHub()
    agents = ThreadFleet(lambda name: MemoryTransport(hub, name), devices)
    return agents, lambda: MemoryTransport(hub, COORDINATOR)


def _processes(
    devices: Sequence[SimDevice], url: str
) -> tuple[ProcessFleet, Callable[[], Transport]]:
    from edgetrain.sim.fleet import ProcessFleet
    from edgetrain.transport.link import MqttSettings
    from edgetrain.transport.mqtt import MqttTransport
    from edgetrain.wire.topics import COORDINATOR

    settings = MqttSettings(namespace=f"test-{secrets.token_hex(4)}")
    agents = ProcessFleet(url, devices, settings.namespace)
    return agents, lambda: MqttTransport(url, COORDINATOR, settings=settings)
