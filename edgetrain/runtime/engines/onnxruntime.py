"""ONNX Runtime: the only door to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from edgetrain.arena import ARENA, settings
from edgetrain.errors import EngineError
from edgetrain.manifest import GraphSpec, Port, Role
from edgetrain.runtime.engines.base import Array, Seen
from edgetrain.runtime.engines.blocks import block_width
from edgetrain.runtime.engines.profile import seen

CPU: Final = "CPUExecutionProvider"
# They put one kernel in place of several nodes, with other rounding, wherever nobody reads
# the values between. Then what a stage stashes would decide the bits of what it computes.
REGROUPING: Final = (
    "BiasGeluFusion",
    "BiasSkipLayerNormFusion",
    "BiasSoftmaxFusion",
    "ConvAddActivationFusion",
    "DivMulFusion",
    "FastGeluFusion",
    "GeluFusionL1",
    "GeluFusionL2",
    "GemmSumFusion",
    "LayerNormFusionL1",
    "LayerNormFusionL2",
    "MatMulScaleFusion",
    "QuickGeluFusion",
    "SimplifiedLayerNormFusion",
    "SkipLayerNormFusion",
    "SwiGluFusion",
)
# It puts one Reshape in place of two, to save a node that moves nothing. But what it puts
# in is listed last, and where that gives a gradient, it runs before gradients whose
# cotangents are already there: on some networks twice the memory.
RELISTING: Final = ("ReshapeFusion",)
_ERRORS: Final[tuple[type[Exception], ...]] = (
    RuntimeError,
    ValueError,
    *(
        kind
        for kind in vars(ort_state).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ),
)


class OnnxRuntimeEngine:
    """The stock inference runtime, tuned for one stage a process.

    Its defaults, all cores and spinning threads, are two to four times slower where several
    processes share a machine; one thread and no spinning is ours, unless a device's profile
    says what is better there.

    Args:
        threads: for one operator.
        spinning: threads burn time while they wait for each other, to answer sooner.
        providers: execution providers, most wanted first; the CPU is the last resort.
    """

    name = "onnxruntime"

    def __init__(
        self, *, threads: int = 1, spinning: bool = False, providers: Sequence[str] = ()
    ) -> None:
        self.threads = threads
        self.spinning = spinning
        offered = ort.get_available_providers()
        self.providers = tuple(p for p in (*providers, CPU) if p in offered)

    @cached_property
    def block(self) -> int:
        """Channels in a block of its own layout on this processor; 0: it has none."""
        return block_width(lambda graph, spec: self.load(graph, spec, {}))

    @property
    def version(self) -> str:
        return str(ort.__version__)

    def load(
        self, graph: bytes, spec: GraphSpec, held: Mapping[str, npt.NDArray[np.float32]]
    ) -> OnnxRuntimeGraph:
        """See `Engine.load`."""
        options = self._options()
        if ARENA.claim(__name__, _share_arena):
            options.add_session_config_entry("session.use_env_allocators", "1")
        return OnnxRuntimeGraph(self._session(graph, options), spec, held)

    def measure(self, graph: bytes, spec: GraphSpec) -> Seen | None:
        """See `Measuring.measure`; in a session of its own, with an arena of its own."""
        options = self._options()
        options.enable_profiling = True
        try:
            with TemporaryDirectory() as folder:
                options.profile_file_prefix = str(Path(folder) / "run")
                session = self._session(graph, options)
                _run_on_zeros(session, spec)
                return seen(Path(session.end_profiling()).read_bytes())
        except (OSError, EngineError):
            return None

    def _options(self) -> ort.SessionOptions:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        # Both trade memory for time that they do not save here: reuse keeps a buffer for
        # the next value of its very shape instead of freeing it, and a pattern lays out
        # all values of a run in one block.
        options.enable_mem_reuse = False
        options.enable_mem_pattern = False
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        spins = "1" if self.spinning else "0"
        options.add_session_config_entry("session.intra_op.allow_spinning", spins)
        return options

    def _session(self, graph: bytes, options: ort.SessionOptions) -> ort.InferenceSession:
        try:
            return ort.InferenceSession(
                graph,
                options,
                providers=list(self.providers),
                disabled_optimizers=(*REGROUPING, *RELISTING),
            )
        except _ERRORS as error:
            raise EngineError(f"ONNX Runtime cannot load the graph: {error}") from error


def _run_on_zeros(session: ort.InferenceSession, spec: GraphSpec) -> None:
    """Once; gradients go to memory of ours, all other results to the engine's."""
    binding = session.io_binding()
    fed = [(port, np.zeros(port.shape, port.dtype)) for port in spec.inputs]
    for port, array in fed:
        _bind(binding.bind_input, port, array)
    written = []
    for port in spec.outputs:
        if port.role is Role.GRADIENT:
            written.append(np.empty(port.shape, port.dtype))
            _bind(binding.bind_output, port, written[-1])
        else:
            binding.bind_output(port.name, "cpu")
    try:
        session.run_with_iobinding(binding)
    except _ERRORS as error:
        raise EngineError(f"ONNX Runtime failed to run the graph: {error}") from error


def _share_arena() -> None:
    """Let all sessions of the process draw on one arena.

    Otherwise each keeps one of its own, the sum of what each graph ever needed; and it
    doubles when it is full, where this one grows by what is asked for.
    """
    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    with suppress(*_ERRORS):  # the program around us was here first: one serves all
        ort.create_and_register_allocator(memory, ort.OrtArenaCfg(settings()))


class OnnxRuntimeGraph:
    """A session with its bindings; holds on to the memory it was given."""

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: GraphSpec,
        held: Mapping[str, npt.NDArray[np.float32]],
    ) -> None:
        self._session = session
        self._spec = spec
        self._binding = session.io_binding()
        self._held = dict(held)
        self._inputs = [port for port in spec.inputs if port.name not in held]
        self._outputs = [port for port in spec.outputs if port.name not in held]
        for port in spec.inputs:
            if port.name in held:
                _bind(self._binding.bind_input, port, held[port.name])
        for port in spec.outputs:
            if port.name in held:
                _bind(self._binding.bind_output, port, held[port.name])

    def holding(self, held: Mapping[str, npt.NDArray[np.float32]]) -> OnnxRuntimeGraph:
        """See `LoadedGraph.holding`."""
        return OnnxRuntimeGraph(self._session, self._spec, held)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """See `LoadedGraph.run`."""
        kept = []
        for port in self._inputs:
            array = feeds.get(port.name)
            if array is None:
                raise EngineError(f"input {port.name!r} of the graph is not fed")
            if array.dtype != port.dtype or array.shape != port.shape:
                raise EngineError(
                    f"input {port.name!r} is {array.dtype}{list(array.shape)},"
                    f" the graph takes {port.dtype}{list(port.shape)}"
                )
            array = np.ascontiguousarray(array).reshape(port.shape)
            kept.append(array)
            _bind(self._binding.bind_input, port, array)
        results: dict[str, Array] = {}
        for port in self._outputs:
            results[port.name] = np.empty(port.shape, port.dtype)
            _bind(self._binding.bind_output, port, results[port.name])
        try:
            self._session.run_with_iobinding(self._binding)
        except _ERRORS as error:
            raise EngineError(f"ONNX Runtime failed to run the graph: {error}") from error
        return results


def _bind(bind: Callable[..., None], port: Port, array: Array) -> None:
    """Let the engine read or write an array in place; it keeps only the address."""
    address = array.ctypes.data
    bind(port.name, "cpu", 0, array.dtype.type, list(port.shape), address)
