"""The coordinator's command line: whole runs over a broker, and every bad input."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
import tomli_w
from onnx import helper
from small_models import build, normal
from small_task import (
    blobs,
    determinant,
    hard_coded,
    run_table,
    split_password,
    two_layers,
)

from coordinator.cli import main
from edgetrain.compiler.export import differences
from edgetrain.errors import ConfigError, TransportError
from edgetrain.sim.fleet import ProcessFleet, SimDevice
from edgetrain.transport.base import Transport
from edgetrain.transport.broker import Broker
from edgetrain.transport.link import MqttSettings
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.wire.hello import Hello
from edgetrain.wire.messages import encode

WAIT_S = 30.0  # only a failing test waits this long
NO_BROKER = "mqtt://127.0.0.1:1"
NAMESPACE = "cli"

Run = Callable[..., dict]


@pytest.fixture(scope="module")
def agents(edgetrain_broker: Broker) -> Iterator[ProcessFleet]:
    """Three devices for many runs; the third lends next to no memory."""
    devices = [SimDevice("a"), SimDevice("b"), SimDevice("small", memory_bytes=4300)]
    with ProcessFleet(edgetrain_broker.url, devices, NAMESPACE) as fleet:
        yield fleet


@pytest.fixture
def task(tmp_path: Path, edgetrain_broker: Broker) -> Path:
    """A run file that works where `agents` are: a small model on two devices."""
    onnx.save(two_layers(), tmp_path / "m.onnx")
    np.savez(tmp_path / "train.npz", **blobs(96))
    np.savez(tmp_path / "eval.npz", **blobs(40, seed=1))
    fleet = {"broker": edgetrain_broker.url, "namespace": NAMESPACE, "devices": ["a", "b"]}
    table = {**run_table(), "fleet": fleet}
    (tmp_path / "run.toml").write_text(tomli_w.dumps(table))
    return tmp_path / "run.toml"


@pytest.fixture
def error(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command in this process; its one paragraph of error."""

    def run(code: int, *arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("edgetrain: error: ")
        return line

    return run


@pytest.fixture
def result(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command that works in this process; its JSON."""

    def run(*arguments: object) -> dict:
        assert main([*(str(argument) for argument in arguments), "--json"]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        return json.loads(line)

    return run


def test_train_gives_the_users_file_with_better_weights(result: Run, task, tmp_path):
    """On the embedded broker, with devices that it simulates."""
    simulated = "fleet={simulate=[{name='a', speed=0.9}, {name='b'}]}"
    facts = result("train", task, "--out", tmp_path / "out", "--set", simulated)
    assert facts["steps"] == 18
    assert facts["samples"] == 40
    assert not facts["interrupted"]
    original, trained = onnx.load(tmp_path / "m.onnx"), onnx.load(facts["model"])
    assert differences(original, trained) == []
    data = ("--data", tmp_path / "eval.npz")
    after = result("evaluate", facts["model"], *data)
    assert after["accuracy"] == facts["accuracy"] > 0.9
    assert after["loss"] == pytest.approx(facts["loss"], rel=1e-5)
    before = result("evaluate", tmp_path / "m.onnx", *data)
    assert before["loss"] > 2 * after["loss"]


@pytest.mark.usefixtures("agents")
def test_train_tells_a_person_how_it_went(capsys, task, tmp_path):
    (tmp_path / "out").mkdir()
    assert main(["train", str(task), "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "finished 18 steps; on 40 held-out samples: loss" in text
    assert f"trained model: {tmp_path / 'out' / 'trained.onnx'}" in text
    table = [line.split()[:3] for line in text.splitlines()]
    assert ["a", "0", "vjp"] in table or ["a", "1", "vjp"] in table


@pytest.mark.usefixtures("agents")
def test_train_says_that_a_model_sets_the_microbatch(capsys, task, tmp_path):
    onnx.save(hard_coded(1), tmp_path / "m.onnx")
    arguments = ["train", str(task), "--out", str(tmp_path / "out")]
    assert main([*arguments, *settings("train.epochs=1")]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    own = "32 samples a step, in microbatches of 1, the batch size that the model fixes"
    assert first == own
    (note,) = [line for line in others if line.startswith("note: ")]
    assert "fixes its batch size at 1" in note


@pytest.mark.usefixtures("agents")
def test_options_and_the_environment_complete_the_run_file(
    result: Run, task, tmp_path, monkeypatch, edgetrain_broker: Broker
):
    url, password = split_password(edgetrain_broker.url)
    monkeypatch.setenv("EDGETRAIN_BROKER_PASSWORD", password)
    given = ("train.epochs=1", f"fleet.broker={url}", "fleet.devices=['b']")
    facts = result("train", task, "--out", tmp_path / "out", *settings(*given))
    assert facts["steps"] == 3
    resolved = (tmp_path / "out" / "run.toml").read_text()
    assert '"b",' in resolved
    assert password not in resolved


@pytest.mark.usefixtures("agents")
def test_ctrl_c_keeps_and_writes_the_weights_so_far(result: Run, task, tmp_path):
    command = ["train", str(task), "--out", str(tmp_path / "out"), "--json"]
    metrics = tmp_path / "out" / "metrics.jsonl"
    with started(*command, *settings("train.epochs=100000")) as process:
        eventually(lambda: lines(metrics) > 40 or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, errors) == (130, "")
    facts = json.loads(output)
    assert facts["interrupted"]
    assert facts["steps"] >= 30
    after = result("evaluate", facts["model"], "--data", tmp_path / "eval.npz")
    assert after["accuracy"] > 0.9


def test_ctrl_c_before_the_first_step_ends_at_once(task):
    nobody = settings("fleet.namespace=nobody")
    with started("train", str(task), *nobody) as process:
        assert "waiting for devices" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert "Traceback" not in errors


def truncated(folder: Path) -> None:
    data = (folder / "m.onnx").read_bytes()
    (folder / "m.onnx").write_bytes(data[: len(data) // 2])


def scalar_output(folder: Path) -> None:
    nodes = [helper.make_node("Gemm", ["x", "w"], ["y"], "only")]
    model = build(nodes, [("x", ["N", 4])], ["y"], {"w": normal(4, 1)})
    onnx.save(model, folder / "m.onnx")


def data(**changes: object) -> Callable[[Path], None]:
    """Replace arrays of the training file; None leaves one out."""

    def apply(folder: Path) -> None:
        arrays = {**blobs(96), **changes}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        np.savez(folder / "train.npz", **arrays)

    return apply


NAN = blobs(96)["x"].copy()
NAN[5, 2] = np.nan


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "m.onnx").unlink(), "m.onnx cannot be read: No such file"),
        (truncated, "m.onnx is damaged or is not an ONNX file"),
        (scalar_output, "loss 'softmax_cross_entropy' needs an output"),
        (data(x=None, z=1, w=2), "lacks x"),
        (data(x=normal(96, 5)), "array 'x' has shape [96, 5], the model needs"),
        (data(x=normal(96, 4).astype(complex)), "array 'x' is complex"),
        (data(labels=np.full(96, 3)), "the label of sample 0 is 3"),
        (data(x=NAN), "array 'x' holds a NaN or an infinite number, first in sample 5"),
        (data(labels=None), "has no labels"),
        (lambda f: (f / "train.npz").write_bytes(b"PK"), "train.npz: damaged"),
        (lambda f: (f / "run.toml").write_text("[train]\nlr = 1"), "model"),
        (lambda f: (f / "run.toml").write_text("="), "not a TOML file"),
    ],
)
def test_wrong_files_are_refused_before_anything_starts(error, task, change, words):
    change(task.parent)
    assert words in error(2, "train", task, "--out", task.parent / "out")
    assert not (task.parent / "out").exists()


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("train.lr=-1", "[train] lr = -1"),
        ("train.lrr=1", "unknown key 'lrr' in [train]"),
        ("train.lr", "section.key=value"),
        ("model.loss=cross", "softmax_cross_entropy"),
        ("model.trainable=nothing.*", "matches no weight"),
        ("model.trainable=tt:r=0", "write tt:r=N"),
        ("model.trainable=tt:r=8", "no dense layer to compress"),
        ("fleet.simulate=[{name='a'},{name='a'}]", "names a twice"),
        ("fleet.broker=" + NO_BROKER, f"no broker at {NO_BROKER}"),
        ("fleet.broker=nowhere", "[fleet] broker is not a broker's URL"),
    ],
)
def test_wrong_settings_are_refused(error, task, assignment, words):
    assert words in error(2, "train", task, "--set", assignment)


@pytest.mark.usefixtures("agents")
def test_an_op_without_a_rule_is_named_with_its_node(error, task):
    onnx.save(determinant(), task.parent / "m.onnx")
    out = task.parent / "out"
    line = error(2, "train", task, "--out", out, *settings("fleet.devices=['a']"))
    assert "no differentiation rule for ONNX op 'Det' (node 'volume')" in line


@pytest.mark.usefixtures("agents")
def test_more_stages_than_cuts(error, task):
    line = error(2, "train", task, *settings("fleet.devices=['a','b','small']"))
    assert "3 stages are asked for, but this model has only 1 valid cuts" in line


def test_a_wrong_password(error, task, edgetrain_broker: Broker):
    url, _ = split_password(edgetrain_broker.url)
    url = url.replace("@", ":wrong@")
    line = error(2, "train", task, "--set", f"fleet.broker={url}")
    assert "user name and password" in line
    assert ":wrong@" not in line
    assert "user name and password" in error(2, "devices", "--broker", url)


def test_too_few_devices_in_time(error, task, edgetrain_broker: Broker):
    there = announce(edgetrain_broker, "few", "a", hello("a", "1"))
    given = settings("fleet.namespace=few", "fleet.wait_s=0.5")
    line = error(1, "train", task, *given)
    there.close()
    assert "too few devices after 0.5 s: waiting for b; there: a" in line


def test_a_simulated_device_that_cannot_start_says_why(
    error, task, edgetrain_broker: Broker
):
    """Its name is taken, so the agent ends; the coordinator passes its words on."""
    there = announce(edgetrain_broker, "taken", "a", b"not a hello")
    given = ("fleet.namespace=taken", "fleet.simulate=[{name='a'}]", "fleet.wait_s=6")
    line = error(1, "train", task, *settings(*given, "fleet.devices=1"))
    there.close()
    assert "Simulated devices that ended: a: " in line
    assert "an agent named 'a' is already on this broker" in line


@pytest.mark.usefixtures("agents")
def test_a_device_that_refuses_for_memory(error, task):
    line = error(1, "train", task, *settings("fleet.devices=['small']"))
    assert "device 'small': refuses stage 0: the stage needs" in line


@pytest.mark.usefixtures("agents")
def test_a_loss_that_is_no_number_keeps_the_last_good_weights(error, task, tmp_path):
    out = tmp_path / "out"
    bad = settings("train.optimizer=sgd", "train.lr=1e30")
    line = error(1, "train", task, "--out", out, *bad)
    assert "is not finite; the weights of the last good step are kept" in line
    kept = onnx.load(out / "trained.onnx")
    assert differences(onnx.load(tmp_path / "m.onnx"), kept) == []
    for tensor in kept.graph.initializer:
        assert np.isfinite(onnx.numpy_helper.to_array(tensor)).all()


def test_a_folder_in_use_is_not_overwritten(error, task, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    line = error(2, "train", task, "--out", tmp_path / "out")
    assert "a run never overwrites" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train",), "Missing argument 'RUN.toml'"),
        (("frobnicate",), "No such command 'frobnicate'"),
        (("train", "x", "--nope"), "--nope"),
        (("train", "no.toml"), "no.toml: cannot be read"),
        (("evaluate", "no.onnx", "--data", "no.npz"), "no.onnx cannot be read"),
        (("inspect", "no.onnx"), "no.onnx cannot be read"),
        (("devices", "--broker", NO_BROKER), f"no broker at {NO_BROKER}"),
        (("broker", "--port", "70000"), "--port"),
    ],
)
def test_wrong_options(error, arguments, words):
    assert words in error(2, *arguments)


def test_debug_lets_the_error_through():
    with pytest.raises(ConfigError) as caught:
        main(["train", "no.toml", "--debug"])
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_devices_lists_who_is_there(result: Run, capsys, edgetrain_broker: Broker):
    options = ("--broker", edgetrain_broker.url, "--namespace", "listed")
    one = announce(edgetrain_broker, "listed", "b", hello("b", "1"))
    two = announce(edgetrain_broker, "listed", "a", hello("a", "2"))
    found = result("devices", *options)
    assert [facts["device"] for facts in found] == ["a", "b"]
    assert found[0]["memory_bytes"] == 1 << 20
    assert main(["devices", *options]) == 0
    assert "engine 1" in capsys.readouterr().out
    one.close()
    two.close()
    assert result("devices", *options) == []


def test_broker_runs_until_ctrl_c(result: Run):
    with started("broker", "--json") as process:
        facts = json.loads(process.stdout.readline())
        assert result("devices", "--broker", facts["url"]) == []
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
        assert process.stderr.read() == ""
    with pytest.raises(TransportError):
        MqttTransport(facts["url"], "late").open(lambda _: None)


def test_the_demo_reaches_what_it_promises(result: Run, tmp_path):
    facts = result("demo", "--out", tmp_path / "demo")
    assert facts["accuracy_before"] < 0.3
    assert facts["accuracy"] >= 0.97
    folder = tmp_path / "demo"
    original, trained = folder / "digits.onnx", folder / "run" / "trained.onnx"
    assert differences(onnx.load(original), onnx.load(trained)) == []


def hello(device: str, session: str) -> bytes:
    facts = ("0", "engine 1", ("CPUExecutionProvider",), "auto", 1 << 20, 1e9, 1)
    return encode(Hello(device, session, *facts))


def announce(broker: Broker, namespace: str, name: str, presence: bytes) -> Transport:
    place = MqttSettings(namespace=namespace)
    transport = MqttTransport(broker.url, name, settings=place)
    transport.open(lambda _: None, announce=presence)
    return transport


def settings(*assignments: str) -> list[str]:
    return [word for assignment in assignments for word in ("--set", assignment)]


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command as a process of its own; it is ended with the context."""
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "coordinator", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def eventually(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)
