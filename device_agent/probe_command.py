"""`edgetrain-agent probe`: what was measured, for a person, as JSON and as a file."""

from __future__ import annotations

import logging
import os
import platform
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from device_agent.equip import Limits, equip
from device_agent.measure import Measured, Measurement, Progress, measure
from device_agent.probe import cores
from device_agent.probe_set import ProbeSet
from device_agent.thread_search import Threading
from edgetrain.device_profile import Case, DeviceProfile
from edgetrain.errors import ConfigError
from edgetrain.op_groups import OpGroup
from edgetrain.settings import check_device_name, require, size_bytes
from edgetrain.train_config import AUTO
from edgetrain.transport.base import Transport
from edgetrain.wire.hello import Hello

log = logging.getLogger(__name__)

BAR: Final = 20
BUSY: Final = 0.5  # of the cores
_FOREIGN: Final = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for.

    Attributes:
        name: of the device.
        threads: of the engine; None: searched.
        memory: to lend, as in an agent file; None: half of what is free.
        transport: to the broker; None: the link is left out.
        out: where to write the profile.
        quick: only what an agent finds out at its start.
    """

    name: str
    threads: int | None = None
    memory: int | str | None = None
    transport: Transport | None = None
    out: Path | None = None
    as_json: bool = False
    quick: bool = False


def default_name() -> str:
    """The host's, as far as it can be a device's."""
    return _FOREIGN.sub("-", platform.node()).strip("-.")[:64] or "device"


def probe(request: Request, probes: ProbeSet) -> None:
    """Measure this device with these graphs and print the result.

    Raises:
        ConfigError: a setting cannot be used, or the file cannot be written.
        TransportError: the broker cannot be reached or refuses us.
    """
    memory_bytes = _checked(request)
    hello = equip(request.name, Limits(request.threads, memory_bytes)).hello
    facts = _facts(hello)
    if request.quick:
        _show(facts, _quick_table(hello), as_json=request.as_json)
        return
    _warn_if_busy()
    measured = measure(
        Measurement(
            device=request.name,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            clock=time.perf_counter,
            progress=_progress(),
            threads=request.threads,
            memory_bytes=memory_bytes,
            transport=request.transport,
        ),
        probes,
    )
    profile = measured.profile
    if request.out is not None:
        _write(request.out, profile)
    facts |= {"tried": {str(s): ratio for s, ratio in measured.tried.items()}}
    facts |= {"profile": profile}
    text = _quick_table(hello) + table(measured)
    if request.out is not None:
        text += f"\nprofile written to {request.out}\n"
    _show(facts, text, as_json=request.as_json)


def table(measured: Measured) -> str:
    """A profile as a person reads it."""
    profile = measured.profile
    rows = [f"threads    {_settings(profile, measured.tried)}"]
    run_us, node_us = 1e6 * profile.run_overhead_s, 1e6 * profile.node_overhead_s
    rows.append(f"overhead   {run_us:.1f} us a run, {node_us:.1f} us a node")
    if profile.link is not None:
        link = profile.link
        rows.append(
            f"link       {1e3 * link.latency_s:.2f} ms to the broker,"
            f" {link.bytes_per_s / 1e6:.1f} MB/s there and back"
        )
    factors = "; ".join(f"{g} {f:.2f}" for g, f in profile.weights_as_inputs.items())
    rows.append(f"weights    as inputs take this many times as long: {factors}")
    return "\n".join([*rows, "", *_cases(profile.cases), ""])


def _settings(profile: DeviceProfile, tried: Mapping[Threading, float]) -> str:
    chosen = Threading(profile.threads, profile.spinning)
    others = [f"{s}: {ratio:.2f}" for s, ratio in tried.items() if s != chosen]
    compared = f" ({tried[chosen]:.2f} of the best time; {'; '.join(others)})"
    return f"{chosen}{compared if others else ''}"


def _cases(cases: tuple[Case, ...]) -> list[str]:
    """A line for each case, its batches side by side; then those of the optimizer."""
    updates = [case for case in cases if case.group == OpGroup.OPTIMIZER]
    others = [case for case in cases if case.group != OpGroup.OPTIMIZER]
    batches = sorted({case.batch for case in others})
    found = {(case.name, case.batch): case for case in others}
    heads = "".join(f"{f'batch {batch}':>18}" for batch in batches)
    rows = [f"{'ms forward + backward':43}{heads}   forward"]
    for name, group in dict.fromkeys((case.name, case.group) for case in others):
        times = "".join(f"{_pair(found.get((name, batch))):>18}" for batch in batches)
        fastest = max(c.flop / c.forward_s for c in others if c.name == name)
        rows.append(f"{group:18} {name:24}{times}  {fastest / 1e9:6.1f} Gflop/s")
    rows.append(f"{'ms an update':43}")
    for case in updates:
        rate = case.nbytes / case.forward_s / 1e9
        name = f"{case.name} weights"
        rows.append(
            f"{case.group:18} {name:24}{1e3 * case.forward_s:18.3f}  {rate:.1f} GB/s"
        )
    return rows


def _pair(case: Case | None) -> str:
    if case is None:
        return "-"
    return f"{1e3 * case.forward_s:.3f} + {1e3 * case.backward_s:.3f}"


def _facts(hello: Hello) -> dict[str, object]:
    return {
        "engine": hello.engine,
        "providers": list(hello.providers),
        "cores": hello.cores,
        "memory_bytes": hello.memory_bytes,
        "flop_per_s": round(hello.flop_per_s),
        "runs": list(hello.runs),
        "version": hello.version,
    }


def _quick_table(hello: Hello) -> str:
    return (
        f"engine     {hello.engine} ({', '.join(hello.providers)})\n"
        f"runs       {', '.join(hello.runs) or 'plain inference'} graphs\n"
        f"cores      {hello.cores}\n"
        f"memory     {hello.memory_bytes / 1e6:.0f} MB to lend\n"
        f"speed      {hello.flop_per_s / 1e9:.2f} Gflop/s on one thread\n"
        f"edgetrain  {hello.version}\n"
    )


def _show(facts: Mapping[str, object], text: str, *, as_json: bool) -> None:
    sys.stdout.write(msgspec.json.encode(facts).decode() + "\n" if as_json else text)


def _warn_if_busy() -> None:
    """Say that the numbers will be too high, where they will."""
    try:
        load = os.getloadavg()[0]
    except OSError:
        return
    if load > BUSY * cores():
        log.warning(
            "other programs keep this device busy (load %.1f on %d cores): measure again"
            " when it is idle, as it is in training",
            load,
            cores(),
        )


def _progress() -> Progress:
    """A bar on a terminal; silence elsewhere."""
    if not sys.stderr.isatty():
        return lambda _share, _what: None

    def show(share: float, what: str) -> None:
        bar = "#" * round(BAR * share)
        sys.stderr.write(f"\r\033[K[{bar:{BAR}}] {100 * share:3.0f} % {what}")
        if share == 1:
            sys.stderr.write("\r\033[K")
        sys.stderr.flush()

    return show


def _checked(request: Request) -> int | None:
    """The memory to lend; refuses before anything is measured what would fail after it."""
    check_device_name("--name", request.name)
    if request.threads is not None:
        require(request.threads > 0, f"threads = {request.threads}: must be 1 or more")
    out = request.out
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise ConfigError(f"--out {out}: no file can be written there; check the path")
    if request.memory is None or request.memory == AUTO:
        return None
    return size_bytes("memory", request.memory)


def _write(path: Path, profile: DeviceProfile) -> None:
    """All of it or nothing: an agent may start meanwhile."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_bytes(profile.encode())
        part.replace(path)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--out {path}: cannot be written ({reason})") from error
