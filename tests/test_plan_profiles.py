"""`edgetrain plan --profiles`: published figures, what is printed, and every bad file."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeedge import BASE, LARGE, MINNOW, RCC, profile

from coordinator.cli import main
from edgetrain.errors import ConfigError, PlanError
from edgetrain.planner.exact import LOAD, Solver
from edgetrain.planner.placement import evaluate
from edgetrain.planner.profile_file import parse_problem
from edgetrain.planner.solution import plan

TEN_MBIT = 1.25e6  # bytes a second
TRAINING = {
    "batch_size": 4,
    "objective": "training",
    "microbatches": 8,
    "schedule": "1f1b",
    "layers": [
        {"name": "conv", "memory_bytes": 400, "output_bytes": 900, "stash_bytes": 50},
        {"name": "dense", "memory_bytes": 300, "output_bytes": 100, "stash_bytes": 20},
        {"memory_bytes": 100, "output_bytes": 10},
    ],
    "devices": [
        {
            "name": "pi",
            "count": 2,
            "forward_s": [0.2, 0.1, 0.1],
            "backward_s": [0.4, 0.2, 0.2],
            "memory_bytes": 5000,
            "link_bytes_per_s": 1e4,
            "latency_s": 0.001,
        },
        {
            "name": "old",
            "forward_s": [2, 1, 1],
            "backward_s": [4, 2, 2],
            "memory_bytes": 5000,
            "link_bytes_per_s": 1e4,
        },
    ],
}


def problem_of(content):
    return parse_problem(json.dumps(content).encode())


def images_per_s(content):
    return 8 / plan(problem_of(content)).placement.bottleneck_s


@pytest.mark.parametrize(
    ("model", "boards", "expected"),
    [
        (BASE, 1, 0.61),
        (BASE, 2, 1.22),
        (BASE, 4, 2.39),
        (BASE, 8, 4.60),
        (BASE, 16, 8.03),
        (LARGE, 2, 0.36),
        (LARGE, 4, 0.71),
        (LARGE, 8, 1.40),
        (LARGE, 16, 2.67),
    ],
)
def test_ideal_rates_of_equal_boards_are_the_published_ones(model, boards, expected):
    rate = images_per_s(profile(model, (MINNOW, boards, 1)))
    assert rate == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize("boards", [4, 5, 8, 16])
def test_a_slow_link_sets_the_rate_however_many_boards(boards):
    content = profile(BASE, (MINNOW, boards, 1), link_bytes_per_s=TEN_MBIT)
    solution = plan(problem_of(content))
    assert 8 / solution.placement.bottleneck_s == pytest.approx(2.07, abs=0.006)
    assert len(solution.placement.stages) == 4
    assert solution.placement.bound_by.startswith("the link of")
    assert len(solution.left_out) == boards - 4


def test_unlike_boards_get_unlike_parts():
    placement = plan(problem_of(profile(BASE, (MINNOW, 8, 1), (RCC, 8, 1)))).placement
    assert placement.bottleneck_s == pytest.approx(0.801, abs=0.0006)


def test_boards_at_a_quarter_of_the_speed():
    """Even split, the best cut with the fast boards first, and the best order too."""
    problem = problem_of(profile(BASE, (RCC, 4, 1), (RCC, 4, 4)))
    names = [device.name for device in problem.devices]
    fast = [name for name in names if "slow" not in name]
    slow = [name for name in names if "slow" in name]
    even = [(name, range(6 * i, 6 * i + 6)) for i, name in enumerate([*fast, *slow])]
    assert 8 / evaluate(problem, even).bottleneck_s == pytest.approx(1.44, abs=0.006)
    found = Solver(problem, order=[*fast, *slow]).least(LOAD)
    assert 8 / found.value == pytest.approx(3.58, abs=0.006)
    assert 8 / plan(problem).placement.bottleneck_s == pytest.approx(3.73, abs=0.006)


def test_one_board_is_too_small_for_the_large_model():
    with pytest.raises(PlanError, match=r"short by 855 MB .*2\.9 GB, and has 2\.05 GB"):
        plan(problem_of(profile(LARGE, (MINNOW, 1, 1))))


def run(capsys, tmp_path, content, *options):
    path = tmp_path / "profiles.json"
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(text)
    code = main(["plan", "--profiles", str(path), *options])
    return code, capsys.readouterr()


def test_json_holds_the_plan(capsys, tmp_path):
    content = profile(BASE, (MINNOW, 4, 1), (MINNOW, 1, 50))
    code, printed = run(capsys, tmp_path, content, "--json")
    assert code == 0
    found = json.loads(printed.out)
    assert found["throughput"] == pytest.approx(8 / found["bottleneck_s"])
    assert found["throughput"] == pytest.approx(2.39, abs=0.006)
    layers = [stage["layers"] for stage in found["stages"]]
    assert layers[0][0] == 0
    assert layers[-1][1] == 47
    assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(layers))
    keys = {"device", "layers", "compute_s", "send_s", "memory_bytes"}
    assert all(keys <= set(stage) for stage in found["stages"])
    assert found["gap"] == 0.0
    assert [each["device"] for each in found["left_out"]] == [f"{MINNOW}-slow"]
    assert found["step_s"] is None


def test_a_person_can_read_the_plan(capsys, tmp_path):
    code, printed = run(capsys, tmp_path, TRAINING)
    assert code == 0
    assert "pi-0" in printed.out
    assert "step" in printed.out
    assert "samples/s" in printed.out
    assert "optimality  proved" in printed.out
    assert "left out    old: with it the step would take" in printed.out


def test_a_training_plan_counts_samples_of_the_step(capsys, tmp_path):
    _, printed = run(capsys, tmp_path, TRAINING, "--json")
    found = json.loads(printed.out)
    assert found["throughput"] == pytest.approx(4 * 8 / found["step_s"])


def changed(path, value):
    """The training file with one value set, or a key removed where it is None."""
    content = json.loads(json.dumps(TRAINING))
    *parents, key = path
    inner = content
    for parent in parents:
        inner = inner[parent]
    if value is None:
        del inner[key]
    else:
        inner[key] = value
    return content


PI = ("devices", 0)
BAD = [
    (b"", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b"[" * 100_000, "expected `object`"),
    (b'{"layers": ' + b"[" * 100_000, "layers.*expected `object`|not JSON"),
    (b"[]", "expected `object`"),
    (b'{"layers": NaN}', "not JSON"),
    (changed((*PI, "link_bytes_per_s"), 0), "link_bytes_per_s = 0.0"),
    (changed((*PI, "link_bytes_per_s"), -1), "link_bytes_per_s = -1.0"),
    (changed((*PI, "link_bytes_per_s"), float("nan")), "not JSON"),
    (changed((*PI, "link_bytes_per_s"), float("inf")), "not JSON"),
    (changed((*PI, "forward_s"), [0.2, -0.1, 0.1]), r"forward_s\[1\] = -0.1"),
    (changed((*PI, "forward_s"), [0.2, "0.1", 0.1]), r"forward_s\[1\]: expected `float`"),
    (changed((*PI, "forward_s"), [0.2, True, 0.1]), r"forward_s\[1\]: expected `float`"),
    (changed((*PI, "forward_s"), [0.2, 0.1]), "forward_s has 2 times for 3 layers"),
    (changed((*PI, "backward_s"), [0.2] * 4), "backward_s has 4 times for 3 layers"),
    (changed((*PI, "backward_s"), None), "backward_s is missing"),
    (changed((*PI, "memory_bytes"), -5), "memory_bytes = -5.0"),
    (changed((*PI, "count"), 0), "count = 0"),
    (changed((*PI, "count"), 1.5), "expected `int`"),
    (changed((*PI, "count"), 10**6), "count = 1000000"),
    (changed((*PI, "name"), "a\nb"), "cannot be a device's name"),
    (changed((*PI, "nmae"), "pi"), "unknown key `nmae`"),
    (changed((*PI, "latency_s"), 1e300), r"latency_s = 1e\+300"),
    (changed(("devices",), []), "devices is empty"),
    (changed(("layers",), []), "layers is empty"),
    (changed(("layers", 0, "output_bytes"), 1e30), r"layers\[0\].output_bytes"),
    (changed(("layers", 0, "memory_bytes"), None), "missing key `memory_bytes`"),
    (changed(("layers",), [{"memory_bytes": 1, "output_bytes": 1}] * 3000), "3000 layers"),
    (changed(("batch_size",), 0), "batch_size = 0"),
    (changed(("batch_size",), None), "missing key `batch_size`"),
    (changed(("objective",), "train"), "invalid enum value 'train'"),
    (changed(("topology",), "ring"), "invalid enum value 'ring'"),
    (changed(("schedule",), "2f2b"), "schedule '2f2b'"),
    (changed(("microbatches",), None), "microbatches is missing"),
    (changed(("microbatches",), 0), "0 microbatches"),
    (changed(("broker_bytes_per_s",), 5), "topology is not 'broker'"),
    (changed(("stages",), 4), "4 stages"),
    (changed(("pin",), {"first": "nobody"}), "'nobody' is not among"),
]


@pytest.mark.parametrize(("content", "expected"), BAD)
def test_bad_files_are_refused_with_the_place(capsys, tmp_path, content, expected):
    code, printed = run(capsys, tmp_path, content)
    assert code == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    with pytest.raises((ConfigError, PlanError), match=expected):
        plan(
            parse_problem(
                content if isinstance(content, bytes) else json.dumps(content).encode()
            )
        )


def test_names_that_stand_twice_are_refused():
    content = changed(("devices", 1, "name"), "pi-1")
    with pytest.raises(ConfigError, match="devices names pi-1 twice"):
        problem_of(content)


def test_a_missing_file_and_a_folder(capsys, tmp_path):
    assert main(["plan", "--profiles", str(tmp_path / "none.json")]) == 2
    assert "none.json: cannot be read" in capsys.readouterr().err
    assert main(["plan", "--profiles", str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def places(content, path=()):
    """The path of every value in the content."""
    yield path
    if isinstance(content, dict | list):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        for key, inner in items:
            yield from places(inner, (*path, key))


ODD = [None, True, -1, 0, 1e308, 10**40, "", "x", [], {}, [[]], -0.0, 2**63, 0.5, "NaN"]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from(ODD), st.integers(0, 3))
def test_mutated_files_give_a_plan_or_a_clean_error(seed, odd, kind):
    rng = random.Random(seed)  # noqa: S311  not a secret
    content = json.loads(json.dumps(TRAINING))
    path = rng.choice([p for p in places(content) if p])
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    if kind == 0:
        inner[path[-1]] = odd
    elif kind == 1 and isinstance(inner, dict):
        inner[str(odd)] = inner.pop(path[-1])
    elif kind == 2:
        del inner[path[-1]]
    data = bytearray(json.dumps(content).encode())
    if kind == 3:
        data[rng.randrange(len(data))] = rng.randrange(256)
    with contextlib.suppress(ConfigError, PlanError):
        found = plan(parse_problem(bytes(data)))
        assert found.placement.stages


def test_the_page_shows_a_file_that_works(capsys, tmp_path):
    page = (Path(__file__).parent.parent / "docs" / "profiles.md").read_text()
    for block in page.split("```json\n")[1:]:
        code, _ = run(capsys, tmp_path, block.split("```")[0].encode(), "--json")
        assert code == 0
