"""What is stashed decides how much memory a stage takes, and no bit of what it computes."""

from __future__ import annotations

import itertools
from functools import cache

import msgspec
import numpy as np
import onnx
import pytest

from coordinator.session import Outcome
from edgetrain.bundle import Bundle
from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.forecast import stash_forecast
from edgetrain.compiler.stage import Recipe, compile_stages
from edgetrain.compiler.stash import CHEAP, PRICE, VIEWS, Halves, Keep, divide
from edgetrain.compiler.trainable import select_trainable
from edgetrain.config import DataConfig, FleetConfig, ModelConfig, PlanConfig, RunConfig
from edgetrain.manifest import FastPath, GraphName, Mode, Role
from edgetrain.runtime.estimators.base import Tick
from edgetrain.runtime.memory_forecast import required_bytes
from edgetrain.tensors import TensorSpec
from edgetrain.train_config import TrainConfig
from tests.cut_models import MODELS, OUTPUT, program, samples
from tests.stage_runs import OPTIMIZER, finder, stages_of, train_pass
from tests.training import NAMES as DEVICES
from tests.training import same_weights, train

NAMES = sorted(MODELS)


@cache
def compiled(name: str, position: int, keep: Keep) -> tuple[Bundle, ...]:
    """Two stages of a model, cut at one of its valid cuts."""
    cut = finder(name).valid()[position]
    recipe = Recipe(
        trainable=select_trainable(program(name), "all"),
        loss="softmax_cross_entropy",
        modes=(Mode.VJP, Mode.VJP),
        output=OUTPUT.get(name, ""),
        keep=keep,
    )
    return tuple(compile_stages(program(name), [cut], recipe))


def cases(keeps=(Keep.LEAST, Keep.INPUTS)):
    places = [(name, p) for name in NAMES for p in range(len(finder(name).valid()))]
    return [(*place, keep) for place in places for keep in keeps]


def trained(bundles, steps: int = 3) -> list[np.ndarray]:
    stages = stages_of(bundles)
    name = next(n for n in NAMES if bundles[0].manifest.receives == program(n).inputs)
    for step in range(steps):
        train_pass(stages, samples(name, seed=step), Tick(step, 0))
        for stage in stages:
            stage.update(step)
    return [stage.parameters.weights for stage in stages]


@pytest.mark.parametrize(("name", "position", "keep"), cases())
def test_what_is_stashed_changes_no_bit(name, position, keep):
    """Of gradients, cotangents and losses."""
    feeds = samples(name)
    expected = train_pass(stages_of(compiled(name, position, Keep.ALL)), feeds)
    found = train_pass(stages_of(compiled(name, position, keep)), feeds)
    assert np.array_equal(found.losses, expected.losses)
    assert found.gradients.keys() == expected.gradients.keys()
    for weight, gradient in expected.gradients.items():
        assert np.array_equal(found.gradients[weight], gradient), weight
    for ours, theirs in zip(found.cotangents, expected.cotangents, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[n], value) for n, value in theirs.items())


@pytest.mark.parametrize("keep", [Keep.LEAST, Keep.INPUTS])
@pytest.mark.parametrize("name", ["encoder", "residual"])
def test_training_ends_with_the_same_bits(name, keep):
    """Running statistics included: they move once a microbatch, not twice."""
    expected = trained(compiled(name, -1, Keep.ALL))
    for found, weights in zip(trained(compiled(name, -1, keep)), expected, strict=True):
        assert np.array_equal(found, weights)


@pytest.mark.parametrize(("name", "position", "keep"), cases(tuple(Keep)))
def test_the_manifest_predicts_the_stash_to_the_byte(name, position, keep):
    bundles = compiled(name, position, keep)
    done = train_pass(stages_of(bundles), samples(name))
    assert [bundle.manifest.stash_bytes for bundle in bundles] == done.stash_bytes


@pytest.mark.parametrize("mode", [Mode.HYBRID, Mode.LOCAL, Mode.LOCAL_VJP])
def test_the_manifest_predicts_the_stash_of_other_modes_too(mode):
    recipe = Recipe(
        select_trainable(program("deep"), "all"),
        "softmax_cross_entropy",
        (mode, mode),
    )
    bundles = compile_stages(program("deep"), [finder("deep").named("t2")], recipe)
    done = train_pass(stages_of(bundles), samples("deep"))
    assert [bundle.manifest.stash_bytes for bundle in bundles] == done.stash_bytes


@pytest.mark.parametrize("name", NAMES)
def test_each_way_to_keep_takes_less_than_the_one_before(name):
    for position in range(len(finder(name).valid())):
        kept = [compiled(name, position, k)[0].manifest.stash_bytes for k in Keep]
        assert kept[0] >= kept[1] >= kept[2]
    assert kept[0] > kept[2]
    if name in ("chain", "encoder", "mobile", "residual"):
        assert kept[0] > kept[1] > kept[2]


@pytest.mark.parametrize("name", NAMES)
def test_recomputing_keeps_what_was_received_and_the_batchs_statistics(name):
    manifest = compiled(name, -1, Keep.INPUTS)[0].manifest
    spec = manifest.graphs[GraphName.BACKWARD]
    received = {s.name for s in manifest.receives}
    statistics = {p.name for p in manifest.graphs["forward"].ports(Role.STATISTIC)}
    kept = {p.name for p in spec.inputs if p.role in (Role.ACTIVATION, Role.STASH)}
    assert kept <= received | statistics


def computed_again(bundle: Bundle) -> dict[str, str]:
    """The values that both graphs of a stage make, and the kind of node of the forward."""
    forward, backward = (
        onnx.load_from_string(bundle.graphs[name]).graph.node
        for name in (GraphName.FORWARD, GraphName.BACKWARD)
    )
    made = {out for node in backward for out in node.output}
    return {o: node.op_type for node in forward for o in node.output if o in made}


@pytest.mark.parametrize(("name", "position", "keep"), cases())
def test_only_passes_over_memory_run_twice_and_statistics_never(name, position, keep):
    bundle = compiled(name, position, keep)[0]
    again = computed_again(bundle)
    statistics = bundle.manifest.graphs[GraphName.FORWARD].ports(Role.STATISTIC)
    assert again.keys().isdisjoint(port.name for port in statistics)
    if keep is Keep.LEAST:
        assert CHEAP | {"BatchNormalization"} >= set(again.values())


def test_recomputing_runs_convolutions_again():
    assert "Conv" in computed_again(compiled("chain", -1, Keep.INPUTS)[0]).values()


def test_a_device_asks_for_the_larger_stash_of_its_two_paths():
    lean, full = (compiled("chain", -1, k)[0].manifest for k in (Keep.LEAST, Keep.ALL))
    both = msgspec.structs.replace(lean, fast=FastPath(8, full.graphs))
    crossing = sum(spec.nbytes for spec in (*lean.receives, *lean.sends))
    for manifest, larger in ((lean, lean), (both, full)):
        one, two = (required_bytes(manifest, OPTIMIZER, count) for count in (1, 2))
        assert two - one == larger.stash_bytes + crossing


@pytest.mark.parametrize("keep", list(Keep))
@pytest.mark.parametrize("name", NAMES)
def test_the_forecast_is_an_upper_bound_for_any_stage(name, keep):
    found, layers = finder(name), finder(name).layers()
    stretches = [found.nodes[layer.start : layer.stop] for layer in layers]
    trainable = select_trainable(program(name), "all")
    sizes = stash_forecast(program(name), trainable, stretches, keep)
    for position in range(len(found.valid())):
        first, last = (b.manifest.stash_bytes for b in compiled(name, position, keep))
        assert first <= sum(sizes[: position + 1])
        assert last > 0
    assert compiled(name, 0, keep)[0].manifest.stash_bytes >= 0.4 * sizes[0]


def test_the_forecast_counts_nothing_before_the_first_weight_that_trains():
    found = finder("deep", "last:1")
    stretches = [found.nodes[layer.start : layer.stop] for layer in found.layers()]
    trainable = select_trainable(program("deep"), "last:1")
    sizes = stash_forecast(program("deep"), trainable, stretches)
    assert not any(sizes[:-1])
    assert sizes[-1] > 0


def elementwise(rng: np.random.Generator) -> tuple[GraphBuilder, Halves, list[str]]:
    """A small graph of products and passes over memory, and a backward that reads some."""
    sizes = {"x": int(rng.integers(1, 50)) * 8}
    nodes = []
    for number in range(int(rng.integers(3, 7))):
        name = f"v{number}"
        count = int(rng.integers(1, 3))
        reads = rng.choice(list(sizes), size=min(count, len(sizes)), replace=False)
        kind = rng.choice(["Add", "Relu", "MatMul", "Reshape", "Concat"])
        nodes.append(Node(str(kind), name, tuple(map(str, reads)), (name,)))
        sizes[name] = int(rng.integers(1, 50)) * 8
    specs = {n: TensorSpec(n, "float32", (s,)) for n, s in {**sizes, "dy": 1}.items()}
    wanted = [str(n) for n in rng.choice(list(sizes), size=2, replace=False)]
    late = [Node("Mul", f"g{name}", (name, "dy"), (f"g{name}",)) for name in wanted]
    return GraphBuilder(specs, {}), Halves(nodes, late), wanted


def price_of(g: GraphBuilder, nodes: list[Node], kept: frozenset[str], wanted) -> float:
    """Bytes stashed, and the price of all that must be computed again; or infinity."""
    makers = {node.output: node for node in nodes}
    again, open_names = set(), [name for name in wanted if name not in kept]
    while open_names:
        name = open_names.pop()
        if name not in makers or makers[name].op_type not in CHEAP:
            return float("inf")
        again.add(name)
        open_names += [n for n in makers[name].inputs if n not in kept and n not in again]
    paid = (n for n in again if makers[n].op_type not in VIEWS)
    return sum(g.spec(n).nbytes for n in kept) + sum(PRICE * g.spec(n).nbytes for n in paid)


@pytest.mark.parametrize("seed", range(60))
def test_no_other_stash_costs_less(seed):
    g, halves, wanted = elementwise(np.random.default_rng(seed))
    found = divide(g, halves, {"dy"}, (), Keep.LEAST)
    made = {name for node in found.backward for name in node.outputs}
    kept = frozenset(n for node in found.backward for n in node.reads) - made - {"dy"}
    names = ["x", *(node.output for node in halves.forward)]
    costs = [
        price_of(g, halves.forward, frozenset(chosen), wanted)
        for count in range(len(names) + 1)
        for chosen in itertools.combinations(names, count)
    ]
    assert price_of(g, halves.forward, kept, wanted) == min(costs)


def test_a_mask_is_stashed_in_place_of_four_times_its_bytes():
    """`r1` is a Relu before a pooling: only where it is positive matters, not how much."""
    ports = compiled("chain", -1, Keep.LEAST)[0].manifest.graphs["backward"].inputs
    stash = {p.name: p for p in ports if p.role is Role.STASH}
    assert "r1" not in stash
    assert any(port.dtype == "bool" for port in stash.values())
    everything = compiled("chain", -1, Keep.ALL)[0].manifest.graphs["backward"].inputs
    assert "r1" in {p.name for p in everything}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    onnx.save(MODELS["residual"](), path / "model.onnx")
    np.savez(path / "data.npz", **samples("residual", batch=32))
    return path


CUTS = ("r0", "f")  # of "residual", whichever device is faster today


def trained_by_agents(folder, *, recompute: bool) -> Outcome:
    """On three devices, with BatchNormalization and several microbatches in flight."""
    config = RunConfig(
        ModelConfig(folder / "model.onnx"),
        DataConfig(folder / "data.npz"),
        TrainConfig(steps=4, batch_size=16, lr=0.05, schedule="gpipe"),
        PlanConfig(recompute=recompute, cuts=CUTS),
        FleetConfig(devices=DEVICES, step_timeout_s=20.0),
    )
    return train(config, folder / f"out-{recompute}")


def test_a_run_that_recomputes_needs_less_and_ends_with_the_same_weights(folder):
    plain, lean = (trained_by_agents(folder, recompute=r) for r in (False, True))
    assert same_weights(plain.model.parent, lean.model.parent)
    for before, after in zip(plain.rows[:-1], lean.rows[:-1], strict=True):
        assert 0 < after.measured_memory_bytes < before.measured_memory_bytes
        assert after.predicted_memory_bytes < before.predicted_memory_bytes
    for row in (*plain.rows, *lean.rows):
        assert row.measured_memory_bytes <= row.predicted_memory_bytes
