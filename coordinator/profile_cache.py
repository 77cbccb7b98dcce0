"""What earlier runs measured of a device: stage times and what was learnt from them.

Small JSON files in one folder. Whatever is wrong with them, a run goes on without.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from edgetrain.errors import ConfigError
from edgetrain.planner.latency_model import LatencyModel
from edgetrain.wire.hello import Hello

log = logging.getLogger(__name__)

VARIABLE: Final = "EDGETRAIN_CACHE"
OFF: Final = "off"
MAX_FILES: Final = 256
MAX_FILE_BYTES: Final = 1 << 19
MAX_STAGES: Final = 128  # of one device and subject: the latest
MAX_SECONDS: Final = 3600.0
# A device whose short test at its start differs by more is throttled, or held back to
# another speed: what it once took says nothing of now.
SAME_SPEED: Final = 1.5


class StageTime(msgspec.Struct, frozen=True):
    """One stage as it was measured.

    Attributes:
        start, stop: its nodes, as the planner's layers count them.
        mode: the gradient mode it ran in.
        fused: forward and backward ran in one graph: the last stage.
        forward_s, backward_s: of one microbatch.
    """

    start: int
    stop: int
    mode: str
    fused: bool
    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"a stage of nodes {self.start} ... {self.stop}")
        for seconds in (self.forward_s, self.backward_s):
            if not (math.isfinite(seconds) and 0 <= seconds <= MAX_SECONDS):
                raise ValueError(f"a stage took {seconds} s")

    @property
    def place(self) -> tuple[int, int, str, bool]:
        """What it is the time of."""
        return self.start, self.stop, self.mode, self.fused


@dataclass(frozen=True, slots=True)
class Subject:
    """What stage times depend on beside the device.

    Attributes:
        model_sha256: of the user's file.
        microbatch: samples.
        settings: whatever else changes the graphs, such as which weights train, as text.
    """

    model_sha256: str
    microbatch: int
    settings: str = ""


class _Stages(msgspec.Struct, frozen=True):
    device: str
    key: str
    flop_per_s: float
    stages: tuple[StageTime, ...]


class _Model(msgspec.Struct, frozen=True):
    device: str
    key: str
    flop_per_s: float
    model: msgspec.Raw


_Kept = TypeVar("_Kept", _Stages, _Model)


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """Where the cache is; None: it is switched off, or there is no home for it.

    ``EDGETRAIN_CACHE`` names a folder, or is ``off``; else it is ``edgetrain/profiles`` in
    the user's cache folder (``XDG_CACHE_HOME``, or ``~/.cache``).
    """
    given = environment.get(VARIABLE, "")
    if given == OFF:
        return None
    if given:
        return Path(given)
    base, home = environment.get("XDG_CACHE_HOME", ""), environment.get("HOME", "")
    if Path(base).is_absolute():
        return Path(base, "edgetrain", "profiles")
    return Path(home, ".cache", "edgetrain", "profiles") if home else None


class ProfileCache:
    """Stage times and learnt models of devices, by what the devices say of themselves.

    Args:
        folder: made when there is something to keep; None: nothing is read or kept.
        max_files: the oldest beyond are deleted.
    """

    def __init__(self, folder: Path | None, *, max_files: int = MAX_FILES) -> None:
        self._folder = folder
        self._max_files = max_files

    def stages(self, hello: Hello, subject: Subject) -> tuple[StageTime, ...]:
        """What is known of a device's stages of a model; nothing, if it changed speed."""
        kept = self._read(_Stages, hello, _stages_key(hello, subject))
        return kept.stages if kept is not None else ()

    def keep_stages(
        self, hello: Hello, subject: Subject, measured: Iterable[StageTime]
    ) -> None:
        """Add stage times; a newer one of the same stage takes the older's place."""
        known = {stage.place: stage for stage in self.stages(hello, subject)}
        for stage in measured:
            known.pop(stage.place, None)
            known[stage.place] = stage
        latest = tuple(known.values())[-MAX_STAGES:]
        key = _stages_key(hello, subject)
        self._write(_Stages(hello.device, key, hello.flop_per_s, latest))

    def model(self, hello: Hello) -> LatencyModel | None:
        """What was learnt of a device; None, if nothing, or if it changed speed."""
        kept = self._read(_Model, hello, _model_key(hello))
        if kept is None:
            return None
        try:
            return LatencyModel.decode(bytes(kept.model))
        except ConfigError as error:
            log.warning("what was learnt of %s is ignored: %s", hello.device, error)
            return None

    def latency(self, hello: Hello) -> LatencyModel:
        """The best there is to predict a device by: learnt, its profile, or its speed.

        Raises:
            ConfigError: it has neither, and says that its speed is not above 0.
        """
        learnt = self.model(hello)
        if learnt is not None:
            return learnt
        if hello.profile is not None:
            return LatencyModel.of(hello.profile)
        return LatencyModel.of_speed(hello.flop_per_s)

    def keep_model(self, hello: Hello, model: LatencyModel) -> None:
        """Keep what was learnt of a device, in place of what was kept before."""
        raw = msgspec.Raw(model.encode())
        self._write(_Model(hello.device, _model_key(hello), hello.flop_per_s, raw))

    def _path(self, key: str) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    def _read(self, kind: type[_Kept], hello: Hello, key: str) -> _Kept | None:
        path = self._path(key)
        if path is None:
            return None
        try:
            kept = msgspec.json.decode(_content(path), type=kind)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, msgspec.DecodeError, RecursionError) as error:
            log.warning("the cached profile %s is ignored: %s", path, error)
            return None
        if kept.key != key or not _same_speed(kept.flop_per_s, hello.flop_per_s):
            return None
        return kept

    def _write(self, kept: _Stages | _Model) -> None:
        """All of the file or nothing of it."""
        path = self._path(kept.key)
        if path is None:
            return
        part = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                dir=path.parent, suffix=".part", delete=False
            ) as file:
                part = Path(file.name)
                file.write(msgspec.json.encode(kept))
            part.replace(path)
            self._evict(path.parent)
        except OSError as error:
            log.warning("what was measured of %s is not cached: %s", kept.device, error)
            if part is not None:
                part.unlink(missing_ok=True)

    def _evict(self, folder: Path) -> None:
        """Delete the oldest files beyond the limit."""
        with os.scandir(folder) as entries:
            ours = [e for e in entries if e.name.endswith((".json", ".part"))]
        ours.sort(key=lambda entry: entry.stat().st_mtime)
        for entry in ours[: max(0, len(ours) - self._max_files)]:
            Path(entry.path).unlink(missing_ok=True)


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"over {MAX_FILE_BYTES} B")
    return data


def _facts(hello: Hello) -> str:
    """What makes a device another for our purposes; not what differs at every start."""
    fingerprint = hello.profile.fingerprint if hello.profile else ""
    facts = (
        *(hello.device, hello.version, hello.engine, *hello.providers),
        *(hello.cores, hello.block, *hello.runs, fingerprint),
    )
    return "\n".join(map(str, facts))


def _stages_key(hello: Hello, subject: Subject) -> str:
    of = (subject.model_sha256, subject.microbatch, subject.settings)
    return "\n".join(("stages", _facts(hello), *map(str, of)))


def _model_key(hello: Hello) -> str:
    return f"model\n{_facts(hello)}"


def _same_speed(then: float, now: float) -> bool:
    return then > 0 and now > 0 and 1 / SAME_SPEED <= then / now <= SAME_SPEED


NO_CACHE: Final = ProfileCache(None)
