"""Runs whose tensors travel encoded: bytes, repetition, memory and what is planned."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from coordinator.run_folder import MODEL_FILE
from edgetrain.codec_spec import CodecConfig
from edgetrain.config import FleetConfig, RunConfig, parse
from edgetrain.errors import ConfigError, PlanError
from edgetrain.plan import Plan
from edgetrain.plan_config import PlanConfig
from edgetrain.wire.frame import Kind
from tests.plan_task import chain_job, hello, planner, write_chain
from tests.training import IN_ORDER, NAMES, Wire, metrics, same_weights, three, train

CUTS = ("r2", "r5")
TRAIN = {"batch_size": 64, "steps": 4, "lr": 0.01, "microbatches": 2}


def config(folder: Path, **plan: object) -> RunConfig:
    write_chain(folder)
    table = {
        "model": {"path": "chain.onnx"},
        "data": {"train": "train.npz", "eval": "eval.npz"},
        "train": TRAIN,
    }
    wanted = {"cuts": CUTS, "pin": IN_ORDER, **plan}
    return msgspec.structs.replace(
        parse(table, folder=folder),
        plan=PlanConfig(**wanted),
        fleet=FleetConfig(devices=NAMES),
    )


def cut_bytes(wire: Wire, *, evaluation: bool = False) -> int:
    """Of all frames of tensors that crossed cuts."""
    total = 0
    for sent in wire.data():
        address = sent.frame.address
        crossed = sent.source in NAMES and address.kind in (Kind.ACTIVATION, Kind.COTANGENT)
        if crossed and address.evaluation == evaluation:
            total += len(sent.payload)
    return total


def run(folder: Path, codec, name: str = "run", **plan) -> tuple[Wire, Plan, Path]:
    wire, out = Wire(), folder / name
    train(config(folder, codec=codec, **plan), out, three(), wire=wire)
    return wire, Plan.decode((out / "plan.json").read_bytes()), out


@pytest.mark.parametrize(
    ("codec", "most"),
    [("bf16", 0.51), ("int8", 0.27), ("int4", 0.14), ("topk", 0.17), ("topk8:0.1", 0.10)],
)
def test_fewer_bytes_cross_the_cuts_as_planned(tmp_path, codec, most):
    plain, plan, _ = run(tmp_path, "raw")
    wire, encoded_plan, out = run(tmp_path, codec, "encoded")
    assert cut_bytes(wire) <= most * cut_bytes(plain)
    assert cut_bytes(wire, evaluation=True) == cut_bytes(plain, evaluation=True)
    hops, before = encoded_plan.hops, plan.hops
    assert {h.down_codec.split(":")[0] for h in hops} == {codec.split(":")[0]}
    assert {h.down_codec for h in before} == {"raw"}
    predicted = sum(h.down_bytes + h.up_bytes for h in hops) * 2 * TRAIN["steps"]
    assert predicted == pytest.approx(cut_bytes(wire), rel=0.1)
    assert sum(h.down_bytes for h in hops) < most * sum(h.down_bytes for h in before)
    assert metrics(out)[0]["bytes_sent"] > 0


def test_lossless_training_is_the_same_to_the_bit(tmp_path):
    plain, _, one = run(tmp_path, "raw")
    wire, _, two = run(tmp_path, "sparse", "encoded")
    assert cut_bytes(wire) < 0.85 * cut_bytes(plain)  # half of each activation is zero
    assert cut_bytes(wire, evaluation=True) < 0.7 * cut_bytes(plain, evaluation=True)
    assert same_weights(one, two)


@pytest.mark.parametrize("codec", ["int8", "topk8:0.2"])
def test_a_repeated_run_sends_the_same_bytes(tmp_path, codec):
    _, _, one = run(tmp_path, codec, "one")
    _, _, two = run(tmp_path, codec, "two")
    assert same_weights(one, two)


def test_each_cut_and_direction_has_its_own(tmp_path):
    codecs = ("bf16", CodecConfig("raw", "topk:0.2"))
    _, plan, out = run(tmp_path, codecs)
    found = [(hop.down_codec, hop.up_codec) for hop in plan.hops]
    assert found == [("bf16", "bf16"), ("raw", "topk:0.2")]
    assert (out / MODEL_FILE).exists()


def test_adaptive_runs_send_less_when_steps_are_late(tmp_path):
    wire, _, _ = run(tmp_path, "adaptive", target_step_s=1e-6)
    codecs = [
        (s.frame.address.step, s.frame.codec)
        for s in wire.data()
        if s.source == "one" and s.frame.address.kind is Kind.ACTIVATION
        if not s.frame.address.evaluation
    ]
    assert codecs[0] == (0, 0)
    assert codecs[-1] == (3, 1)  # after two late steps


def test_residuals_count_as_memory(tmp_path):
    hellos = [hello(name) for name in NAMES]
    wanted = {"cuts": list(CUTS)}
    plain = planner(chain_job(tmp_path, plan=wanted), *hellos).assign()
    job = chain_job(tmp_path, plan={**wanted, "codec": "topk"})
    kept = np.subtract(planner(job, *hellos).assign().memory_bytes, plain.memory_bytes)
    assert kept.tolist() == [0, plain.cuts[0].nbytes, plain.cuts[1].nbytes]


@pytest.mark.parametrize(("link", "codec"), [("10 Mbit/s", "bf16"), ("100 Gbit/s", "raw")])
def test_auto_goes_by_the_link(tmp_path, link, codec):
    fleet = {"simulate": [{"name": name, "link": link} for name in NAMES[:2]]}
    plan = {"codec": "auto", "stages": 2}
    job = chain_job(tmp_path, plan=plan, fleet=fleet)
    found = planner(job, *(hello(name) for name in NAMES[:2])).assign()
    (codecs,) = found.codecs
    assert {str(codecs.activations), str(codecs.cotangents)} == {codec}


def test_a_slow_link_makes_a_shorter_step_encoded(tmp_path):
    fleet = {"simulate": [{"name": name, "link": "10 Mbit/s"} for name in NAMES[:2]]}
    times = []
    for codec in ("raw", "bf16", "int8"):
        plan = {"codec": codec, "stages": 2}
        job = chain_job(tmp_path, plan=plan, fleet=fleet)
        asked = planner(job, *(hello(name) for name in NAMES[:2]))
        times.append(asked.assign().step_s)
    assert times[0] > 1.1 * times[1] > 1.1 * times[2]


def test_nothing_is_encoded_that_does_not_leave_a_device(tmp_path):
    plan = {"codec": "int8", "stages": 3, "pin": {"first": "one", "last": "one"}}
    job = chain_job(tmp_path, plan=plan)
    found = planner(job, *(hello(name) for name in NAMES[:2])).assign()
    names = [
        "raw" if near == far else "int8"
        for near, far in zip(found.devices, found.devices[1:], strict=False)
    ]
    assert [str(codecs.activations) for codecs in found.codecs] == names


@pytest.mark.parametrize("mode", ["forward_gradient", "spsa"])
def test_differences_of_the_loss_are_not_encoded_with_loss(tmp_path, mode):
    fleet = {"simulate": [{"name": name, "link": "10 Mbit/s"} for name in NAMES[:2]]}
    hellos = [hello(name) for name in NAMES[:2]]

    def asked(codec):
        job = chain_job(
            tmp_path,
            plan={"codec": codec, "stages": 2},
            fleet=fleet,
            train={"gradient": mode},
        )
        return planner(job, *hellos)

    with pytest.raises(PlanError, match="does not go with"):
        asked("int8").assign()
    for codec, found in (("sparse", "sparse"), ("auto", "raw")):
        assert str(asked(codec).assign().codecs[0].activations) == found


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        ({"codec": "zip"}, "codec 'zip' is not one of"),
        ({"codec": "topk:3"}, "above 0 and up to 1"),
        ({"codec": {"activation": "int8"}}, "unknown key 'activation'"),
        ({"codec": {"cotangents": "int9"}}, "int9"),
        ({"codec": ["int8", "raw"], "cuts": ["r2"]}, "one for each cut"),
        ({"codec": ["int8", "raw"]}, "one for each cut"),
        ({"codec": "adaptive"}, "needs target_step_s"),
    ],
)
def test_what_cannot_be_kept_is_refused(tmp_path, plan, what):
    table = {"model": {"path": "m"}, "data": {"train": "t"}, "plan": plan}
    with pytest.raises(ConfigError, match=what):
        parse(table, folder=tmp_path)
