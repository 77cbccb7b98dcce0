"""What a simulated device may be told, in a run file, in Python, and by options."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent.cli import _parser
from device_agent.simulation import simulation, simulation_options
from edgetrain.conditions import MAX_EVENTS, Conditions, Happening
from edgetrain.errors import ConfigError
from edgetrain.settings import rate_bytes_per_s
from edgetrain.sim.fleet import SimDevice
from edgetrain.simulated_device import SimulatedDevice

FULL = Conditions(
    speed=0.5,
    link="100 Mbit/s",
    latency_s=0.01,
    jitter_s=0.002,
    loss=0.05,
    timetable=(
        Happening(20.0, speed=0.125),
        Happening(30.0, link=1e6),
        Happening(31.0, link="unlimited"),
        Happening(40.0, down_s=5.0),
        Happening(60.0, kill=True),
    ),
    seed=7,
)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100 Mbit/s", 12.5e6),
        ("1Gbit/s", 125e6),
        ("300 kbit/s", 37.5e3),
        ("12.5 MB/s", 12.5e6),
        ("2 MiB/s", 2 * 1024**2),
        ("10 Mbps", 1.25e6),
        (12.5e6, 12.5e6),
        (1000, 1e3),
    ],
)
def test_a_rate_is_bytes_per_second(text, rate):
    assert rate_bytes_per_s("link", text) == rate


@pytest.mark.parametrize(
    "text",
    ["fast", "100", "100 MHz", "-1 MB/s", "1 B/s", "9e9 GB/s", math.nan, math.inf, 0],
)
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(ConfigError, match=r"link = .*'100 Mbit/s'"):
        rate_bytes_per_s("link", text)


WRONG = [
    ({"speed": 0.0}, "speed = 0"),
    ({"speed": math.nan}, "speed = nan"),
    ({"link": "fast"}, "link = 'fast'"),
    ({"latency_s": -1.0}, "latency_s = -1"),
    ({"latency_s": math.inf}, "latency_s = inf"),
    ({"jitter_s": 61.0}, r"jitter_s = 61: must be in 0 \.\.\. 60"),
    ({"loss": 1.0}, r"loss = 1: must be in 0 \.\.\. 0\.9"),
    ({"seed": -1}, "seed = -1"),
    ({"paced": (0.1, math.nan)}, "paced = nan"),
    ({"paced": (0.1, 0.2), "speed": 0.5}, "both speed and paced"),
    ({"timetable": (Happening(1.0),)}, r"timetable\[0\]: must say one thing"),
    ({"timetable": (Happening(1.0, speed=1, kill=True),)}, "must say one thing"),
    ({"timetable": (Happening(-1.0, kill=True),)}, "at_s = -1"),
    ({"timetable": (Happening(1.0, speed=2),)}, "speed = 2"),
    ({"timetable": (Happening(1.0, down_s=math.inf),)}, "down_s = inf"),
    ({"timetable": (Happening(1.0, link="x"),)}, "link = 'x'"),
    ({"timetable": (Happening(1.0, kill=True),) * (MAX_EVENTS + 1)}, "1001 entries"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG)
def test_a_value_out_of_range_is_named_with_its_device(wrong, words):
    with pytest.raises(ConfigError, match=f"SimDevice 'a':.*{words}"):
        SimDevice("a", **wrong)
    with pytest.raises(ConfigError, match=rf"\[fleet\] simulate 'a':.*{words}"):
        SimulatedDevice(name="a", **wrong)


def test_a_timetable_may_be_tables():
    table = {"at_s": 20, "speed": 0.25}
    assert SimDevice("a", timetable=[table]).conditions.timetable == (
        Happening(20.0, speed=0.25),
    )
    with pytest.raises(ConfigError, match=r"SimDevice 'a'.*`at_s`"):
        SimDevice("a", timetable=[{"speed": 0.25}])
    with pytest.raises(ConfigError, match=r"SimDevice 'a'.*expected"):
        SimDevice("a", timetable=["soon"])


def by_options(conditions: Conditions) -> Conditions:
    options = simulation_options(conditions)
    texts = [f"--{key}={value}" for key, value in options.items()]
    return simulation(_parser().parse_args(["run", *texts]))


def test_options_carry_everything_to_an_agent():
    assert by_options(FULL) == FULL
    paced = Conditions(paced=(0.005, 0.01))
    assert by_options(paced) == paced
    assert simulation_options(Conditions()) == {}


@given(
    st.floats(1e-4, 1),
    st.none() | st.floats(1e3, 1e12),
    st.lists(
        st.builds(Happening, st.floats(0, 1e6), link=st.floats(1e3, 1e12)), max_size=3
    ),
)
def test_options_carry_any_number_exactly(speed, link, timetable):
    conditions = Conditions(speed=speed, link=link, timetable=tuple(timetable))
    assert by_options(conditions) == conditions


def test_a_run_file_s_device_is_the_fleet_s():
    table = {
        "name": "a",
        "memory": "1 MB",
        "gradient": "hybrid",
        **msgspec.to_builtins(FULL),
    }
    device = SimDevice.of(msgspec.convert(table, SimulatedDevice))
    assert device.conditions == FULL
    assert (device.memory_bytes, device.gradient) == (1_000_000, "hybrid")
