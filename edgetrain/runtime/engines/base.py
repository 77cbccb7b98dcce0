"""What the runtime needs of an inference engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

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
