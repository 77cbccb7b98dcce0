"""Activation memory of a stage: predicted by the compiler, seen by the engine, counted."""

from __future__ import annotations

from functools import cache

import msgspec
import numpy as np
import onnx
import pytest

from edgetrain.bundle import Bundle
from edgetrain.compiler.cut import CutFinder
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.stage import Recipe, compile_stages
from edgetrain.compiler.stash import Keep
from edgetrain.compiler.trainable import select_trainable
from edgetrain.config import DataConfig, FleetConfig, ModelConfig, PlanConfig, RunConfig
from edgetrain.errors import EngineError
from edgetrain.estimator_spec import EstimatorSpec
from edgetrain.manifest import FastPath, GraphName, GraphSpec, Mode, Port, Role
from edgetrain.runtime.activation import Meter, MeteredEngine, measured
from edgetrain.runtime.activation_forecast import activation_bytes
from edgetrain.runtime.engines.profile import seen
from edgetrain.runtime.estimators.base import Tick
from edgetrain.runtime.stage import Stage
from edgetrain.sim.device import SlowedEngine
from edgetrain.train_config import TrainConfig
from tests.cut_models import BATCH as SMALL_BATCH
from tests.cut_models import MODELS, OUTPUT, program, samples
from tests.small_models import conv_chain, normal
from tests.stage_runs import ENGINE, OPTIMIZER, finder, stages_of
from tests.traced import TracedMeter
from tests.training import NAMES as DEVICES
from tests.training import train

LAYERS, CHANNELS, SIZE, BATCH, TAPS = 12, 8, 16, 32, 9
ACTIVATION = 4 * BATCH * CHANNELS * SIZE * SIZE  # bytes of any layer's output
NAMES = sorted(MODELS)


@cache
def chain(keep: Keep = Keep.LEAST, cut: str = "") -> list[Bundle]:
    made = normalise(conv_chain(LAYERS, CHANNELS, SIZE), batch=BATCH)
    trainable = select_trainable(made, "all")
    cuts = [CutFinder(made, trainable).named(cut)] if cut else []
    modes = (Mode.VJP,) * (len(cuts) + 1)
    recipe = Recipe(trainable, "softmax_cross_entropy", modes, keep=keep)
    return compile_stages(made, cuts, recipe)


def feeds(seed: int = 0) -> dict[str, np.ndarray]:
    labels = np.random.default_rng(seed).integers(0, 5, BATCH)
    return {"x": normal(BATCH, 3, SIZE, SIZE, seed=seed), "labels": labels}


def peak_of(bundles: list[Bundle], microbatches: int = 1) -> list[int]:
    """What each stage counts in a pass, all forwards before all backwards."""
    stages = stages_of(bundles)
    for stage in stages:
        stage.parameters.begin_step()
        stage.take_activation_peak()
    for m in range(microbatches):
        values = {"x": feeds()["x"]}
        for stage in stages:
            values = dict(stage.forward(Tick(0, m), values))
    for m in range(microbatches):
        arriving = {"labels": feeds()["labels"]}
        for stage in reversed(stages):
            arriving = stage.backward(Tick(0, m), arriving).cotangents
    return [stage.take_activation_peak() for stage in stages]


def test_backprop_of_a_chain_takes_what_a_count_by_hand_says():
    """The peak is at the gradient of the last convolution's weight, before any stash goes.

    By then there are the outputs of all layers but the last, whose Relu is done with; the
    cotangent of the last convolution, and that transposed; the image shifted to each tap;
    and these side by side as one matrix.
    """
    by_hand = (LAYERS - 1 + 1 + 1 + TAPS + TAPS) * ACTIVATION
    (bundle,) = chain()
    given = feeds()["x"].nbytes + feeds()["labels"].nbytes
    assert activation_bytes(bundle.manifest, 1) == pytest.approx(by_hand + given, rel=0.01)
    assert peak_of([bundle])[0] == activation_bytes(bundle.manifest, 1)


def test_the_forward_of_a_chain_takes_two_layers():
    (bundle,) = chain()
    assert bundle.manifest.graphs[GraphName.EVALUATE].peak_bytes == 2 * ACTIVATION


@pytest.mark.parametrize("keep", Keep)
@pytest.mark.parametrize("cut", ["", "r5"])
def test_the_engine_takes_no_more_than_predicted_and_hardly_less(cut, keep):
    """It does a Relu in place, and merges one that nobody else reads into the Conv."""
    for bundle in chain(keep, cut):
        for name, spec in bundle.manifest.graphs.items():
            found = ENGINE.measure(bundle.graphs[name], spec)
            assert found == ENGINE.measure(bundle.graphs[name], spec)
            assert 0.85 * spec.peak_bytes <= found.tensor_bytes <= spec.peak_bytes
            assert found.tensor_bytes <= found.engine_bytes


@pytest.mark.parametrize("batch_statistics", [True, False])
def test_no_gradient_waits_for_all_cotangents(batch_statistics):
    """Those of scale and bias end in a Reshape of a Reshape, which must stay two."""
    made = normalise(conv_chain(norm=True), batch=4)
    recipe = Recipe(
        select_trainable(made, "all"),
        "softmax_cross_entropy",
        (Mode.VJP,),
        batch_statistics=batch_statistics,
    )
    (bundle,) = compile_stages(made, [], recipe)
    spec = bundle.manifest.graphs[GraphName.LOSS]
    found = ENGINE.measure(bundle.graphs[GraphName.LOSS], spec)
    assert found.tensor_bytes <= spec.peak_bytes


@pytest.mark.parametrize("name", NAMES)
def test_no_gradient_ends_in_what_the_engine_exchanges(name):
    """It puts a Transpose after a Reshape in place of a Reshape after a Transpose."""
    for bundle in compiled(name, 0, Keep.LEAST):
        for graph, spec in bundle.manifest.graphs.items():
            nodes = onnx.load_from_string(bundle.graphs[graph]).graph.node
            makers = {out: node for node in nodes for out in node.output}
            for port in spec.ports(Role.GRADIENT):
                end = makers[port.name]
                before = makers.get(end.input[0])
                assert not (
                    end.op_type == "Reshape" and before and before.op_type == "Transpose"
                )


@cache
def compiled(name: str, position: int, keep: Keep) -> list[Bundle]:
    recipe = Recipe(
        select_trainable(program(name), "all"),
        "softmax_cross_entropy",
        (Mode.VJP, Mode.VJP),
        output=OUTPUT.get(name, ""),
        keep=keep,
    )
    return compile_stages(program(name), [finder(name).valid()[position]], recipe)


@pytest.mark.parametrize("keep", Keep)
@pytest.mark.parametrize("name", NAMES)
def test_the_engine_never_takes_more_than_predicted(name, keep):
    for position in range(len(finder(name).valid())):
        for bundle in compiled(name, position, keep):
            for graph, spec in bundle.manifest.graphs.items():
                found = ENGINE.measure(bundle.graphs[graph], spec)
                assert found.tensor_bytes <= spec.peak_bytes


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("cut", ["", "r5"])
def test_a_stage_counts_no_more_than_predicted(cut, microbatches):
    for keep in Keep:
        bundles = chain(keep, cut)
        seen_bundles = [measured(bundle, ENGINE) for bundle in bundles]
        predicted = [activation_bytes(b.manifest, microbatches) for b in bundles]
        counted, seen_bytes = (peak_of(b, microbatches) for b in (bundles, seen_bundles))
        for most, count, least in zip(predicted, counted, seen_bytes, strict=True):
            assert 0.8 * most <= least <= count <= most


def test_keeping_less_takes_less_once_microbatches_are_in_flight():
    peaks = [peak_of(chain(keep, "r5"), 4)[0] for keep in Keep]
    assert peaks[0] >= peaks[1] > peaks[2]
    stash = [chain(keep, "r5")[0].manifest.stash_bytes for keep in Keep]
    ahead = [activation_bytes(chain(keep, "r5")[0].manifest, 4) for keep in Keep]
    assert ahead[1] - ahead[2] >= 2 * (stash[1] - stash[2])


ESTIMATORS = [
    (Mode.VJP, EstimatorSpec()),
    (Mode.HYBRID, EstimatorSpec()),
    (Mode.HYBRID, EstimatorSpec(tangents=1, control_variate=False)),
    (Mode.HYBRID, EstimatorSpec(form="forward")),
    (Mode.HYBRID, EstimatorSpec(noise="weights")),
]


@pytest.mark.parametrize("cut", ["", "r1"])
@pytest.mark.parametrize(("mode", "estimator"), ESTIMATORS)
def test_what_is_counted_is_what_is_allocated(mode, estimator, cut):
    """By the books of Python's allocator, which numpy's moments are in as well."""
    made = normalise(conv_chain(4), batch=BATCH)
    trainable = select_trainable(made, "all")
    cuts = [CutFinder(made, trainable).named(cut)] if cut else []
    modes = (mode,) * (len(cuts) + 1)
    recipe = Recipe(trainable, "softmax_cross_entropy", modes, estimator=estimator)
    bundles = compile_stages(made, cuts, recipe)
    values, arriving = {"x": feeds()["x"]}, {"labels": feeds()["labels"]}
    given = sum(array.nbytes for array in (*values.values(), *arriving.values()))
    meter = TracedMeter()
    engine = MeteredEngine(ENGINE, meter)
    stages = [Stage(b, engine, OPTIMIZER, microbatches=1, seed=0) for b in bundles]
    with meter:
        for stage in stages:
            stage.parameters.begin_step()
            values = dict(stage.forward(Tick(0, 0), values))
        for stage in reversed(stages):
            arriving = stage.backward(Tick(0, 0), arriving).cotangents
    counted = [stage.take_activation_peak() for stage in stages]
    predicted = [activation_bytes(bundle.manifest, 1) for bundle in bundles]
    assert all(c <= p for c, p in zip(counted, predicted, strict=True))
    allocated = meter.take_peak() + given
    assert 0.75 * allocated <= sum(counted)
    if not cut:
        assert max(counted) <= allocated <= 1.1 * max(predicted) + 0.5 * ACTIVATION


def test_a_fast_path_that_takes_more_is_what_counts():
    lean, full = (chain(keep, "r5")[0].manifest for keep in (Keep.INPUTS, Keep.ALL))
    both = msgspec.structs.replace(lean, fast=FastPath(8, full.graphs))
    assert activation_bytes(both, 4) == activation_bytes(full, 4)


def test_a_meter_counts_memory_once_and_only_while_it_is_held():
    meter = Meter()
    a, b = np.zeros((4, 8), np.float32), np.zeros(2, np.float32)
    meter.note([a, a.reshape(8, 4), b, b])
    assert meter.live_bytes == a.nbytes + b.nbytes
    meter.work(100)
    kept = a.reshape(-1)
    size = a.nbytes
    del a, b
    assert meter.live_bytes == size
    del kept
    assert meter.live_bytes == 0
    assert meter.take_peak() == size + 8 + 100
    assert meter.take_peak() == 0


def test_a_part_of_a_larger_array_counts_by_itself():
    """Samples of a microbatch are a view of the whole data set."""
    meter, data = Meter(), np.zeros((100, 4), np.float32)
    meter.note([data[:5]])
    assert meter.live_bytes == 0, "nobody kept it"
    part = data[5:10]
    meter.note([part])
    assert meter.live_bytes == part.nbytes


def test_what_an_engine_cannot_tell_stays_as_predicted():
    bundle = chain()[0]

    class Silent:
        name = "silent"
        load = ENGINE.load

    for engine in (Silent(), SlowedEngine(Silent(), lambda: 0.5)):
        assert measured(bundle, engine).manifest == bundle.manifest
    slowed = measured(bundle, SlowedEngine(ENGINE, lambda: 0.5, sleep=lambda _: None))
    assert slowed.manifest == measured(bundle, ENGINE).manifest
    before, after = (b.manifest.graphs[GraphName.LOSS] for b in (bundle, slowed))
    assert after.peak_bytes == before.peak_bytes - ACTIVATION, "nothing is transposed"


def test_a_graph_that_does_not_load_cannot_be_seen():
    port = Port("x", Role.ACTIVATION, "x", "float32", (1,))
    assert ENGINE.measure(b"no graph", GraphSpec((port,), (port,), "")) is None
    with pytest.raises(EngineError):
        ENGINE.load(b"no graph", GraphSpec((port,), (port,), ""), {})


@pytest.mark.parametrize("profile", [b"", b"[]", b"{}", b'[{"cat": "Node", "args": {}}]'])
def test_a_profile_of_a_release_that_does_not_count_says_nothing(profile):
    assert seen(profile) is None


def test_a_run_reports_activations_beside_what_was_predicted(tmp_path):
    """Over agents, several microbatches in flight, on a model that is cut in three."""
    onnx.save(MODELS["residual"](), tmp_path / "model.onnx")
    batch = 4 * SMALL_BATCH
    np.savez(tmp_path / "data.npz", **samples("residual", batch=2 * batch))
    config = RunConfig(
        ModelConfig(tmp_path / "model.onnx"),
        DataConfig(tmp_path / "data.npz"),
        TrainConfig(steps=3, batch_size=batch, lr=0.05, schedule="gpipe"),
        PlanConfig(cuts=("r0", "f")),
        FleetConfig(devices=DEVICES, step_timeout_s=20.0),
    )
    outcome = train(config, tmp_path / "out")
    for row in outcome.rows:
        predicted = row.predicted_activation_bytes
        assert 0.3 * predicted <= row.measured_activation_bytes <= predicted
    page = (outcome.model.parent / "report.html").read_text()
    assert "activations (predicted)" in page


FORWARD = EstimatorSpec(1, form="forward", control_variate=False)
PUSHED = EstimatorSpec(1, control_variate=False)


@pytest.mark.parametrize(
    ("channels", "mode", "estimator"),
    [
        (8, Mode.LOCAL, PUSHED),
        (8, Mode.FORWARD_GRADIENT, PUSHED),
        *(
            (channels, mode, FORWARD)
            for channels in (8, 32)
            for mode in (Mode.LOCAL, Mode.FORWARD_GRADIENT, Mode.SPSA)
        ),
    ],
)
def test_without_a_backward_a_chain_takes_less_than_half(channels, mode, estimator):
    """At most 0.4 of backprop's. With 32 channels, exact tangents take 0.45."""
    made = normalise(conv_chain(LAYERS, channels, SIZE), batch=BATCH)
    trainable = select_trainable(made, "all")
    cuts = [CutFinder(made, trainable).valid()[-1]]
    last = Mode.VJP if mode is Mode.LOCAL else mode
    peaks = []
    for modes in ((Mode.VJP, Mode.VJP), (mode, last)):
        recipe = Recipe(trainable, "softmax_cross_entropy", modes, estimator=estimator)
        peaks.append(first_peak(compile_stages(made, cuts, recipe)))
    assert peaks[1] <= 0.4 * peaks[0]


def first_peak(bundles: list[Bundle]) -> int:
    """What the first stage counts in a step of one microbatch."""
    stages = stages_of(bundles)
    values, labels = {"x": feeds()["x"]}, {"labels": feeds()["labels"]}
    for stage in stages:
        stage.parameters.begin_step()
        stage.take_activation_peak()
        values = dict(stage.forward(Tick(0, 0), values))
    arriving: dict[str, np.ndarray] = {}
    for stage in reversed(stages):
        given = {**arriving, **labels} if stage.manifest.labels else arriving
        arriving = dict(stage.backward(Tick(0, 0), given).cotangents)
    return stages[0].take_activation_peak()
