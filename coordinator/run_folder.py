"""The folder a run writes: what was asked, what was planned, what came out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import tomli_w

from edgetrain.config import EMBEDDED, RunConfig
from edgetrain.errors import ConfigError, DataError, RunError

RUNS: Final = Path("runs")
CONFIG_FILE: Final = "run.toml"
PLAN_FILE: Final = "plan.json"
METRICS_FILE: Final = "metrics.jsonl"
MODEL_FILE: Final = "trained.onnx"
REPORT_FILE: Final = "report.html"


class StepMetrics(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of ``metrics.jsonl`` for a step.

    Attributes:
        step: from 1: steps done.
        epoch: from 0.
        loss: mean over the batch; None: not finite.
        seconds: since the run began.
        bytes_sent: by all devices and the coordinator in this step.
        signal_to_noise: of each stage's gradients, 0 where exact; left out if all are.
    """

    step: int
    epoch: int
    loss: float | None
    seconds: float
    bytes_sent: int
    signal_to_noise: tuple[float, ...] = ()


class EvalMetrics(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of ``metrics.jsonl`` for an evaluation; no accuracy for value labels."""

    step: int
    epoch: int
    seconds: float
    eval_loss: float | None
    eval_accuracy: float | None = None


class GateMetrics(msgspec.Struct, frozen=True):
    """A line of ``metrics.jsonl`` for a stage compared with its deployed weights.

    Attributes:
        gate_stage: its number.
        gate_measure: ``"accuracy"`` or ``"loss"``.
        gate_trained, gate_deployed: of the whole model, with either; None: not finite.
        rolled_back: the stage went back to its deployed weights.
    """

    step: int
    gate_stage: int
    gate_measure: str
    gate_trained: float | None
    gate_deployed: float | None
    rolled_back: bool


Metrics = StepMetrics | EvalMetrics | GateMetrics


class RunFolder:
    """An open run folder. Its files are whole at any time; the metrics grow by lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics = (path / METRICS_FILE).open("ab", buffering=0)

    @classmethod
    def create(cls, out: Path | None, *, stem: str, now: datetime) -> Self:
        """Make a new folder.

        Args:
            out: where; None: ``runs/TIME-STEM`` under the current folder.
            stem: of the model's file name.
            now: local time.

        Raises:
            ConfigError: `out` exists and is not an empty folder, or cannot be made.
        """
        path = make_folder(out, stem=stem, now=now)
        try:
            return cls(path)
        except OSError as error:
            raise ConfigError(f"the run folder cannot be used: {error}") from error

    def close(self) -> None:
        self._metrics.close()

    def write_config(self, config: RunConfig) -> None:
        self._replace(CONFIG_FILE, resolved_toml(config).encode())

    def write_plan(self, plan: bytes) -> None:
        self._replace(PLAN_FILE, plan)

    def write_report(self, html: str) -> None:
        self._replace(REPORT_FILE, html.encode())

    def append(self, metrics: Metrics) -> None:
        """Add a line to the metrics; it is in the file when this returns.

        Raises:
            RunError: it cannot be written.
        """
        try:
            self._metrics.write(msgspec.json.encode(metrics) + b"\n")
        except OSError as error:
            raise _cannot_write(self.path / METRICS_FILE, error) from error

    def write_model(self, export: Callable[[Path], None]) -> Path:
        """Write the trained model; whatever happens, the file is whole, old or new.

        Args:
            export: writes the model to a path, and what belongs beside it to its folder.

        Raises:
            RunError: it cannot be written.
        """
        aside = self.path / ".partial"
        path = self.path / MODEL_FILE
        try:
            aside.mkdir(exist_ok=True)
            export(aside / MODEL_FILE)
            written = [file for file in aside.rglob("*") if file.is_file()]
            for file in sorted(written, key=lambda file: file.name == MODEL_FILE):
                _settle(file, self.path / file.relative_to(aside))
        except OSError as error:
            raise _cannot_write(path, error) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return path

    def _replace(self, name: str, data: bytes) -> Path:
        path = self.path / name
        aside = self.path / f".{name}.partial"
        try:
            aside.write_bytes(data)
            _settle(aside, path)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise _cannot_write(path, error) from error
        return path


def _settle(aside: Path, path: Path) -> None:
    """Put a written file in its place once it is on the disk."""
    with aside.open("rb+") as file:
        os.fsync(file.fileno())
    path.parent.mkdir(parents=True, exist_ok=True)
    aside.replace(path)


def resolved_toml(config: RunConfig) -> str:
    """The run file that repeats this run from any folder, without the broker's password."""
    table = msgspec.to_builtins(config, enc_hook=_plain)
    broker = config.fleet.broker
    if broker != EMBEDDED:
        table["fleet"]["broker"] = without_password(broker)
    return tomli_w.dumps(_given(table))


def without_password(url: str) -> str:
    """The URL with its password left out, its user kept."""
    scheme, _, rest = url.partition("://")
    login, _, place = rest.rpartition("@")
    user = login.partition(":")[0]
    return f"{scheme}://{user}@{place}" if user else f"{scheme}://{place}"


def read_metrics(path: Path) -> tuple[list[StepMetrics], list[EvalMetrics]]:
    """Read ``metrics.jsonl``; a last line cut short by a crash is left out.

    Raises:
        DataError: it cannot be read, or another line is damaged.
    """
    lines = list(_metrics(path))
    steps = [line for line in lines if isinstance(line, StepMetrics)]
    return steps, [line for line in lines if isinstance(line, EvalMetrics)]


def read_gates(path: Path) -> list[GateMetrics]:
    """As `read_metrics`, the comparisons with deployed weights."""
    return [line for line in _metrics(path) if isinstance(line, GateMetrics)]


def _metrics(path: Path) -> Iterator[Metrics]:
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        kind: type[Metrics] = StepMetrics
        if b'"eval_loss"' in line:
            kind = EvalMetrics
        elif b'"gate_stage"' in line:
            kind = GateMetrics
        try:
            yield msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: line {number} is damaged: {error}") from error


def make_folder(out: Path | None, *, stem: str, now: datetime) -> Path:
    """Make a new, empty folder: see `RunFolder.create`.

    Raises:
        ConfigError: `out` exists and is not an empty folder, or cannot be made.
    """
    try:
        return _fresh(f"{now:%Y%m%d-%H%M%S}-{stem}") if out is None else _asked_for(out)
    except OSError as error:
        raise ConfigError(f"the run folder cannot be made: {error}") from error


def _fresh(name: str) -> Path:
    RUNS.mkdir(exist_ok=True)
    for attempt in range(1, 1000):
        path = RUNS / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise ConfigError(f"{RUNS / name} and 998 more of that name exist: give --out")


def _asked_for(out: Path) -> Path:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out} exists and a run never overwrites: give another --out, or remove it"
        )
    out.mkdir(parents=True, exist_ok=True)
    return out


def _plain(value: object) -> str:
    if isinstance(value, Path):
        return str(value.absolute())
    raise NotImplementedError(f"{type(value).__name__} has no form in TOML")


def _given(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table without None, which TOML does not have."""
    given: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            given[key] = _given(value)
        elif isinstance(value, (list, tuple)):
            given[key] = [_given(v) if isinstance(v, Mapping) else v for v in value]
        elif value is not None:
            given[key] = value
    return given


def _cannot_write(path: Path, error: OSError) -> RunError:
    reason = error.strerror or error
    return RunError(
        f"{path} cannot be written ({reason}): free space or give another --out"
    )
