"""Files that hold secrets: written whole, and never readable by others for a moment."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from edgetrain.errors import ConfigError

SECRET_MODE: Final = 0o600
PUBLIC_MODE: Final = 0o644
FOLDER_MODE: Final = 0o700


def write_file(path: Path, data: bytes, mode: int = PUBLIC_MODE) -> None:
    """Write or replace a file at once: whoever reads it sees the old one or the new one.

    Raises:
        ConfigError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        try:
            with open(os.open(temporary, flags, SECRET_MODE), "wb") as file:  # noqa: PTH123
                os.fchmod(file.fileno(), mode)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror or error})"
        ) from error


def make_folder(path: Path) -> None:
    """Make a folder that only its owner can enter.

    Raises:
        ConfigError: it is there already, or cannot be made.
    """
    try:
        path.mkdir(mode=FOLDER_MODE, parents=True)
        path.chmod(FOLDER_MODE)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be made ({error.strerror or error})") from error


def read_file(path: Path) -> bytes:
    """The file's content.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes of this program from changing the folder meanwhile.

    Raises:
        ConfigError: there is no such folder, or another process is at it.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be opened ({error.strerror or error})"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ConfigError(
            f"{folder}: another `edgetrain fleet` is changing it; try again when it is done"
        ) from error
    finally:
        os.close(handle)
