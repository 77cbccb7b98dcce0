"""The bundle: the finished graphs of one stage, its weights, and what each tensor is.

A bundle is the contract between compiler and device. It names plain ONNX graphs; any
engine that runs them can take part. This module does not know ONNX.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from edgetrain.errors import BundleError, ConfigError
from edgetrain.manifest import FAST, FORMAT, FastPath, Manifest
from edgetrain.stage_state import Arrays, PackedArray, StageState, pack, unpack

MAX_BUNDLE_BYTES: Final = 1 << 31


class _Packed(msgspec.Struct, frozen=True):
    manifest: Manifest
    graphs: dict[str, bytes]
    weights: bytes
    optimizer: dict[str, PackedArray] = {}
    first_step: int = 0


@dataclass(frozen=True, slots=True)
class Bundle:
    """A stage's manifest, its graphs as serialized ONNX, and its flat weights.

    Attributes:
        optimizer: its state, in a run that has begun; empty at its start.
        first_step: the step that comes next, from 0.
    """

    manifest: Manifest
    graphs: Mapping[str, bytes]
    weights: npt.NDArray[np.float32]
    optimizer: Arrays = field(default_factory=dict)
    first_step: int = 0

    @property
    def fast(self) -> Bundle | None:
        """The same stage on the fast path's graphs alone; None where it has none."""
        path = self.manifest.fast
        if path is None:
            return None
        manifest = msgspec.structs.replace(self.manifest, graphs=path.graphs, fast=None)
        graphs = {name: self.graphs[FAST + name] for name in path.graphs}
        return replace(self, manifest=manifest, graphs=graphs)

    def with_fast(self, other: Bundle, block: int) -> Bundle:
        """This bundle with the graphs of `other`, of the same stage, as its fast path."""
        path = FastPath(block, other.manifest.graphs)
        manifest = msgspec.structs.replace(self.manifest, fast=path)
        graphs = {FAST + name: data for name, data in other.graphs.items()}
        return replace(self, manifest=manifest, graphs={**self.graphs, **graphs})

    def resumed(self, state: StageState) -> Bundle:
        """This bundle with a state of the same stage in place of its own."""
        return replace(
            self,
            weights=state.weights,
            optimizer=state.optimizer,
            first_step=state.steps,
        )

    def encode(self) -> bytes:
        weights = np.ascontiguousarray(self.weights, dtype=np.float32)
        packed = _Packed(
            self.manifest,
            dict(self.graphs),
            weights.tobytes(),
            pack(self.optimizer),
            self.first_step,
        )
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
        weights = np.frombuffer(packed.weights, np.float32).copy()
        if packed.first_step < 0:
            raise BundleError(f"a bundle for step {packed.first_step}: steps count from 0")
        optimizer = unpack(packed.optimizer, manifest)
        return cls(manifest, packed.graphs, weights, optimizer, packed.first_step)


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
