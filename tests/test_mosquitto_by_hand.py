"""Devices by hand, as the README and the broker's page say: broker, commands, service."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from readme import BASH, ROOT, blocks, commands, environment, section, type_in

pytestmark = pytest.mark.skipif(
    shutil.which("mosquitto") is None or shutil.which("mosquitto_passwd") is None,
    reason="mosquitto and mosquitto_passwd are not on PATH",
)

HEADING = "## Three devices, by hand"
PAGE, PASSWORDS, RULES = "docs/broker.md", "## Passwords", "### Who may write where"
UNIT = ROOT / "device_agent" / "assets" / "edgetrain-agent.service"


class Desk:
    """A folder and a port in which the README's lines are typed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def here(self, line: str) -> str:
        line = line.replace("192.168.1.10:1883", f"127.0.0.1:{self.port}")
        return line.replace("192.168.1.10", f"127.0.0.1 --port {self.port}")

    def run(self, line: str) -> str:
        return type_in(self.here(line), self.folder)

    @contextmanager
    def running(self, line: str, more: dict[str, str] | None = None):
        """Keep a command running; `exec` makes its process the one that is ended."""
        variables, program, options = line.rpartition("edgetrain-agent ")
        line = f"{variables}exec {program}{options}"
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 - the README's own lines
                [BASH, "-c", self.here(line)],
                cwd=self.folder,
                env=environment(more),
                stdout=log,
                stderr=log,
            )
        try:
            yield process
        finally:
            process.terminate()
            try:
                assert process.wait(timeout=20) == 0
            except subprocess.TimeoutExpired:
                process.kill()
                raise

    def as_root(self, conf: Path) -> None:
        """Let mosquitto stay who it is: else it drops to one who cannot read the folder."""
        if os.geteuid() == 0:
            conf.write_text(f"user root\n{conf.read_text()}")

    def wait_for_broker(self) -> None:
        self.wait(lambda: _listens(self.port))

    def wait_for_agents(self, count: int) -> None:
        self.wait(lambda: self.log().count(": ready, engine") == count)

    def wait(self, ready: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 30
        while not ready():
            assert time.monotonic() < deadline_s, self.log()
            time.sleep(0.02)

    def log(self) -> str:
        return (self.folder / "log").read_text()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def service_command(desk: Desk) -> tuple[str, dict[str, str]]:
    """The unit's ExecStart with this test's places, and its environment."""
    lines = UNIT.read_text().splitlines()
    (start,) = [line for line in lines if line.startswith("ExecStart=")]
    command = start.removeprefix("ExecStart=")
    (shown,) = blocks(section(HEADING), "service")
    assert shown.strip() == command
    assert "LoadCredential=device.key:/etc/edgetrain/device.key" in lines
    program, *arguments = shlex.split(command)
    assert program == "/opt/edgetrain/bin/edgetrain-agent"
    agent_file = desk.folder / "jetson" / "agent.toml"
    arguments[arguments.index("/etc/edgetrain/agent.toml")] = str(agent_file)
    credentials = desk.folder / "credentials"
    credentials.mkdir()
    shutil.move(desk.folder / "jetson" / "device.key", credentials)
    quoted = " ".join(a if a.startswith("$") else shlex.quote(a) for a in arguments)
    return f"edgetrain-agent {quoted}", {"CREDENTIALS_DIRECTORY": str(credentials)}


@pytest.fixture
def desk(tmp_path):
    """A folder with the README's model."""
    desk = Desk(tmp_path)
    for name in ("make_model.py", "run.toml"):
        shutil.copy(ROOT / "examples" / "own_model" / name, tmp_path)
    desk.run("python make_model.py")
    return desk


def test_three_devices_train_as_the_readme_says(desk):
    lines = commands(section(HEADING))
    init, start = lines[:2]
    assert init.startswith("edgetrain fleet init")
    desk.run(init)
    for device in (desk.folder / "fleet" / "devices").iterdir():
        shutil.copytree(device, desk.folder / device.name)
    desk.as_root(desk.folder / "fleet" / "broker" / "mosquitto.conf")
    agents = [line for line in lines if line.startswith("edgetrain-agent run")]
    assert len(agents) == 2
    with ExitStack() as stack:
        stack.enter_context(desk.running(start))
        desk.wait_for_broker()
        for line in agents:
            stack.enter_context(desk.running(line))
        stack.enter_context(desk.running(*service_command(desk)))
        desk.wait_for_agents(3)
        doctor, devices, train = lines[-3:]
        assert "nothing to change" in desk.run(doctor)
        check_training(
            desk, devices, train, {"pi": "vjp", "npu": "hybrid", "jetson": "vjp"}
        )


@pytest.mark.parametrize("listed", [False, True], ids=["users", "users and access list"])
def test_devices_with_passwords_train_as_the_page_says(desk, listed):
    text = section(PASSWORDS, PAGE).partition(RULES)[0]
    (conf,) = blocks(text, "conf")
    conf = conf.replace("1883", str(desk.port))
    if listed:
        rules = section(RULES, PAGE)
        conf += blocks(rules, "conf")[0]
        (desk.folder / "acl").write_text(blocks(rules, "acl")[0])
        (desk.folder / "acl").chmod(0o600)
    (desk.folder / "mosquitto.conf").write_text(conf)
    desk.as_root(desk.folder / "mosquitto.conf")
    lines = commands(text)
    for line in lines:
        if line.startswith(("touch passwords", "mosquitto_passwd")):
            desk.run(line)
    with ExitStack() as stack:
        (start,) = [line for line in lines if line.startswith("mosquitto -c")]
        stack.enter_context(desk.running(start))
        desk.wait_for_broker()
        agents = [line for line in lines if "edgetrain-agent run" in line]
        for line in agents:
            assert line.endswith(" --insecure")
            stack.enter_context(desk.running(line))
        desk.wait_for_agents(len(agents))
        export, devices, train = lines[-3:]
        assert export.startswith("export EDGETRAIN_BROKER_PASSWORD=")
        devices, train = f"{export}\n{devices}", f"{export}\n{train}"
        check_training(desk, devices, train, {"pi": "vjp", "npu": "hybrid"})
    secret = export.partition("=")[2]
    assert not [
        f for f in (desk.folder / "out").iterdir() if secret in f.read_text("latin1")
    ]


def check_training(desk: Desk, devices: str, train: str, modes: dict[str, str]) -> None:
    """List the devices and train on them, by these lines."""
    found = json.loads(desk.run(f"{devices} --json"))
    assert {device["device"] for device in found} == set(modes)
    line = f"{train} --set train.epochs=2 --out out --json"
    assert json.loads(desk.run(line))["accuracy"] > 0.5
    plan = json.loads((desk.folder / "out" / "plan.json").read_text())
    assert {stage["device"]: stage["mode"] for stage in plan["stages"]} == modes
