"""Training over a fleet with certificates and signatures, and those who meddle with it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import numpy as np
import onnx
import pytest
import tomli_w
from secure_fleet import WAIT_S, SecureFleet, mosquitto, secure_fleet
from small_task import blobs, run_table, two_layers

from coordinator.cli import main
from coordinator.connection import signer
from coordinator.fleet import Fleet, Said
from coordinator.job import prepare
from coordinator.progress import SilentProgress
from coordinator.session import Session
from coordinator.watch import Watch
from device_agent.agent import Agent
from device_agent.equip import Limits, equip
from device_agent.obedience import obeying
from edgetrain.bundle import sha256
from edgetrain.config import parse
from edgetrain.errors import DeviceError
from edgetrain.fleet_config import FleetConfig, fleet_table
from edgetrain.optimizer_spec import LRSpec, OptimizerSpec
from edgetrain.settings import decode
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.wire.frame import Address, Kind, frames
from edgetrain.wire.messages import Deploy, Refused, Release, Route, encode
from edgetrain.wire.signature import Signer, make_key
from edgetrain.wire.topics import COORDINATOR, Channel

pytestmark = pytest.mark.skipif(
    shutil.which("mosquitto") is None, reason="no mosquitto on PATH"
)
DEVICES = ("pi", "npu")


@pytest.fixture
def fleet(tmp_path):
    with secure_fleet(tmp_path / "fleet", *DEVICES) as running:
        yield running


@pytest.fixture
def task(tmp_path):
    onnx.save(two_layers(), tmp_path / "m.onnx")
    np.savez(tmp_path / "train.npz", **blobs(96))
    np.savez(tmp_path / "eval.npz", **blobs(40, seed=1))
    (tmp_path / "run.toml").write_text(tomli_w.dumps(run_table()))
    return tmp_path


class Recorder(MqttTransport):
    """The coordinator's transport, which keeps a copy of all that it sends."""

    sent: list[tuple[str, Channel, bytes]]

    def send(self, to, channel, payload):
        self.__dict__.setdefault("sent", []).append((to, channel, bytes(payload)))
        super().send(to, channel, payload)


@contextmanager
def agent(fleet: SecureFleet, name: str) -> Iterator[Agent]:
    """An agent as its own folder makes it, as a thread."""
    key = fleet.folder / "devices" / name / "coordinator.pub"
    equipment = obeying(equip(name, Limits()), key)
    running = Agent(fleet.transport(name), equipment)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    try:
        yield running
    finally:
        running.stop()
        thread.join(WAIT_S)


def section(fleet: SecureFleet) -> FleetConfig:
    return decode(FleetConfig, fleet_table(fleet.fleet_file), folder=fleet.folder)


def watching(fleet: SecureFleet, key: Signer | None, *names: str) -> Fleet:
    found = Fleet(fleet.transport(COORDINATOR), key)
    found.open()
    found.wait(names, len(names), WAIT_S)
    return found


def stage(bundle: bytes, digest: str, run: int = 7) -> Deploy:
    return Deploy(
        run=run,
        epoch=0,
        stage=0,
        route=Route(("pi",)),
        bundle_sha256=digest,
        bundle_bytes=len(bundle),
        schedule="gpipe",
        microbatches=4,
        optimizer=OptimizerSpec(name="sgd", lr=LRSpec(base=0.1)),
        seed=0,
        chunk_bytes=1000,
    )


def send_bundle(found: Fleet, to: str, bundle: bytes, run: int = 7) -> None:
    for frame in frames(Address(Kind.BUNDLE, run, 0, 0), bundle, chunk_bytes=1000):
        found.transport.send(to, Channel.DATA, bytes(frame))


def refused(found: Fleet) -> Refused:
    said = found.event(WAIT_S)
    assert isinstance(said, Said)
    assert isinstance(said.report, Refused)
    return said.report


def test_a_run_over_certificates_and_signatures(fleet, task, capsys):
    """With the commands that people type, from the folders as they are."""
    with ExitStack() as stack:
        for name in DEVICES:
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "device_agent", "run", fleet.agent_file(name)],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            stack.enter_context(process)
            stack.callback(process.terminate)
            assert "ready, engine" in process.stderr.readline()
        key = ("--fleet", str(fleet.fleet_file))
        assert main(["devices", *key, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert {device["device"] for device in found} == set(DEVICES)
        (print_of,) = {device["signed_by"] for device in found}
        assert print_of == signer(section(fleet)).fingerprint
        names = "fleet.devices=['pi', 'npu']"
        run = ["train", str(task / "run.toml"), *key, "--set", names, "--json"]
        assert main([*run, "--out", str(task / "out")]) == 0
        assert json.loads(capsys.readouterr().out)["accuracy"] > 0.9
        plan = msgspec.json.decode((task / "out" / "plan.json").read_bytes())
        assert len(plan["stages"]) == 2
        secret = (fleet.folder / "coordinator" / "signing.key").read_text()
        line = secret.splitlines()[1]
        assert not [f for f in (task / "out").iterdir() if line in f.read_text("latin1")]


def test_a_recorded_run_is_of_no_use(fleet, task, caplog):
    """Not while the agent that obeyed it runs, nor when it starts again."""
    config = msgspec.structs.replace(
        parse(run_table(), folder=task), fleet=FleetConfig(devices=("pi",))
    )
    settings = fleet.transport(COORDINATOR)._settings
    recorder = Recorder(fleet.url, COORDINATOR, settings=settings)
    with agent(fleet, "pi"):
        watch = Watch(SilentProgress())
        session = Session(prepare(config), recorder, watch, signer=signer(section(fleet)))
        assert session.train(task / "out").score.accuracy > 0.9
        commands = [s for s in recorder.sent if s[1] is Channel.CONTROL]
        assert len(commands) >= 3
        replay(fleet, recorder.sent, caplog, len(commands), "not newer than the last one")
    with agent(fleet, "pi"):
        caplog.clear()
        replay(fleet, recorder.sent, caplog, len(commands), "not the coordinator's for")


def replay(fleet, sent, caplog, commands, why):
    """Say all of it again, as the coordinator; only the mark at the end is answered."""
    found = watching(fleet, signer(section(fleet)), "pi")
    for to, channel, payload in sent:
        found.transport.send(to, channel, payload)
    found.command("pi", stage(b"mark", sha256(b"mark")))
    send_bundle(found, "pi", b"mark")
    assert refused(found).run == 7
    assert caplog.text.count(why) == commands
    found.close()


def test_whoever_has_the_certificate_but_not_the_key_commands_nobody(fleet, caplog):
    with agent(fleet, "pi"):
        own = signer(section(fleet))
        found = watching(fleet, own, "pi")
        session = found._hellos["pi"].session
        stranger = Signer(make_key()[0], lambda: 1 << 62)
        command = encode(stage(b"evil", sha256(b"evil"), run=8))
        signed = own.sign(command, "pi", session)
        attempts = [
            (command, "without a signature"),
            (stranger.sign(command, "pi", session), "not the coordinator's for"),
            (own.sign(command, "npu", session), "not the coordinator's for"),
            (own.sign(command, "pi", "an older session"), "not the coordinator's for"),
            (signed.replace(b"gpipe", b"1f1b_"), "not the coordinator's for"),
        ]
        for payload, _ in attempts:
            found.transport.send("pi", Channel.CONTROL, payload)
        send_bundle(found, "pi", b"evil", run=8)
        found.command("pi", stage(b"mark", sha256(b"mark")))
        send_bundle(found, "pi", b"mark")
        assert refused(found).run == 7, "had one been taken, run 8 would come first"
        found.close()
    for _, why in attempts:
        assert why in caplog.text
    assert caplog.text.count("dropped: a command") == len(attempts)


def test_a_device_cannot_give_commands(fleet, caplog):
    """Its topic names it, whatever it says, and only the coordinator's counts."""
    with agent(fleet, "pi"):
        found = watching(fleet, signer(section(fleet)), "pi")
        other = fleet.transport("npu")
        other.open(lambda _: None)
        session = found._hellos["pi"].session
        stolen = found._signer.sign(encode(Release(1, 0, "now")), "pi", session)
        other.send("pi", Channel.CONTROL, stolen)
        for frame in frames(Address(Kind.BUNDLE, 7, 0, 0), b"evil", chunk_bytes=1000):
            other.send("pi", Channel.DATA, bytes(frame))
        other.close()
        found.command("pi", stage(b"mark", sha256(b"mark")))
        send_bundle(found, "pi", b"mark")
        assert refused(found).run == 7
        found.close()
    assert "only the coordinator gives commands" in caplog.text
    assert "message from npu dropped: Address(kind=<Kind.BUNDLE" in caplog.text


def test_a_bundle_altered_on_the_way_is_refused(fleet):
    """Its frames are whole, as whoever alters it computes their sums anew."""
    with agent(fleet, "pi"):
        found = watching(fleet, signer(section(fleet)), "pi")
        bundle = bytes(range(256)) * 20
        altered = bytearray(bundle)
        altered[2000] ^= 1
        found.command("pi", stage(bundle, sha256(bundle)))
        send_bundle(found, "pi", bytes(altered))
        assert "does not match its hash" in refused(found).reason
        found.close()


def test_without_its_key_the_coordinator_says_what_is_missing(fleet):
    with agent(fleet, "pi"):
        for key in (None, Signer(make_key()[0], lambda: 1)):
            found = watching(fleet, key, "pi")
            with pytest.raises(DeviceError, match=r"'pi': takes only .* signing_key_file"):
                found.command("pi", Release(1, 0, "done"))
            found.close()


def test_simulated_devices_join_a_broker_under_tls_with_its_authority(fleet, task, capsys):
    """They have no certificates, so this broker has to do without."""
    fleet.process.terminate()
    fleet.process.wait(WAIT_S)
    conf = fleet.folder / "broker" / "mosquitto.conf"
    text = conf.read_text().replace("require_certificate true", "")
    text = text.replace("use_identity_as_username true", "").replace("acl_file", "#")
    conf.write_text(text.replace("allow_anonymous false", "allow_anonymous true"))
    with mosquitto(fleet.folder, fleet.port):
        given = (
            f"fleet.broker={fleet.url}",
            f"fleet.ca_file={fleet.files('pi').ca_file}",
            "fleet.simulate=[{name='a'}, {name='b'}]",
        )
        out = ("--out", str(task / "out"))
        options = [word for text in given for word in ("--set", text)]
        assert main(["train", str(task / "run.toml"), *options, *out, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["accuracy"] > 0.9


@pytest.fixture(autouse=True)
def _as_it_logs(caplog):
    caplog.set_level(logging.WARNING)
