"""Options that make an agent behave like a lesser device on a lesser link."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

from edgetrain.conditions import Conditions
from edgetrain.errors import ConfigError
from edgetrain.settings import decode, override

# Options, and the keys of `Conditions` that they set.
_KEYS = {
    "speed": "speed",
    "link": "link",
    "latency": "latency_s",
    "jitter": "jitter_s",
    "loss": "loss",
    "timetable": "timetable",
    "paced": "paced",
    "sim_seed": "seed",
}


def add_simulation_options(run: argparse.ArgumentParser) -> None:
    add = run.add_argument_group(
        "simulation", "Simulate a lesser device; see docs/simulated-fleets.md."
    ).add_argument
    add("--speed", metavar="SHARE", help="share of this machine's speed, in 0 ... 1")
    add("--link", metavar="RATE", help="each way, such as '100 Mbit/s', '12.5 MB/s'")
    add("--latency", metavar="SECONDS", help="one way, to the broker")
    add("--jitter", metavar="SECONDS", help="the most that a message takes longer")
    add("--loss", metavar="SHARE", help="of messages that need a retransmission")
    add("--timetable", metavar="LIST", help="such as '[{at_s = 20, speed = 0.25}]'")
    add("--paced", metavar="F,B", help="seconds of each forward and each backward")
    add("--sim-seed", metavar="N", help="of jitter and loss (0)")


def simulation(options: argparse.Namespace) -> Conditions:
    """What the options say.

    Raises:
        ConfigError: naming the option, the value and what is allowed.
    """
    given = {key: getattr(options, option) for option, key in _KEYS.items()}
    if given["paced"] is not None:
        given["paced"] = f"[{given['paced']}]"
    table: dict[str, object] = {}
    override(table, [f"{key}={text}" for key, text in given.items() if text is not None])
    try:
        conditions = decode(Conditions, table, folder=Path())
    except ConfigError as error:
        raise ConfigError(f"simulation options: {error}") from error
    conditions.check("simulation options:")
    return conditions


def simulation_options(conditions: Conditions) -> dict[str, str]:
    """Options, without their dashes, that say the same; usual values are left out."""
    usual = Conditions()
    texts = {}
    for option, key in _KEYS.items():
        value = getattr(conditions, key)
        if value == getattr(usual, key):
            continue
        match key:
            case "timetable":
                text = f"[{', '.join(h.text for h in conditions.timetable)}]"
            case "paced":
                text = ",".join(map(repr, value))
            case _:
                text = str(value)
        texts[option.replace("_", "-")] = text
    return texts


def end_as_in_a_crash() -> None:
    """Without a goodbye, as a power cut does; the broker publishes the will."""
    os.kill(os.getpid(), signal.SIGKILL)
