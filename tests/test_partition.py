"""The planner's search against brute force, and what it says when nothing fits."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from edgetrain.errors import PlanError
from edgetrain.planner.partition import (
    EXACT_DEVICES,
    Device,
    Layer,
    best_order,
    partition,
)

ROOMY = 10**12


def random_instance(seed, max_devices=4):
    rng = np.random.default_rng(seed)
    devices = int(rng.integers(1, max_devices + 1))
    count = int(rng.integers(devices, 10))
    layers = [
        Layer(
            forward_s=float(rng.uniform(0.1, 2.0)),
            backward_s=float(rng.uniform(0.1, 4.0)),
            memory_bytes=int(rng.integers(1, 100)),
            output_bytes=int(rng.integers(1, 1000)),
            stash_bytes=int(rng.integers(0, 40)),
        )
        for _ in range(count)
    ]
    fleet = [
        Device(
            f"d{index}",
            speed=float(rng.uniform(0.2, 3.0)),
            memory_bytes=int(rng.integers(100, 700)),
            link_bytes_per_s=float(rng.choice([50.0, 500.0, math.inf])),
        )
        for index in range(devices)
    ]
    in_flight = [int(n) for n in rng.integers(0, 4, devices)]
    return layers, fleet, in_flight


def stage_cost(layers, stage, device, in_flight):
    """The definition, layer by layer; None when the memory is overfilled."""
    mine = [layers[i] for i in stage]
    if sum(x.memory_bytes + in_flight * x.stash_bytes for x in mine) > device.memory_bytes:
        return None
    compute_s = sum(x.forward_s + x.backward_s for x in mine) / device.speed
    sent_bytes = 0
    if stage.stop < len(layers):
        sent_bytes += mine[-1].output_bytes
    if stage.start > 0:
        sent_bytes += layers[stage.start - 1].output_bytes
    return max(compute_s, sent_bytes / device.link_bytes_per_s)


def cuts(layers, devices):
    for inner in itertools.combinations(range(1, layers), devices - 1):
        edges = (0, *inner, layers)
        yield tuple(range(a, b) for a, b in itertools.pairwise(edges))


def brute_force(layers, devices, in_flight):
    """Least (bottleneck, total) over all cuts, or None."""
    found = []
    for stages in cuts(len(layers), len(devices)):
        costs = [
            stage_cost(layers, *work)
            for work in zip(stages, devices, in_flight, strict=True)
        ]
        if None not in costs:
            found.append((max(costs), sum(costs)))
    if not found:
        return None
    bottleneck_s = min(found)[0]
    near = [total for worst, total in found if worst <= bottleneck_s * (1 + 1e-12)]
    return bottleneck_s, min(near)


def criteria(layers, devices, in_flight, stages):
    costs = [
        stage_cost(layers, *work) for work in zip(stages, devices, in_flight, strict=True)
    ]
    assert None not in costs
    return max(costs), sum(costs)


def test_partition_equals_brute_force():
    impossible = 0
    for seed in range(100):
        layers, devices, in_flight = random_instance(seed)
        expected = brute_force(layers, devices, in_flight)
        if expected is None:
            impossible += 1
            with pytest.raises(PlanError, match="short by"):
                partition(layers, devices, in_flight)
            continue
        stages = partition(layers, devices, in_flight)
        assert [i for stage in stages for i in stage] == list(range(len(layers)))
        assert all(len(stage) > 0 for stage in stages)
        assert criteria(layers, devices, in_flight, stages) == pytest.approx(expected)
    assert 5 < impossible < 60  # both outcomes were put to the test


@pytest.mark.parametrize(("first", "last"), [(None, None), ("d0", None), ("d0", "d1")])
def test_best_order_equals_brute_force_over_all_orders(first, last):
    compared = 0
    for seed in range(100, 200):
        layers, devices, in_flight = random_instance(seed)
        if len(devices) < 2:
            continue
        orders = [
            order
            for order in itertools.permutations(devices)
            if first in (None, order[0].name) and last in (None, order[-1].name)
        ]
        found = [brute_force(layers, order, in_flight) for order in orders]
        if not any(found):
            with pytest.raises(PlanError, match="short by"):
                best_order(layers, devices, first, last, in_flight)
            continue
        bottleneck_s = min(f[0] for f in found if f)
        total_s = min(f[1] for f in found if f and f[0] <= bottleneck_s * (1 + 1e-12))
        placement = best_order(layers, devices, first, last, in_flight)
        assert placement.devices in orders
        assert placement.bottleneck_s == pytest.approx(bottleneck_s)
        assert criteria(
            layers, placement.devices, in_flight, placement.stages
        ) == pytest.approx((bottleneck_s, total_s))
        compared += 1
    assert compared > 30


def test_many_devices_are_ordered_fastest_first_between_the_pins():
    count = EXACT_DEVICES + 2
    devices = [Device(f"d{i}", 1.0 + i, ROOMY, math.inf) for i in range(count)]
    layers = [Layer(1.0, 2.0, 1, 1) for _ in range(3 * count)]
    names = [d.name for d in best_order(layers, devices, "d2", "d5").devices]
    free = [f"d{i}" for i in reversed(range(count)) if i not in (2, 5)]
    assert names == ["d2", *free, "d5"]
    unpinned = [d.name for d in best_order(layers, devices).devices]
    assert unpinned == [f"d{i}" for i in reversed(range(count))]


def test_a_slow_link_moves_the_cut_to_the_thin_place():
    layers = [Layer(1.0, 1.0, 1, size) for size in (800, 800, 8, 800)]
    fast = [Device("a", 1.0, ROOMY, math.inf), Device("b", 1.0, ROOMY, math.inf)]
    slow = [Device("a", 1.0, ROOMY, 10.0), Device("b", 1.0, ROOMY, 10.0)]
    assert partition(layers, fast) == (range(2), range(2, 4))
    assert partition(layers, slow) == (range(3), range(3, 4))


def test_the_error_names_the_device_and_the_bytes():
    layers = [Layer(1.0, 1.0, size, 1) for size in (10, 50, 20)]
    devices = [Device("big", 1.0, 60, 1.0), Device("small", 1.0, 7, 1.0)]
    with pytest.raises(PlanError, match=r"device 'small' is short by 13 B.*layers 2 to 2"):
        partition(layers, devices)


def test_what_is_in_flight_counts():
    layers = [Layer(1.0, 1.0, 10, 1, stash_bytes=5)] * 2
    devices = [Device("a", 1.0, 30, 1.0), Device("b", 1.0, 30, 1.0)]
    assert partition(layers, devices, [4, 1]) == (range(1), range(1, 2))
    with pytest.raises(PlanError, match=r"'a' is short by 5 B"):
        partition(layers, devices, [5, 1])


@pytest.mark.parametrize("count", [0, 3])
def test_too_few_cuts(count):
    devices = [Device(f"d{i}", 1.0, ROOMY, 1.0) for i in range(count)]
    layers = [Layer(1.0, 1.0, 1, 1)] * 2
    with pytest.raises(PlanError, match=f"{count} devices but only 1 valid cuts"):
        partition(layers, devices)
    with pytest.raises(PlanError, match=f"{count} devices but only 1 valid cuts"):
        best_order(layers, devices)


def test_pins_that_cannot_be_kept():
    layers = [Layer(1.0, 1.0, 1, 1)] * 2
    devices = [Device("a", 1.0, ROOMY, 1.0), Device("b", 1.0, ROOMY, 1.0)]
    with pytest.raises(PlanError, match="'c' is not among a, b"):
        best_order(layers, devices, pinned_first="c")
    with pytest.raises(PlanError, match="both the first and the last"):
        best_order(layers, devices, "a", "a")
    assert best_order(layers[:1], devices[:1], "a", "a").devices == (devices[0],)


@pytest.mark.parametrize(("speed", "link"), [(0.0, 1.0), (1.0, -1.0), (math.nan, 1.0)])
def test_a_device_needs_speed_and_link(speed, link):
    with pytest.raises(PlanError, match="'a' has speed"):
        Device("a", speed, 1, link)
