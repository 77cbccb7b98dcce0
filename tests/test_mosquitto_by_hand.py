"""The README's three devices by hand: its broker, its commands, its service's line."""

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
PLACE = "192.168.1.10:1883"
UNIT = ROOT / "device_agent" / "assets" / "edgetrain-agent.service"
DEVICES = {"pi", "npu", "jetson"}


class Desk:
    """A folder and a port in which the README's lines are typed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def here(self, line: str) -> str:
        return line.replace(PLACE, f"127.0.0.1:{self.port}")

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

    def write_broker_files(self, *extra: str) -> None:
        (conf,) = blocks(section(HEADING), "conf")
        lines = [conf.replace("1883", str(self.port)), *extra]
        if os.geteuid() == 0:
            lines.append("user root\n")  # else it drops to one who cannot read the folder
        (self.folder / "mosquitto.conf").write_text("".join(lines))

    def wait_for_broker(self) -> None:
        self.wait(lambda: _listens(self.port))

    def wait_for_agents(self) -> None:
        self.wait(lambda: self.log().count(": ready, engine") == len(DEVICES))

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
    program, *arguments = shlex.split(command)
    assert program == "/opt/edgetrain/bin/edgetrain-agent"
    agent_file = desk.folder / "agent.toml"
    arguments[arguments.index("/etc/edgetrain/agent.toml")] = str(agent_file)
    quoted = " ".join(a if a.startswith("$") else shlex.quote(a) for a in arguments)
    return f"edgetrain-agent {quoted}", {"CREDENTIALS_DIRECTORY": str(desk.folder)}


@pytest.fixture(params=["users", "users and access list"])
def desk(tmp_path, request):
    """The README's broker, its three agents and its model, all running or made."""
    desk = Desk(tmp_path)
    text = section(HEADING)
    extra = []
    if "access" in request.param:
        extra = blocks(section("### Who may write where", "docs/broker.md"), "conf")
        (acl,) = blocks(section("### Who may write where", "docs/broker.md"), "acl")
        (tmp_path / "acl").write_text(acl)
        (tmp_path / "acl").chmod(0o600)
    desk.write_broker_files(*extra)
    for name in ("make_model.py", "run.toml"):
        shutil.copy(ROOT / "examples" / "own_model" / name, tmp_path)
    desk.run("python make_model.py")
    lines = commands(text)
    for line in lines:
        if line.startswith(("touch passwords", "mosquitto_passwd")):
            desk.run(line)
    (agent_file,) = blocks(text, "toml")
    (tmp_path / "agent.toml").write_text(desk.here(agent_file))
    (secret,) = [ln.split()[-1] for ln in lines if " passwords jetson " in ln]
    (tmp_path / "password").write_text(f"{secret}\n")
    with ExitStack() as stack:
        (start,) = [line for line in lines if line.startswith("mosquitto -c")]
        stack.enter_context(desk.running(start))
        desk.wait_for_broker()
        agents = [line for line in lines if "edgetrain-agent run" in line]
        assert len(agents) == 2
        for line in agents:
            stack.enter_context(desk.running(line))
        stack.enter_context(desk.running(*service_command(desk)))
        desk.wait_for_agents()
        yield desk


def test_three_devices_train_as_the_readme_says(desk):
    lines = commands(section(HEADING))
    export, devices, train = lines[-3:]
    assert export.startswith("export EDGETRAIN_BROKER_PASSWORD=")
    found = json.loads(desk.run(f"{export}\n{devices} --json"))
    assert {device["device"] for device in found} == DEVICES
    outcome = json.loads(
        desk.run(f"{export}\n{train} --set train.epochs=2 --out out --json")
    )
    assert outcome["accuracy"] > 0.5
    plan = json.loads((desk.folder / "out" / "plan.json").read_text())
    modes = {stage["device"]: stage["mode"] for stage in plan["stages"]}
    assert modes == {"pi": "vjp", "npu": "hybrid", "jetson": "vjp"}
    secret = export.partition("=")[2]
    assert not [
        f for f in (desk.folder / "out").iterdir() if secret in f.read_text("latin1")
    ]
