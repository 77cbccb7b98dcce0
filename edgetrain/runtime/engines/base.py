"""What the runtime needs of an inference engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from edgetrain.manifest import GraphSpec

Array = npt.NDArray[Any]


class LoadedGraph(Protocol):
    """A graph that is ready to run."""

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once.

        Args:
            feeds: a C-contiguous array for every input that is not held, by graph name;
                further names are ignored.

        Returns:
            Every output that is not held, in memory of its own.

        Raises:
            EngineError: the engine refuses the feeds or fails.
        """
        ...

    def holding(self, held: Mapping[str, npt.NDArray[np.float32]]) -> LoadedGraph:
        """The same graph, loaded once, on other held memory."""
        ...


class Engine(Protocol):
    """Loads graphs."""

    @property
    def name(self) -> str: ...

    def load(
        self, graph: bytes, spec: GraphSpec, held: Mapping[str, npt.NDArray[np.float32]]
    ) -> LoadedGraph:
        """Load a graph.

        Args:
            graph: serialized.
            spec: its inputs and outputs.
            held: memory that inputs are read from and outputs written to at every run,
                without a copy: weights and gradients. Graphs may hold the same memory.

        Raises:
            EngineError: the engine cannot run it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Seen:
    """What one run of a graph took of the engine's allocator, above what it held before.

    Attributes:
        tensor_bytes: the most in tensors: counted after each node, when its outputs are
            there and its inputs are not yet freed.
        engine_bytes: the most at any moment, with what kernels needed inside.
    """

    tensor_bytes: int
    engine_bytes: int


@runtime_checkable
class Measuring(Protocol):
    """An engine that can tell what a run takes."""

    def measure(self, graph: bytes, spec: GraphSpec) -> Seen | None:
        """Run a graph once, on zeros, and see what its temporaries and outputs take.

        Gradients, which a stage has written to memory of its own, are not part of it.

        Returns:
            The same every time; None where it cannot tell.
        """
        ...


@runtime_checkable
class Counting(Protocol):
    """An engine that counts memory held while its graphs run."""

    def note(self, arrays: Iterable[Array]) -> None:
        """Count arrays that no graph takes or gives, for as long as they are there."""
        ...
