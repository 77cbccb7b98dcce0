"""The folder a run writes: what was asked, what was planned, what came out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import tomli_w

from coordinator.metrics import METRICS_FILE, Metrics
from edgetrain.config import RunConfig
from edgetrain.errors import ConfigError, RunError
from edgetrain.fleet_config import EMBEDDED

RUNS: Final = Path("runs")
CONFIG_FILE: Final = "run.toml"
PLAN_FILE: Final = "plan.json"
MODEL_FILE: Final = "trained.onnx"
REPORT_FILE: Final = "report.html"


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
