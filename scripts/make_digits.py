"""Write coordinator/assets/digits.npz from scikit-learn's copy of the UCI digits.

The result is committed, so this is needed only to check where it comes from:

    python -m venv .cache/digits
    .cache/digits/bin/pip install scikit-learn==1.9.1
    .cache/digits/bin/python scripts/make_digits.py coordinator/assets/digits.npz
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def main(path: Path) -> None:
    """Write images [1797, 1, 8, 8] as uint8 in 0 ... 16 and labels [1797] as uint8."""
    digits = load_digits()
    images = digits.images.astype(np.uint8).reshape(-1, 1, 8, 8)
    if not np.array_equal(images.reshape(-1, 8, 8), digits.images):
        raise SystemExit("the pixels are not whole numbers: another version of the data?")
    np.savez_compressed(path, image=images, labels=digits.target.astype(np.uint8))
    print(f"{path}: {len(images)} images, {path.stat().st_size} B")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
