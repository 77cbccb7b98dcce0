"""Read a TOML settings file into a struct, with errors that name the file and the key."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import inspect

from edgetrain.errors import ConfigError


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every settings struct. A subclass checks its ranges in `__post_init__`."""


_T = TypeVar("_T", bound=Section)
_MSGSPEC_PLACE: Final = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?")
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SIZE: Final = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,6})?)\s*(?P<unit>[kKMGT]i?)?B?")
_SIZE_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_RATE: Final = re.compile(
    r"(?P<number>\d{1,15}(?:\.\d{1,6})?)\s*(?P<prefix>[kMG]i?)?(?P<unit>bit|bps|B)/?s?"
)
_RATE_RANGE: Final = (1e3, 1e12)  # bytes/s: a slow modem, and beyond any network


def read_table(path: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        ConfigError: it cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{path}: cannot be read ({reason}); check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from error


def override(table: dict[str, Any], assignments: Sequence[str]) -> None:
    """Apply ``section.key=value`` assignments to a table, in place.

    A value is read as TOML where it is TOML (``0.1``, ``["a", "b"]``), else as text.

    Raises:
        ConfigError: an assignment has no ``=``, or its key leads through a plain value.
    """
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not equals or not all(parts):
            raise ConfigError(
                f"option {assignment!r} is not of the form section.key=value,"
                " such as train.lr=0.1"
            )
        inner = table
        for part in parts[:-1]:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"option {key!r}: {part!r} is not a table")
        inner[parts[-1]] = _value(text.strip())


def decode(kind: type[_T], table: dict[str, Any], *, folder: Path) -> _T:
    """Check a table against a struct; relative paths are taken from `folder`.

    Raises:
        ConfigError: a key is unknown or missing, or a value has the wrong type or range.
    """

    def path_hook(wanted: type, value: object) -> Path:
        if wanted is not Path or not isinstance(value, str) or not value or "\0" in value:
            raise ValueError("expected a path in quotes")
        try:
            return folder / Path(value).expanduser()
        except RuntimeError as error:  # no such user's home
            raise ValueError(f"{value!r}: {error}") from error

    _check_keys(inspect.type_info(kind), table, "")
    try:
        return msgspec.convert(table, kind, dec_hook=path_hook)
    except msgspec.ValidationError as error:
        match = _MSGSPEC_PLACE.fullmatch(str(error))
        path = match["path"] if match and match["path"] else ""
        what = match["what"] if match else str(error)
        what = what.replace("Object missing required field", "missing key")
        what = what.replace("`object`", "`table`").replace("`array`", "`list`")
        place = f"{_place(path)}: " if path else ""
        raise ConfigError(f"{place}{what[:1].lower()}{what[1:]}") from error


def nearest(word: str, allowed: Collection[str]) -> str:
    """What may be written instead of `word`, as the end of an error message."""
    names = ", ".join(sorted(allowed)) or "none"
    close = difflib.get_close_matches(word, list(allowed), n=1)
    question = f"; did you mean {close[0]!r}?" if close else ""
    return f"allowed: {names}{question}"


def choose(place: str, value: str, allowed: Collection[str]) -> None:
    """Refuse a word that is not one of `allowed`.

    Raises:
        ConfigError: naming the allowed words.
    """
    if value not in allowed:
        raise ConfigError(f"{place} = {value!r} is not known; {nearest(value, allowed)}")


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with the message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def check_device_name(place: str, name: str) -> None:
    """Refuse what cannot be a device's name on the broker.

    Raises:
        ConfigError: it is not 1 to 64 of ``A-Z a-z 0-9 _ . -``, or is reserved.
    """
    require(
        _NAME.fullmatch(name) is not None and name != "coordinator",
        f"{place}: {name!r} cannot be a device's name; use 1 to 64 of the characters"
        " A-Z a-z 0-9 _ . - and not 'coordinator'",
    )


def check_distinct(place: str, names: Sequence[str]) -> None:
    """Refuse a name that stands twice.

    Raises:
        ConfigError: naming all that do.
    """
    twice = sorted({name for name in names if names.count(name) > 1})
    require(not twice, f"{place} names {', '.join(twice)} twice: each device needs its own")


def check_broker_url(place: str, url: str) -> None:
    """Refuse what is not ``mqtt://[user[:password]@]host[:port]`` or ``mqtts://...``.

    Raises:
        ConfigError: without repeating the URL, which may hold a password.
    """
    try:
        parts = urlsplit(url)
        valid = parts.scheme in {"mqtt", "mqtts"} and bool(parts.hostname)
        valid = valid and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    require(
        valid,
        f"{place} is not a broker's URL; write it as mqtt://host:1883, or"
        " mqtts://user@host:8883 for TLS",
    )


def size_bytes(place: str, value: int | str) -> int:
    """Bytes of a size such as ``512000000``, ``"512 MB"`` or ``"1.5GiB"``.

    Raises:
        ConfigError: it is not a positive size.
    """
    match = _SIZE.fullmatch(str(value).strip())
    unit = (match["unit"] or "") if match else ""
    base = 1024 if unit.endswith("i") else 1000
    power = _SIZE_POWERS[unit[:1].upper()]
    size = int(float(match["number"]) * base**power) if match else 0
    require(
        size > 0, f"{place} = {value!r} is not a size; write bytes, or text as '512 MB'"
    )
    return size


def rate_bytes_per_s(place: str, value: float | str) -> float:
    """Bytes/s of a rate such as ``12.5e6``, ``"100 Mbit/s"`` or ``"12.5 MB/s"``.

    Raises:
        ConfigError: it is not a rate from 1 kB/s to 1 TB/s.
    """
    rate = _rate(value) if isinstance(value, str) else float(value)
    low, high = _RATE_RANGE
    require(
        low <= rate <= high,
        f"{place} = {value!r} is not a rate of 1 kB/s to 1 TB/s; write bytes per second as"
        " a number, or text such as '100 Mbit/s' or '12.5 MB/s'",
    )
    return rate


def _rate(text: str) -> float:
    match = _RATE.fullmatch(text.strip())
    if match is None:
        return 0.0
    prefix = match["prefix"] or ""
    base = 1024 if prefix.endswith("i") else 1000
    bits = 1 if match["unit"] == "B" else 8
    scale: int = base ** _SIZE_POWERS[prefix[:1].upper()]
    return float(match["number"]) * scale / bits


def _value(text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _check_keys(info: inspect.Type, value: object, path: str) -> None:
    match info, value:
        case inspect.UnionType(), _:
            for option in info.types:
                _check_keys(option, value, path)
        case inspect.StructType(), dict():
            fields = {field.name: field.type for field in info.fields}
            for key, inner in value.items():
                if key not in fields:
                    place = f" in {_place(path + '.')}" if path else ""
                    raise ConfigError(f"unknown key {key!r}{place}; {nearest(key, fields)}")
                _check_keys(fields[key], inner, f"{path}.{key}")
        case inspect.DictType(), dict():
            for key, inner in value.items():
                _check_keys(info.value_type, inner, f"{path}.{key}")
        case inspect.VarTupleType(), list():
            for index, inner in enumerate(value):
                _check_keys(info.item_type, inner, f"{path}[{index}]")
        case _:
            pass


def _place(path: str) -> str:
    section, dot, key = path.removeprefix(".").partition(".")
    return f"[{section}] {key}".rstrip(" .") if dot else section
