from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent import config as agent_config
from edgetrain import train_config
from edgetrain.compiler import loss
from edgetrain.config import load
from edgetrain.errors import ConfigError
from edgetrain.losses import LOSSES
from edgetrain.manifest import Mode
from edgetrain.runtime.optim.lr import KINDS
from edgetrain.runtime.optim.table import OPTIMIZERS
from edgetrain.schedules.table import SCHEDULES
from edgetrain.settings import decode, size_bytes
from edgetrain.train_config import TrainConfig

SMALLEST = """
[model]
path = "net.onnx"
[data]
train = "train.npz"
"""

WHOLE = """
[model]
path = "net.onnx"
loss = "mse"
trainable = ["head.*"]
output = "y"
[data]
device = "pi"
dataset = "walks"
[train]
steps = 7
batch_size = 12
microbatches = 3
optimizer = "adam"
lr_schedule = "cosine"
warmup_steps = 2
schedule = "gpipe"
gradient = { pi = "hybrid" }
[plan]
stages = 3
cuts = ["a", ["b", "c"]]
pin = { first = "pi", last = "pc" }
[fleet]
broker = "mqtts://me:secret@broker.local:8883"
devices = ["pi", "pc", "nano"]
simulate = [{ name = "nano", speed = 0.25, gradient = "hybrid", memory = "512 MB" }]
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_a_file_with_only_what_is_needed_gets_working_defaults(tmp_path):
    config = load(write(tmp_path, SMALLEST))
    assert config.model.path == tmp_path / "net.onnx"
    assert config.data.train == tmp_path / "train.npz"
    assert (
        config.train.microbatch * config.train.microbatch_count == config.train.batch_size
    )
    assert config.fleet.count == 1
    assert config.train.total_steps(steps_per_epoch=5) == 50


def test_every_key_arrives(tmp_path):
    config = load(write(tmp_path, WHOLE))
    assert config.model.trainable == ("head.*",)
    assert (config.data.device, config.data.dataset) == ("pi", "walks")
    assert config.plan.cuts == ("a", ("b", "c"))
    assert config.plan.pin.last == "pc"
    assert config.fleet.names == ("pi", "pc", "nano")
    assert config.fleet.simulate[0].memory_bytes == 512_000_000
    assert config.train.gradient_of(0, "pi") == "hybrid"
    assert config.train.gradient_of(1, "pc") == "auto"


def test_the_learning_rate_follows_the_optimizer_unless_given(tmp_path):
    path = write(tmp_path, SMALLEST)
    assert load(path).train.lr == TrainConfig().lr
    assert load(path, ["train.optimizer=adam"]).train.lr == 0.001
    assert load(path, ["train.optimizer=adam", "train.lr=0.5"]).train.lr == 0.5


def test_overrides_win_and_keep_their_types(tmp_path):
    options = [
        "train.lr=1",
        "train.nesterov=true",
        "model.loss=mse",
        'train.gradient=["vjp", "hybrid"]',
        "plan.pin.first=pi",
        "data.eval=more/eval.npz",
        "model.output=a = b",
    ]
    config = load(write(tmp_path, SMALLEST), options)
    assert config.train.lr == 1.0
    assert config.train.nesterov is True
    assert config.model.loss == "mse"
    assert config.train.gradient_of(1, "any") == "hybrid"
    assert config.plan.pin.first == "pi"
    assert config.data.eval == tmp_path / "more/eval.npz"
    assert config.model.output == "a = b"


@pytest.mark.parametrize(
    ("epochs", "steps", "total"),
    [(None, None, 40), (3, None, 12), (None, 7, 7), (3, 7, 7), (1, 7, 4)],
)
def test_a_run_ends_at_whichever_limit_comes_first(epochs, steps, total):
    assert TrainConfig(epochs=epochs, steps=steps).total_steps(4) == total


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("train.batchsize=8", ["[train]", "batchsize", "did you mean 'batch_size'"]),
        ("trian.lr=1", ["'trian'", "did you mean 'train'"]),
        ('fleet.simulate=[{name="a", sped=1}]', ["[fleet] simulate[0]", "'speed'"]),
        ("train.lr=fast", ["[train] lr", "float"]),
        ("train.optimizer=adamm", ["[train] optimizer", "adam, adamw, sgd", "'adam"]),
        ('train.optimizer=["adam"]', ["[train] optimizer", "str"]),
        ("train.epochs=0", ["[train] epochs", "1 or more"]),
        ("train.microbatches=5", ["batch_size = 32", "microbatches = 5"]),
        ("train.lr=nan", ["[train] lr", "above 0"]),
        ("train.momentum=1.0", ["[train] momentum"]),
        ("train.seed=-1", ["[train] seed"]),
        ("train.clip_norm=-1", ["[train] clip_norm"]),
        ("train.gradient.pi=vjpp", ["gradient.pi", "'vjp'"]),
        ("train.gradient=[]", ["[train] gradient", "empty"]),
        ("train=3", ["train", "`table`"]),
        ("plan.cuts=relu1", ["[plan] cuts", "`list`"]),
        ('model.path="~no one/x"', ["[model] path", "~no one"]),
        (r'model.path="a\u0000"', ["[model] path", "path in quotes"]),
        ("data.train.x=3", ["data.train.x", "not a table"]),
        ("train.lr", ["section.key=value"]),
        ("model.path=3", ["[model] path", "path in quotes"]),
        ("model.loss=ce", ["[model] loss", "softmax_cross_entropy"]),
        ("model.trainable=[]", ["[model] trainable"]),
        ("data.device=pi", ["device and dataset go together"]),
        ("estimator.quantised=true", ["[estimator] quantised", "noise = 'weights'"]),
        ("estimator.move_lsb=0", ["[estimator] move_lsb", "1 ... 63"]),
        ("plan.stages=many", ["[plan] stages", "'auto'"]),
        ("plan.stages=0", ["[plan] stages"]),
        ("fleet.broker=mqtt://a:b:c", ["[fleet] broker", "mqtt://host:1883"]),
        ("fleet.broker=http://host", ["[fleet] broker"]),
        ("fleet.broker=mqtt://", ["[fleet] broker"]),
        ('fleet.devices=["a", "b", "a"]', ["[fleet] devices", "a twice"]),
        ('fleet.devices=["a/b"]', ["[fleet] devices", "'a/b'"]),
        ('fleet.devices=["coordinator"]', ["coordinator"]),
        ("fleet.devices=0", ["[fleet] devices"]),
        ("fleet.wait_s=0", ["[fleet] wait_s"]),
        ('fleet.simulate=[{name="a"},{name="a"}]', ["[fleet] simulate", "a twice"]),
        ('fleet.simulate=[{name="a", memory="9 pounds"}]', ["'a'", "memory", "512 MB"]),
        ('fleet.simulate=[{name="a", speed=0}]', ["'a'", "speed"]),
        ("fleet.simulate=[{speed=1}]", ["[fleet] simulate[0]", "`name`"]),
    ],
)
def test_a_wrong_value_is_named_with_file_and_key(tmp_path, option, words):
    path = write(tmp_path, SMALLEST)
    with pytest.raises(ConfigError) as caught:
        load(path, [option])
    for word in [str(path), *words]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["train.nesterov=true", "train.momentum=0"], "momentum above 0"),
        (["plan.stages=2", 'plan.cuts=["a", "b"]'], "needs 1 cuts"),
        (["plan.stages=3", 'train.gradient=["vjp"]'], "lists 1 modes"),
        (['fleet.devices=["a", "b"]', "plan.pin.first=c"], "pin.first"),
        (['fleet.devices=["a", "b"]', "train.gradient.c=vjp"], "gradient.c"),
        (['fleet.devices=["a"]', 'fleet.simulate=[{name="b"}]'], "lacks the simulated b"),
        (["fleet.devices=1", 'fleet.simulate=[{name="a"},{name="b"}]'], "fewer"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(tmp_path, options, word):
    with pytest.raises(ConfigError, match=word):
        load(write(tmp_path, SMALLEST), options)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[model", "not a TOML file"),
        ("[data]\ntrain = 'x.npz'\n", "`model`"),
        ("[model]\npath = 'x'\n", "`data`"),
        ("[model]\npath = 'x'\n[data]\n", "train = a file"),
        ("[data]\ntrain = 'x'\n[model]\nloss = 'mse'\n", "`path`"),
        ("train = 1", "train"),
    ],
)
def test_a_file_that_is_not_a_run_file_is_refused(tmp_path, text, word):
    with pytest.raises(ConfigError, match=word):
        load(write(tmp_path, text))


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        load(tmp_path / "none.toml")
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a TOML file"):
        load(path)


def test_a_bad_broker_url_is_not_repeated_as_it_may_hold_a_password(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, SMALLEST), ["fleet.broker=mqqt://me:secret@host"])
    assert "secret" not in str(caught.value)


SCALARS = st.integers(-3, 40) | st.floats() | st.booleans() | st.text(max_size=4)


@given(st.dictionaries(st.sampled_from(TrainConfig.__struct_fields__), SCALARS, max_size=4))
def test_any_table_is_refused_or_a_valid_section(table):
    with contextlib.suppress(ConfigError):
        train = decode(TrainConfig, table, folder=Path())
        assert train.microbatch * train.microbatch_count == train.batch_size
        assert 0 < train.lr < math.inf
        assert train.total_steps(3) > 0


def test_the_words_are_those_the_rest_of_the_library_knows():
    assert set(train_config.OPTIMIZERS) == set(OPTIMIZERS)
    assert set(train_config.LR_SCHEDULES) == set(KINDS)
    assert set(train_config.SCHEDULES) == set(SCHEDULES) - {"forward_only"}
    assert set(train_config.GRADIENTS) == {"auto", *Mode}
    assert set(LOSSES) == set(loss.LOSSES)


@pytest.mark.parametrize(("total", "size"), [(0, 1), (1, 1), (9, 3), (10, 4)])
def test_the_step_schedule_drops_each_third_unless_told(total, size):
    assert TrainConfig().lr_step_size(total) == size
    assert TrainConfig(lr_step=7).lr_step_size(total) == 7


def test_most_tables_of_good_values_are_accepted():
    table = {"steps": 3, "lr": 1, "batch_size": 8, "seed": 4, "schedule": "gpipe"}
    assert decode(TrainConfig, table, folder=Path()).steps == 3


@pytest.mark.parametrize(
    ("text", "size"),
    [(1, 1), ("7", 7), ("1kB", 1000), ("1.5 GiB", 3 << 29), ("2M", 2_000_000)],
)
def test_sizes_are_read_in_decimal_and_binary_units(text, size):
    assert size_bytes("memory", text) == size


@pytest.mark.parametrize("text", [0, -1, "", "0 MB", "lots", "1 XB", "MB", "9" * 400])
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(ConfigError, match="memory"):
        size_bytes("memory", text)


AGENT = """
broker = "mqtt://pi@broker.local"
name = "pi"
threads = 2
memory = "300 MB"
gradient = "hybrid"
password_file = "secret.txt"
[datasets.walks]
train = "walks.npz"
eval = "/data/walks-eval.npz"
"""


def test_an_agent_file_is_read_relative_to_itself(tmp_path):
    path = tmp_path / "agent.toml"
    path.write_text(AGENT)
    (tmp_path / "secret.txt").write_text("pass word\n")
    config = agent_config.load(path, ["threads=3"])
    assert config.threads == 3
    assert config.memory_bytes == 300_000_000
    assert config.datasets["walks"].train == tmp_path / "walks.npz"
    assert config.datasets["walks"].eval == Path("/data/walks-eval.npz")
    assert config.password() == "pass word"


def test_an_agent_needs_no_file():
    config = agent_config.load(None, ["broker=mqtt://host", "name=pi"])
    assert config.memory_bytes is None
    assert config.password() is None
    assert config.datasets == {}


@pytest.mark.parametrize(
    ("option", "word"),
    [
        ("nmae=x", "did you mean 'name'"),
        ("name=a b", "'a b'"),
        ("broker=host", "broker is not a broker's URL"),
        ("threads=0", "threads"),
        ("memory=some", "memory"),
        ("gradient=magic", "gradient"),
        ("datasets.walks.tran=x.npz", r"\[datasets\] walks"),
    ],
)
def test_a_wrong_agent_setting_is_named(option, word):
    with pytest.raises(ConfigError, match=word):
        agent_config.load(None, ["broker=mqtt://host", "name=pi", option])


def test_an_unusable_password_file_is_named(tmp_path):
    options = ["broker=mqtt://host", "name=pi", f"password_file={tmp_path / 'none'}"]
    with pytest.raises(ConfigError, match="none"):
        agent_config.load(None, options).password()
    (tmp_path / "none").write_text("\n")
    with pytest.raises(ConfigError, match="first line is empty"):
        agent_config.load(None, options).password()
