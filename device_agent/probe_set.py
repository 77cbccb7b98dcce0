"""The graphs that a probe measures: one file of the package, made by the compiler.

Each case is a middle stage of nothing but operators of one group, as the compiler makes it
for a pipeline, so that what is measured is what a run will do. Weights are drawn here: the
file holds none.
"""

from __future__ import annotations

import zlib
from importlib import resources
from typing import Final

import msgspec
import numpy as np

from edgetrain.bundle import Bundle, sha256
from edgetrain.errors import BundleError
from edgetrain.manifest import GraphSpec, Manifest
from edgetrain.op_groups import Amount

FILE: Final = "probe_graphs.bin"
MAX_SET_BYTES: Final = 1 << 25
SPREAD: Final = 0.05  # of the weights; what they are does not matter to the time


class ProbeCase(msgspec.Struct, frozen=True):
    """One case at one batch size.

    Attributes:
        manifests: of its stage, by the width of the engine's blocks; 0: portable.
        constant: a forward whose weights are constants, for comparison; None: not here.
    """

    name: str
    group: str
    batch: int
    amount: Amount
    manifests: dict[int, Manifest]
    constant: GraphSpec | None = None


class ProbeSet(msgspec.Struct, frozen=True):
    """All cases, and their graphs by hash."""

    cases: tuple[ProbeCase, ...]
    graphs: dict[str, bytes]

    def bundle(self, case: ProbeCase, block: int) -> Bundle:
        """The stage of a case for a device of this block width, with weights."""
        manifest = case.manifests.get(block, case.manifests[0])
        graphs = {name: self.graphs[s.sha256] for name, s in manifest.all_graphs.items()}
        generator = np.random.Generator(np.random.Philox(0))
        weights = SPREAD * generator.standard_normal(manifest.elements, np.float32)
        return Bundle(manifest, graphs, np.abs(weights))

    def encode(self) -> bytes:
        return zlib.compress(msgspec.msgpack.encode(self), 9)

    @classmethod
    def decode(cls, data: bytes) -> ProbeSet:
        """Parse and check a set.

        Raises:
            BundleError: it is damaged.
        """
        try:
            stream = zlib.decompressobj()
            plain = stream.decompress(data, MAX_SET_BYTES)
            found = msgspec.msgpack.decode(plain, type=cls)
        except (zlib.error, msgspec.DecodeError) as error:
            raise BundleError(f"the probe's graphs are damaged: {error}") from error
        for digest, graph in found.graphs.items():
            if sha256(graph) != digest:
                raise BundleError("the probe's graphs are damaged: install edgetrain again")
        return found


def load() -> ProbeSet:
    """The set that comes with the package."""
    return ProbeSet.decode((resources.files("device_agent") / "assets" / FILE).read_bytes())
