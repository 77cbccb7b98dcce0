"""A model's weights as the stages hand them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from edgetrain.errors import RunError
from edgetrain.manifest import HEAD, Manifest, view
from edgetrain.wire.reassembly import Message

Weights = dict[str, npt.NDArray[np.float32]]


def unpack(manifest: Manifest, message: Message) -> Weights:
    """The weights of one stage.

    Raises:
        WireError: the message is not as long as they are.
    """
    flat: npt.NDArray[Any] = message.array((manifest.elements,))
    return {spec.name: view(flat, spec).copy() for spec in manifest.weights}


def merged(base: Mapping[str, npt.NDArray[np.float32]], trained: Weights) -> Weights:
    """All weights of a model: the trained ones, and the rest as they were.

    Those of heads, which only training needed, are dropped.
    """
    trained = {n: w for n, w in trained.items() if n in base or not n.startswith(HEAD)}
    unknown = trained.keys() - base.keys()
    if unknown:
        raise RunError(f"weights that the model does not have: {sorted(unknown)}")
    return {**base, **trained}
