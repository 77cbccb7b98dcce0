"""Profile files: layers and devices as JSON, to plan from without a model or a device."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Final, Literal

import msgspec

from edgetrain.errors import ConfigError, PlanError
from edgetrain.planner.problem import (
    MAX_DEVICES,
    MAX_LAYERS,
    PLAIN,
    RECOMPUTE,
    Device,
    Layer,
    Problem,
)
from edgetrain.settings import check_device_name, check_distinct, require

MAX_FILE_BYTES: Final = 64_000_000
_MAX_BYTES: Final = 1e18
_MAX_S: Final = 1e9
_MAX_SAMPLES: Final = 1_000_000_000
_NAME_CHARACTERS: Final = 200
_PLACE: Final = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?", re.DOTALL)


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class LayerProfile(_Table, frozen=True):
    """One entry of ``layers``; see `edgetrain.planner.problem.Layer`."""

    memory_bytes: float
    output_bytes: float
    name: str = ""
    stash_bytes: float = 0.0
    cotangent_bytes: float | None = None


class DeviceProfile(_Table, frozen=True):
    """One entry of ``devices``; `count` of them are named NAME-0, NAME-1, ..."""

    name: str
    forward_s: tuple[float, ...]
    memory_bytes: float
    link_bytes_per_s: float
    backward_s: tuple[float, ...] = ()
    latency_s: float = 0.0
    count: int = 1


class Pins(_Table, frozen=True):
    first: str | None = None
    last: str | None = None


class ProfileFile(_Table, frozen=True):
    """A profile file. All times and sizes are of one microbatch of `batch_size` samples."""

    layers: tuple[LayerProfile, ...]
    devices: tuple[DeviceProfile, ...]
    batch_size: int
    objective: Literal["inference", "training"] = "inference"
    topology: Literal["peer", "broker"] = "peer"
    broker_bytes_per_s: float | None = None
    microbatches: int | None = None
    schedule: str | None = None
    stages: int | None = None
    pin: Pins = Pins()
    recompute: bool = False
    hop_overhead_s: float = 0.0
    input_bytes: float = 0.0


def read_problem(path: Path) -> Problem:
    """Read a profile file.

    Raises:
        ConfigError: it cannot be read, or is not a profile file.
        PlanError: what it describes cannot be planned for.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} B: no profile file")
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{path}: cannot be read ({reason}); check the path") from error
    try:
        return parse_problem(data)
    except (ConfigError, PlanError) as error:
        raise type(error)(f"{path}: {error}") from error


def parse_problem(data: bytes) -> Problem:
    """The problem that a profile file's bytes describe.

    Raises:
        ConfigError: the bytes are not a profile file.
        PlanError: what it describes cannot be planned for.
    """
    try:
        file = msgspec.json.decode(data, type=ProfileFile)
    except msgspec.ValidationError as error:
        match = _PLACE.fullmatch(str(error))
        what = match["what"] if match else str(error)
        place = f"{match['path']}: " if match and match["path"] else ""
        what = what.replace("Object contains unknown field", "unknown key")
        what = what.replace("Object missing required field", "missing key")
        raise ConfigError(f"{place}{what[:1].lower()}{what[1:]}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"not JSON: {error}. NaN and Infinity are no numbers there"
        ) from error
    _check(file)
    devices = tuple(device for profile in file.devices for device in _devices(profile))
    check_distinct("devices", [device.name for device in devices])
    training = file.objective == "training"
    return Problem(
        tuple(
            Layer(
                layer.name or f"layer {index}",
                layer.memory_bytes,
                layer.output_bytes,
                layer.stash_bytes,
                layer.cotangent_bytes,
            )
            for index, layer in enumerate(file.layers)
        ),
        devices,
        objective=file.objective,
        topology=file.topology,
        broker_bytes_per_s=file.broker_bytes_per_s or math.inf,
        microbatches=1 if file.microbatches is None else file.microbatches,
        schedule="1f1b" if file.schedule is None else file.schedule,
        samples=file.batch_size,
        pin_first=file.pin.first,
        pin_last=file.pin.last,
        stages=file.stages,
        options=(PLAIN, RECOMPUTE) if file.recompute and training else (PLAIN,),
        hop_overhead_s=file.hop_overhead_s,
        input_bytes=file.input_bytes,
    )


def _devices(profile: DeviceProfile) -> list[Device]:
    names = [profile.name]
    if profile.count > 1:
        digits = len(str(profile.count - 1))
        names = [f"{profile.name}-{index:0{digits}}" for index in range(profile.count)]
    return [
        Device(
            name,
            profile.forward_s,
            profile.backward_s,
            profile.memory_bytes,
            profile.link_bytes_per_s,
            profile.latency_s,
        )
        for name in names
    ]


def _check(file: ProfileFile) -> None:
    require(bool(file.layers), "layers is empty: describe at least one")
    require(bool(file.devices), "devices is empty: describe at least one")
    require(
        len(file.layers) <= MAX_LAYERS,
        f"{len(file.layers)} layers: at most {MAX_LAYERS} can be planned for",
    )
    for device in file.devices:
        check_device_name("devices", device.name)
        _check_range(f"device {device.name!r}: count", device.count, 1, MAX_DEVICES)
    total = sum(device.count for device in file.devices)
    require(
        total <= MAX_DEVICES,
        f"{total} devices: at most {MAX_DEVICES} can be planned for",
    )
    _check_range("batch_size", file.batch_size, 1, _MAX_SAMPLES)
    _check_range("hop_overhead_s", file.hop_overhead_s, 0.0, _MAX_S)
    _check_range("input_bytes", file.input_bytes, 0.0, _MAX_BYTES)
    for index, layer in enumerate(file.layers):
        _check_layer(f"layers[{index}]", layer)
    for device in file.devices:
        _check_device(file, device)
    _check_objective(file)


def _check_objective(file: ProfileFile) -> None:
    if file.broker_bytes_per_s is not None:
        require(
            file.topology == "broker",
            "broker_bytes_per_s is given, but topology is not 'broker'",
        )
        _check_rate("broker_bytes_per_s", file.broker_bytes_per_s)
    if file.objective == "training":
        require(
            file.microbatches is not None,
            "microbatches is missing: how many make a training step?",
        )
        return
    for key, value in (("microbatches", file.microbatches), ("schedule", file.schedule)):
        require(value is None, f"{key} is given, but objective is 'inference': it has none")


def _check_layer(place: str, layer: LayerProfile) -> None:
    require(
        len(layer.name) <= _NAME_CHARACTERS and layer.name.isprintable(),
        f"{place}.name: at most {_NAME_CHARACTERS} printable characters are allowed",
    )
    for key in ("memory_bytes", "output_bytes", "stash_bytes", "cotangent_bytes"):
        value = getattr(layer, key)
        if value is not None:
            _check_range(f"{place}.{key}", value, 0.0, _MAX_BYTES)


def _check_device(file: ProfileFile, device: DeviceProfile) -> None:
    place = f"device {device.name!r}"
    for key, times in (("forward_s", device.forward_s), ("backward_s", device.backward_s)):
        if key == "backward_s" and not times:
            require(
                file.objective == "inference",
                f"{place}: backward_s is missing, which training needs",
            )
            continue
        require(
            len(times) == len(file.layers),
            f"{place}: {key} has {len(times)} times for {len(file.layers)} layers",
        )
        for index, time_s in enumerate(times):
            _check_range(f"{place}: {key}[{index}]", time_s, 0.0, _MAX_S)
    _check_range(f"{place}: memory_bytes", device.memory_bytes, 0.0, _MAX_BYTES)
    _check_rate(f"{place}: link_bytes_per_s", device.link_bytes_per_s)
    _check_range(f"{place}: latency_s", device.latency_s, 0.0, _MAX_S)


def _check_rate(place: str, value: float) -> None:
    require(
        1e-3 <= value <= _MAX_BYTES,
        f"{place} = {value}: bytes a second from 0.001 to {_MAX_BYTES:.0e} are possible",
    )


def _check_range(place: str, value: float, least: float, most: float) -> None:
    require(
        least <= value <= most, f"{place} = {value}: from {least:g} to {most:g} is possible"
    )
