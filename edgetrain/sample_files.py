"""Read samples from .npz, .npy and .csv files."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from edgetrain.errors import DataError
from edgetrain.samples import Array, Samples

LABELS: Final = "labels"
LONE_INPUT: Final = "input"


def load(path: Path, *, input_name: str = LONE_INPUT) -> Samples:
    """Read a data set; nothing in a file is ever executed (no pickles).

    .npz: arrays named as the model's inputs, and ``labels``.
    .npy: the one input; ``NAME.labels.npy`` beside it holds the labels.
    .csv: a header row, then a sample a row: the column named ``label`` or ``labels``, else
    the last, is the label; the others are the one input, float32 [samples, columns].

    Args:
        path: of the file.
        input_name: of the input, where the file names none.

    Raises:
        DataError: the file is missing, damaged or of another kind.
    """
    kind = path.suffix.lower()
    if kind not in _READERS:
        raise DataError(
            f"{path}: cannot read {kind or 'a file without an ending'} as data; give .npz,"
            " .npy or .csv"
        )
    try:
        return _READERS[kind](path, input_name)
    except DataError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{path}: cannot be read ({reason}); check the path") from error
    except Exception as error:  # of damaged bytes numpy and zipfile raise nearly anything
        reason = " ".join(str(error).split())
        raise DataError(
            f"{path}: damaged, too large, or of another kind than its name says: {reason}"
        ) from error


def _read_npz(path: Path, input_name: str) -> Samples:
    del input_name  # its arrays have names
    with path.open("rb") as file:  # np.load would leave a damaged one open
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DataError(f"{path}: is one array, not an archive; name it .npy")
        arrays = {name: _plain(path, archive[name]) for name in archive.files}
    labels = arrays.pop(LABELS, None)
    if not arrays:
        raise DataError(f"{path}: holds no input arrays; name them as the model's inputs")
    return Samples(arrays, labels, str(path))


def _read_npy(path: Path, input_name: str) -> Samples:
    labels_path = path.with_suffix(".labels.npy")
    if path.exists() and not labels_path.exists():
        raise DataError(
            f"{path}: holds inputs only; put the labels beside it as {labels_path.name}, or"
            " save both into one .npz: np.savez('data.npz', INPUT=x, labels=y)"
        )
    arrays = [_plain(p, np.load(p, allow_pickle=False)) for p in (path, labels_path)]
    return Samples({input_name: arrays[0]}, arrays[1], str(path))


def _plain(path: Path, value: object) -> Array:
    if not isinstance(value, np.ndarray) or value.dtype.names:
        raise DataError(f"{path}: holds something else than plain arrays of numbers")
    return value


def _read_csv(path: Path, input_name: str) -> Samples:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file)
        header = [column.strip() for column in next(rows, [])]
        numbers = [_row(path, rows.line_num, header, row) for row in rows if row]
    if len(header) < 2 or not numbers:
        raise DataError(
            f"{path}: needs a header row, two columns or more, and at least one sample"
        )
    names = [column.lower() for column in header]
    named = [names.index(name) for name in ("labels", "label") if name in names]
    column = named[0] if named else len(names) - 1
    table = np.array(numbers, np.float64)
    with np.errstate(over="ignore"):  # what overflows becomes infinite and is refused later
        inputs = np.delete(table, column, axis=1).astype(np.float32)
    return Samples({input_name: inputs}, _whole(table[:, column]), str(path))


def _row(path: Path, line: int, header: list[str], row: list[str]) -> list[float]:
    if len(row) != len(header):
        raise DataError(
            f"{path}: line {line} has {len(row)} columns, the header has {len(header)}"
        )
    try:
        return [float(cell) for cell in row]
    except ValueError:
        cells = zip(header, row, strict=True)
        column, cell = next((c, v) for c, v in cells if not _is_number(v))
        raise DataError(
            f"{path}: line {line}, column {column!r}: {cell!r} is not a number; encode"
            " words as numbers first, classes as 0, 1, 2, ..."
        ) from None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _whole(labels: Array) -> Array:
    """int64 where all labels are whole numbers, else float32."""
    if np.isfinite(labels).all() and (np.abs(labels) < 2**53).all():
        whole = labels.astype(np.int64)
        if np.array_equal(whole, labels):
            return whole
    return labels.astype(np.float32)


_READERS: Final[Mapping[str, Callable[[Path, str], Samples]]] = {
    ".npz": _read_npz,
    ".npy": _read_npy,
    ".csv": _read_csv,
}
