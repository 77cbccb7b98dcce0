"""The benchmarks' network profiles: their sums are the published ones."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

PROFILES = Path(__file__).parents[1] / "benchmarks" / "net_profiles.py"


@pytest.fixture(scope="module")
def profiles():
    spec = importlib.util.spec_from_file_location("net_profiles", PROFILES)
    module = importlib.util.module_from_spec(spec)
    sys.modules["net_profiles"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["net_profiles"]


@pytest.mark.parametrize(
    ("net", "weights", "multiply_adds"),
    [("MobileNetV2", 3_504_872, 300.8e6), ("ResNet-50", 25_557_032, 4.09e9)],
)
def test_weights_and_work_are_the_published_ones(profiles, net, weights, multiply_adds):
    units = profiles.NETS[net](224)
    assert sum(unit.weights for unit in units) == weights
    # normalisation, sums and pooling are counted here and not there
    assert sum(unit.flop for unit in units) / 2 == pytest.approx(multiply_adds, rel=0.05)
    small = profiles.NETS[net](96)
    assert sum(unit.weights for unit in small) == weights


def test_a_depthwise_convolution_is_bound_by_memory(profiles):
    tracer = profiles._Tracer(96, 112)
    tracer.conv(96, 3, 1, groups=96)
    tracer.cut("depthwise")
    (unit,) = tracer.units
    board = profiles.Processor(10e9, 4e9)
    assert board.forward_s(unit, 8) > 2 * 8 * unit.flop / board.flop_per_s


def test_cuts_have_the_published_shapes(profiles):
    outputs = [unit.output for unit in profiles.resnet_50(224)]
    assert outputs[3] == 56 * 56 * 256
    assert outputs[7] == 28 * 28 * 512
    assert outputs[13] == 14 * 14 * 1024
    assert outputs[16] == 7 * 7 * 2048
    assert [unit.output for unit in profiles.mobilenet_v2(224)][13] == 14 * 14 * 96
