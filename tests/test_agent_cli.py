"""The agent's command line: what it refuses, how it ends, and that it stays up."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
from small_task import blobs, run_table, split_password, two_layers

from coordinator.fleet import Fleet, Said
from device_agent.cli import main
from device_agent.name_check import claim_name
from edgetrain.bundle import sha256
from edgetrain.errors import ConfigError
from edgetrain.optimizer_spec import LRSpec, OptimizerSpec
from edgetrain.sim.fleet import SimDevice
from edgetrain.transport.base import Transport
from edgetrain.transport.broker import Broker
from edgetrain.transport.link import MqttSettings
from edgetrain.transport.memory import MemoryHub, MemoryTransport
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.wire.frame import HEADER_BYTES, Address, Kind, _write_header, frames
from edgetrain.wire.messages import Deploy, Refused, Route, encode
from edgetrain.wire.receipt import Ask, Receipt, encode_note
from edgetrain.wire.topics import COORDINATOR, Channel

WAIT_S = 30.0  # only a failing test waits this long
NO_BROKER = "mqtt://127.0.0.1:1"


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A command run in this process sends the log to its own standard error."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command line in this process; its one line of error, and exit code 2."""

    def run(*arguments: str) -> str:
        assert main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("edgetrain-agent: error: ")
        return line

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "COMMAND"),
        (("run",), "missing key `broker`"),
        (("run", "--broker", NO_BROKER), "missing key `name`"),
        (("run", "--broker", "ftp://x", "--name", "a"), "not a broker's URL"),
        (("run", "--broker", NO_BROKER, "--name", "a b"), "'a b' cannot be a device's"),
        (("run", "--broker", NO_BROKER, "--name", "coordinator"), "not 'coordinator'"),
        (("run", "--broker", NO_BROKER, "--name", "a", "--gradient", "vpj"), "'vjp'"),
        (("run", "--broker", NO_BROKER, "--name", "a", "--memory", "much"), "not a size"),
        (("run", "--broker", NO_BROKER, "--name", "a", "--threads", "0"), "1 or more"),
        (("run", "--broker", NO_BROKER, "--name", "a", "--threads", "two"), "--threads"),
        (("run", "--broker", NO_BROKER, "--name", "a", "--speed", "2"), "at most 1"),
        (("run", "--broker", NO_BROKER, "--name", "a", "--dataset", "x"), "NAME=TRAIN"),
        (("run", "--broker", NO_BROKER, "--name", "a", "--dataset", "x=y,"), "NAME=TRAIN"),
        (("run", "--broker", NO_BROKER, "--name", "a", "--dataset", "x=no.npz"), "no.npz"),
        (("run", "--broker", NO_BROKER, "--name", "a", "--dataset", "a.b=c.npz"), "'.'"),
        (("run", "--broker", NO_BROKER, "--name", "a", "--password-file", "no"), "no"),
        (("run", "--broker", NO_BROKER, "--name", "a"), f"no broker at {NO_BROKER}"),
        (("run", "no.toml"), "no.toml: cannot be read"),
        (("run", "--broker", NO_BROKER, "--name", "a", "--profile", "no.json"), "no.json"),
        (("probe", "--threads", "0"), "1 or more"),
        (("probe", "--name", "a b"), "'a b' cannot be a device's"),
        (("probe", "--memory", "much"), "not a size"),
        (("probe", "--out", "none/x.json"), "no file can be written"),
        (("probe", "no.toml"), "no.toml: cannot be read"),
        (("probe", "--broker", NO_BROKER), f"no broker at {NO_BROKER}"),
        (("run", "--nope"), "--nope"),
    ],
)
def test_wrong_input_is_one_clear_line(refused, arguments, words):
    assert words in refused(*arguments)


def test_a_wrong_password_is_named_as_such(refused, edgetrain_broker: Broker, tmp_path):
    (tmp_path / "password").write_text("wrong\n")
    line = refused(
        "run",
        *("--broker", edgetrain_broker.url, "--name", "a"),
        *("--password-file", str(tmp_path / "password")),
    )
    assert "user name and password" in line


def test_debug_lets_the_error_through():
    with pytest.raises(ConfigError):
        main(["run", "--broker", NO_BROKER, "--name", "a", "--debug"])


def test_probe_prints_what_a_plan_needs(capsys):
    assert main(["probe", "--quick", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["memory_bytes"] > 0
    assert facts["flop_per_s"] > 0
    assert main(["probe", "--quick"]) == 0
    assert facts["engine"] in capsys.readouterr().out


def present(hub: MemoryHub, name: str) -> Transport:
    other = MemoryTransport(hub, name)
    other.open(lambda _: None, announce=b"here")
    return other


def test_a_free_name_may_be_borne():
    hub = MemoryHub()
    other = present(hub, "b")
    claim_name(MemoryTransport(hub, "a"), look_s=0.05, vanish_s=WAIT_S)
    other.close()


def test_a_name_that_is_taken_may_not():
    hub = MemoryHub()
    other = present(hub, "a")
    with pytest.raises(ConfigError, match="an agent named 'a' is already"):
        claim_name(MemoryTransport(hub, "a"), look_s=WAIT_S, vanish_s=0.05)
    other.close()


def test_a_name_that_becomes_free_while_looking_may_be_borne():
    hub = MemoryHub()
    other = present(hub, "a")
    timer = threading.Timer(0.1, other.kill)
    timer.start()
    claim_name(MemoryTransport(hub, "a"), look_s=WAIT_S, vanish_s=WAIT_S)
    timer.join()


@contextmanager
def agent(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """An agent as a process, ready; it is ended with the context."""
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "device_agent", "run", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        first = process.stderr.readline()
        assert "ready, engine onnxruntime" in first
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_well_and_takes_its_presence_back(
    edgetrain_broker: Broker, tmp_path: Path, number: int
):
    """From an agent file, with the password in a file or in the environment."""
    url, password = split_password(edgetrain_broker.url)
    (tmp_path / "password").write_text(f"{password}\nignored\n")
    (tmp_path / "agent.toml").write_text(
        f'broker = "{url}"\nname = "gate"\nnamespace = "signals"\n'
        + ('password_file = "password"\n' if number == signal.SIGTERM else "")
    )
    variable = {"EDGETRAIN_BROKER_PASSWORD": password} if number == signal.SIGINT else {}
    with agent(str(tmp_path / "agent.toml"), **variable) as process:
        fleet = watch(edgetrain_broker, "signals", "gate")
        process.send_signal(number)
        assert fleet.event(WAIT_S).device == "gate"
        fleet.close()
        assert process.wait(WAIT_S) == 0
        assert process.stderr.read().splitlines()[-1].endswith("gate INFO stopped")


def test_the_second_agent_of_a_name_is_turned_away(refused, edgetrain_broker: Broker):
    options = ("--broker", edgetrain_broker.url, "--name", "twin", "--namespace", "twins")
    with agent(*options):
        line = refused("run", *options)
    assert "an agent named 'twin' is already on this broker" in line


def test_it_stays_up_whatever_arrives_and_then_trains(edgetrain_fleet, tmp_path: Path):
    onnx.save(two_layers(), tmp_path / "m.onnx")
    np.savez(tmp_path / "train.npz", **blobs(96))
    np.savez(tmp_path / "eval.npz", **blobs(40, seed=1))
    fleet = edgetrain_fleet([SimDevice("a")], memory=False)
    attacker = fleet.transport()

    watcher = Fleet(attacker)
    watcher.open()
    watcher.wait(["a"], 1, WAIT_S)
    bundle = b"not what was announced"
    for channel, payload in hostile(bundle):
        attacker.send("a", channel, payload)
    attacker.send("a", Channel.CONTROL, encode(announced(bundle)))
    for frame in frames(Address(Kind.BUNDLE, 7, 0, 0), bundle, chunk_bytes=1000):
        attacker.send("a", Channel.DATA, bytes(frame))
    said = watcher.event(WAIT_S)
    assert isinstance(said, Said)
    assert isinstance(said.report, Refused)
    assert "does not match its hash" in said.report.reason
    watcher.close()
    assert fleet.train(run_table()).score.accuracy > 0.9
    log = fleet.agents.logs("a")
    assert "Traceback" not in log
    assert log.count("dropped") >= 9


def announced(bundle: bytes) -> Deploy:
    """A stage whose bundle has another hash than it should."""
    return Deploy(
        run=7,
        epoch=0,
        stage=0,
        route=Route(("a",)),
        bundle_sha256=sha256(bundle[::-1]),
        bundle_bytes=len(bundle),
        schedule="gpipe",
        microbatches=4,
        optimizer=OptimizerSpec(name="sgd", lr=LRSpec(base=0.1)),
        seed=0,
        chunk_bytes=1000,
    )


def hostile(bundle: bytes) -> Iterator[tuple[Channel, bytes]]:
    """Garbage, damage, and frames that claim what they should not."""
    yield Channel.CONTROL, b""
    yield Channel.CONTROL, b"\x81\xa4type\xa5train"
    yield Channel.CONTROL, np.random.default_rng(0).bytes(1 << 19)
    yield Channel.DATA, b""
    yield Channel.DATA, np.random.default_rng(1).bytes(4096)
    frame = next(frames(Address(Kind.BUNDLE, 7, 0, 0), bundle, chunk_bytes=1000))
    yield Channel.DATA, bytes(frame[:-1])
    frame[-1] ^= 1
    yield Channel.DATA, bytes(frame)
    huge = Address(Kind.ACTIVATION, 1 << 31, 1, 9, 1 << 31)
    yield from ((Channel.DATA, bytes(f)) for f in frames(huge, b"x", chunk_bytes=1000))
    oversized = bytearray(HEADER_BYTES + 1)
    _write_header(oversized, huge, (0, 0), (0, 0, 0, 0, 0, 2, 1 << 40, 0))
    yield Channel.DATA, bytes(oversized)
    yield Channel.FLOW, b""
    yield Channel.FLOW, np.random.default_rng(2).bytes(64)
    yield Channel.FLOW, encode_note(Receipt(7, 0, 0, 9, 9, 1 << 40, 1 << 60))
    yield Channel.FLOW, encode_note(Ask(7, 0))


def watch(broker: Broker, namespace: str, name: str) -> Fleet:
    settings = MqttSettings(namespace=namespace)
    fleet = Fleet(MqttTransport(broker.url, COORDINATOR, settings=settings))
    fleet.open()
    fleet.wait([name], 1, WAIT_S)
    return fleet
