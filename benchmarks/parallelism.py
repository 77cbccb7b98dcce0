"""Data parallel, pipeline and federated, simulated for two networks on slow links.

    python benchmarks/parallelism.py --json parallelism.json --docs docs

Nothing is timed. Stage times come from layer shapes (`net_profiles.py`), pipelines are
planned by the planner and played by the timeline. The others get a formula that flatters
them: gradients travel while the backward still computes, chunks are averaged and sent on
while others arrive, and sending takes no processor time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing import Pool
from pathlib import Path

from curves import Panel, page
from net_profiles import BACKWARD_TO_FORWARD, BUFFERS, FLOAT_BYTES, NETS, Processor, Unit

from edgetrain.errors import PlanError
from edgetrain.planner.placed_case import case_of
from edgetrain.planner.problem import PLAIN, RECOMPUTE, Device, Layer, Problem
from edgetrain.planner.solution import plan
from edgetrain.planner.timeline import Timeline, play
from edgetrain.planner.timeline_case import NETWORKS

SAMPLES = 64  # of a step, over all devices
LOCAL_MICROBATCH = 8  # of whoever holds the whole network
MICROBATCHES = (8, 16, 32)  # of a pipeline; at least two samples each
HOPELESS = 1.05  # of the best: plans that the formula finds slower are not played
LOCAL_STEPS = 20  # federated: between two averages
LATENCY_S = 0.5e-3
BOARD = Processor(10e9, 4e9)
FAST_BOARD = Processor(50e9, 12e9)
EVEN = {count: (1.0,) * count for count in (2, 3, 4, 6, 8)}
UNEVEN = (1.0, 1.0, 0.1)
WAYS = (
    "pipeline, broker",
    "pipeline, peers",
    "data parallel, broker",
    "data parallel, ring",
    "federated, broker",
    "best device alone",
)


@dataclass(frozen=True)
class Setting:
    """One comparison.

    Attributes:
        board: of a device of speed 1.
        speeds: of the devices.
        link_bytes_per_s: of each device and of the broker, each way.
        memory_bytes: of each device.
    """

    net: str
    size: int
    board: Processor
    speeds: tuple[float, ...]
    link_bytes_per_s: float
    memory_bytes: float = math.inf

    @property
    def units(self) -> tuple[Unit, ...]:
        return NETS[self.net](self.size)

    @property
    def weights(self) -> int:
        return sum(unit.weights for unit in self.units)


@dataclass(frozen=True)
class Outcome:
    """Samples a second by way, 0 where it does not fit; and of the pipelines, how."""

    samples_per_s: dict[str, float]
    memory_bytes: dict[str, float]
    plans: dict[str, str]

    @property
    def best(self) -> str:
        return max(self.samples_per_s, key=lambda way: self.samples_per_s[way])


def compare(setting: Setting) -> Outcome:
    """All ways on one fleet."""
    speeds: dict[str, float] = {}
    memory: dict[str, float] = {}
    plans: dict[str, str] = {}
    for way, topology in (("pipeline, broker", "broker"), ("pipeline, peers", "peer")):
        found = best_pipeline(setting, topology)
        speeds[way] = memory[way] = 0.0
        if found is not None:
            timeline, plans[way] = found
            speeds[way] = SAMPLES / timeline.period_s
            memory[way] = max(timeline.memory_peak_bytes)
    whole_bytes = whole_memory_bytes(setting)
    for way, samples_per_s in whole_network(setting).items():
        memory[way] = whole_bytes
        speeds[way] = samples_per_s if whole_bytes <= setting.memory_bytes else 0.0
    return Outcome({w: speeds[w] for w in WAYS}, {w: memory[w] for w in WAYS}, plans)


def whole_memory_bytes(setting: Setting) -> float:
    """Of a device that trains the whole network, with as small a microbatch as it needs."""
    fixed_bytes = BUFFERS * FLOAT_BYTES * setting.weights
    stash_bytes = FLOAT_BYTES * sum(unit.stash for unit in setting.units)
    room_bytes = setting.memory_bytes - fixed_bytes
    fits = max(1, min(LOCAL_MICROBATCH, room_bytes // stash_bytes))
    return fixed_bytes + fits * stash_bytes


def whole_network(setting: Setting) -> dict[str, float]:
    """Samples a second where every device trains the whole network on its share.

    Shares are as the speeds. Through the broker all gradients or weights go over one
    link; in a ring each device sends twice its part of them.
    """
    units, board, weights = setting.units, setting.board, setting.weights
    forward_s = sum(board.forward_s(unit, LOCAL_MICROBATCH) for unit in units)
    forward_s /= LOCAL_MICROBATCH
    count, update_s = len(setting.speeds), board.update_s(weights)
    share_s = forward_s * SAMPLES / sum(setting.speeds)
    slowest_update_s = update_s / min(setting.speeds)
    compute_s = share_s * (1 + BACKWARD_TO_FORWARD)
    wire_s = FLOAT_BYTES * weights / setting.link_bytes_per_s
    star_s = count * wire_s + 4 * LATENCY_S
    ring_s = 2 * (count - 1) * (wire_s / count + LATENCY_S)

    def parallel(exchange_s: float) -> float:
        after_forward_s = max(compute_s - share_s, exchange_s)
        return SAMPLES / (share_s + after_forward_s + slowest_update_s)

    local_s = LOCAL_STEPS * (compute_s + slowest_update_s)
    alone_s = SAMPLES * forward_s * (1 + BACKWARD_TO_FORWARD) + update_s
    return {
        "data parallel, broker": parallel(star_s),
        "data parallel, ring": parallel(ring_s),
        "federated, broker": LOCAL_STEPS * SAMPLES / (local_s + star_s),
        "best device alone": SAMPLES * max(setting.speeds) / alone_s,
    }


def best_pipeline(setting: Setting, topology: str) -> tuple[Timeline, str] | None:
    """The fastest, by simulation, of the plans for all that a user may choose."""
    network = NETWORKS["mosquitto" if topology == "broker" else "tcp"]
    best: tuple[Timeline, str] | None = None
    for microbatches, schedule in itertools.product(
        reversed(MICROBATCHES), ("1f1b-eager", "1f1b")
    ):
        problem = problem_of(setting, topology, microbatches, schedule)
        try:
            placements = plan(problem).alternatives
        except PlanError:  # it does not fit
            continue
        for placement in placements:
            if best is not None and placement.time_s > HOPELESS * best[0].period_s:
                continue
            case = case_of(problem, placement, network, data_on="first")
            timeline = play(case, steps=4)
            if best is None or timeline.period_s < best[0].period_s:
                sizes = "+".join(str(len(stage.layers)) for stage in placement.stages)
                best = timeline, f"{sizes} units, {schedule}, {microbatches} microbatches"
    return best


def problem_of(
    setting: Setting, topology: str, microbatches: int, schedule: str
) -> Problem:
    samples = SAMPLES / microbatches
    layers = tuple(
        Layer(
            unit.name,
            memory_bytes=BUFFERS * FLOAT_BYTES * unit.weights,
            output_bytes=FLOAT_BYTES * unit.output * samples,
            stash_bytes=FLOAT_BYTES * unit.stash * samples,
        )
        for unit in setting.units
    )
    devices = []
    for index, speed in enumerate(setting.speeds):
        forward_s = [
            setting.board.forward_s(unit, samples) / speed for unit in setting.units
        ]
        update_s = [
            setting.board.update_s(unit.weights) / speed / microbatches
            for unit in setting.units
        ]
        backward_s = [
            BACKWARD_TO_FORWARD * forth_s + once_s
            for forth_s, once_s in zip(forward_s, update_s, strict=True)
        ]
        devices.append(
            Device(
                f"d{index}",
                tuple(forward_s),
                tuple(backward_s),
                setting.memory_bytes,
                setting.link_bytes_per_s,
                LATENCY_S,
            )
        )
    return Problem(
        layers,
        tuple(devices),
        topology=topology,  # type: ignore[arg-type]
        broker_bytes_per_s=setting.link_bytes_per_s if topology == "broker" else math.inf,
        microbatches=microbatches,
        schedule=schedule,
        options=(PLAIN, RECOMPUTE),
        input_bytes=FLOAT_BYTES * 3 * setting.size**2 * samples,
    )


def mbit(link_bytes_per_s: float) -> str:
    rate = link_bytes_per_s * 8 / 1e6
    return f"{rate:g} Mbit/s" if rate < 1000 else f"{rate / 1000:g} Gbit/s"


def table_settings(size: int, boards: Sequence[Processor]) -> list[Setting]:
    """The rows of a table: images of one size, both links and networks."""
    return [
        Setting(net, size, board, speeds, link_bytes_per_s)
        for net in NETS
        for board in boards
        for link_bytes_per_s in (12.5e6, 125e6)
        for speeds in (UNEVEN, EVEN[4], EVEN[8])
    ]


def table(rows: Sequence[tuple[Setting, Outcome]]) -> str:
    """Markdown; the best way of a row is in bold."""
    lines = [
        "| network | devices | link | " + " | ".join(WAYS) + " |",
        "|---|---|---|" + "---:|" * len(WAYS),
    ]
    for setting, outcome in rows:
        speeds = setting.speeds
        fleet = (
            f"{len(speeds)}" if min(speeds) == 1.0 else " : ".join(f"{s:g}" for s in speeds)
        )
        devices = f"{fleet} of {setting.board.flop_per_s / 1e9:g} Gflop/s"
        best = max(outcome.samples_per_s.values())
        cells = [
            f"**{value:.3g}**" if value >= 0.995 * best else f"{value:.3g}"
            for value in outcome.samples_per_s.values()
        ]
        name = mbit(setting.link_bytes_per_s)
        lines.append(f"| {setting.net} | {devices} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def devices_panels() -> list[tuple[str, dict[float, Setting], dict[float, str]]]:
    """Throughput by the number of equal devices."""
    ticks = {float(count): str(count) for count in EVEN}
    return [
        (
            f"{net}, {mbit(link_bytes_per_s)}",
            {
                float(count): Setting(net, 224, BOARD, speeds, link_bytes_per_s)
                for count, speeds in EVEN.items()
            },
            ticks,
        )
        for net in NETS
        for link_bytes_per_s in (12.5e6, 125e6)
    ]


def link_panels() -> list[tuple[str, dict[float, Setting], dict[float, str]]]:
    """Throughput by the links' rate, four devices."""
    ticks = {1.25e6: "10 M", 12.5e6: "100 M", 125e6: "1 G", 1.25e9: "10 G"}
    rates = [1.25e6 * 10 ** (step / 3) for step in range(10)]
    return [
        (
            f"{net}, 4 devices of {board.flop_per_s / 1e9:g} Gflop/s",
            {rate: Setting(net, 224, board, EVEN[4], rate) for rate in rates},
            ticks,
        )
        for net in NETS
        for board in (BOARD, FAST_BOARD)
    ]


def memory_panels() -> list[tuple[str, dict[float, Setting], dict[float, str]]]:
    """Throughput by the memory of a device, four devices."""
    ticks = {64e6 * 2**power: f"{64 * 2**power}" for power in range(6)}
    sizes = [64e6 * 2 ** (step / 2) for step in range(11)]
    return [
        (
            f"{net}, 4 devices, {mbit(12.5e6)}",
            {size: Setting(net, 224, BOARD, EVEN[4], 12.5e6, size) for size in sizes},
            ticks,
        )
        for net in NETS
    ]


FIGURES = {
    "planning-devices.svg": (devices_panels, "devices"),
    "planning-links.svg": (link_panels, "link, bit/s"),
    "planning-memory.svg": (memory_panels, "memory of a device, MB"),
}


def figures(outcomes: dict[Setting, Outcome]) -> dict[str, str]:
    """SVG text by file name."""
    drawn = {}
    for name, (panels, x_name) in FIGURES.items():
        charts = []
        for title, settings, ticks in panels():
            lines = {
                way: [
                    (x, outcomes[setting].samples_per_s[way])
                    for x, setting in settings.items()
                    if outcomes[setting].samples_per_s[way] > 0.0
                ]
                for way in WAYS
            }
            charts.append(Panel(title, lines, ticks))
        drawn[name] = page(charts, x_name, "samples/s")
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="all rows")
    parser.add_argument("--docs", type=Path, help="folder for the plots")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    plotted = [s for f, _ in FIGURES.values() for _, ss, _ in f() for s in ss.values()]
    tables = [table_settings(224, (BOARD, FAST_BOARD)), table_settings(96, (BOARD,))]
    settings = list(dict.fromkeys([*itertools.chain(*tables), *plotted]))
    with Pool(asked.processes) as pool:
        outcomes = dict(
            zip(settings, pool.map(compare, settings, chunksize=1), strict=True)
        )
    for rows in tables:
        print(table([(setting, outcomes[setting]) for setting in rows]))
    if asked.json:
        found = [{**asdict(s), **asdict(o), "best": o.best} for s, o in outcomes.items()]
        asked.json.write_text(json.dumps(found, indent=1, default=str) + "\n")
    if asked.docs:
        for name, drawing in figures(outcomes).items():
            (asked.docs / name).write_text(drawing)


if __name__ == "__main__":
    main()
