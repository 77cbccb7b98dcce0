"""The bundle: the finished graphs of one stage, its weights, and what each tensor is.

A bundle is the contract between compiler and device. It names plain ONNX graphs; any
engine that runs them can take part. This module does not know ONNX.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from edgetrain.errors import BundleError, ConfigError
from edgetrain.manifest import FAST, FORMAT, FastPath, Manifest

MAX_BUNDLE_BYTES: Final = 1 << 31


class _Packed(msgspec.Struct, frozen=True):
    manifest: Manifest
    graphs: dict[str, bytes]
    weights: bytes


@dataclass(frozen=True, slots=True)
class Bundle:
    """A stage's manifest, its graphs as serialized ONNX, and its flat weights."""

    manifest: Manifest
    graphs: Mapping[str, bytes]
    weights: npt.NDArray[np.float32]

    @property
    def fast(self) -> Bundle | None:
        """The same stage on the fast path's graphs alone; None where it has none."""
        path = self.manifest.fast
        if path is None:
            return None
        manifest = msgspec.structs.replace(self.manifest, graphs=path.graphs, fast=None)
        graphs = {name: self.graphs[FAST + name] for name in path.graphs}
        return Bundle(manifest, graphs, self.weights)

    def with_fast(self, other: Bundle, block: int) -> Bundle:
        """This bundle with the graphs of `other`, of the same stage, as its fast path."""
        path = FastPath(block, other.manifest.graphs)
        manifest = msgspec.structs.replace(self.manifest, fast=path)
        graphs = {FAST + name: data for name, data in other.graphs.items()}
        return Bundle(manifest, {**self.graphs, **graphs}, self.weights)

    def encode(self) -> bytes:
        weights = np.ascontiguousarray(self.weights, dtype=np.float32)
        packed = _Packed(self.manifest, dict(self.graphs), weights.tobytes())
        return msgspec.msgpack.encode(packed)

    @classmethod
    def decode(cls, data: bytes) -> Bundle:
        """Parse and check a bundle.

        Raises:
            BundleError: not a bundle, of another format, or a part does not match its hash.
        """
        try:
            packed = msgspec.msgpack.decode(data, type=_Packed)
        except (msgspec.DecodeError, ConfigError) as error:
            raise BundleError(f"not a bundle: {error}") from error
        manifest = packed.manifest
        if manifest.format != FORMAT:
            raise BundleError(
                f"bundle format {manifest.format}, this agent reads {FORMAT}:"
                " install the same edgetrain on coordinator and device"
            )
        if len(packed.weights) != 4 * manifest.elements:
            raise BundleError(
                f"{len(packed.weights)} B of weights for {manifest.elements} elements"
            )
        _check_graphs(manifest, packed.graphs)
        _check_layout(manifest)
        return cls(
            manifest, packed.graphs, np.frombuffer(packed.weights, np.float32).copy()
        )


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _check_graphs(manifest: Manifest, graphs: Mapping[str, bytes]) -> None:
    specs = manifest.all_graphs
    if set(graphs) != set(specs):
        raise BundleError(f"graphs {sorted(graphs)}, manifest {sorted(specs)}")
    for name, data in graphs.items():
        if sha256(data) != specs[name].sha256:
            raise BundleError(f"graph {name!r} does not match its hash: damaged or altered")


def _check_layout(manifest: Manifest) -> None:
    for spec in manifest.weights:
        limit = manifest.trainable_elements if spec.trainable else manifest.elements
        if min(spec.shape, default=1) < 0 or spec.offset < 0:
            raise BundleError(f"weight {spec.name!r} has a negative extent")
        if spec.offset + spec.elements > limit:
            raise BundleError(f"weight {spec.name!r} lies outside the flat buffer")
