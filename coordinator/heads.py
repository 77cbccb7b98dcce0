"""The heads of stages, before a run: trained on the model's source task, or as drawn."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from edgetrain.bundle import Bundle
from edgetrain.losses import hit_share
from edgetrain.manifest import GraphName, Manifest, Mode, Role, view
from edgetrain.optimizer_spec import LRSpec
from edgetrain.runtime.engines.base import Array, Engine, LoadedGraph
from edgetrain.runtime.engines.onnxruntime import OnnxRuntimeEngine
from edgetrain.runtime.optim.adam import Adam
from edgetrain.runtime.optim.lr import learning_rate
from edgetrain.runtime.parameters import Parameters
from edgetrain.samples import BatchOrder, Rows, Samples, evaluation_rows

log = logging.getLogger(__name__)

STEPS: Final = 150
BATCH: Final = 64
RATE: Final = LRSpec(3e-3, "cosine", total_steps=STEPS)
SCORED: Final = 1000  # samples, at most, on which trained heads are judged

Values = Mapping[str, Array]


class Shipment(NamedTuple):
    """Stages to deploy, and what the user should know of their heads."""

    bundles: list[Bundle]
    remarks: tuple[str, ...]


def ship(bundles: Sequence[Bundle], source: Samples | None, seed: int) -> Shipment:
    """Train the heads of all stages that have one, if there are samples to do so.

    The model stays as it is: its stages are run as deployed, and each head learns from
    what its stage makes. All heads learn in one pass.

    Args:
        bundles: of all stages, in order, with heads as they were drawn.
        source: samples of the task that the model was trained on.
        seed: of the order in which they are taken.
    """
    headed = [b.manifest for b in bundles if GraphName.HEAD in b.manifest.graphs]
    if source is None or not headed:
        at_random = [m.stage for m in headed if m.mode is Mode.LOCAL]
        return Shipment(list(bundles), _random_remark(at_random))
    engine = OnnxRuntimeEngine()
    trunk = _Trunk(bundles[: headed[-1].stage + 1], engine)
    heads = [_Head(bundles[m.stage], engine) for m in headed]
    log.info("training %d heads on %s", len(heads), source.source)
    for step, rows in enumerate(_batches(len(source), headed[0].microbatch, seed)):
        for part in rows:
            values, labels = trunk.run(source.take(part))
            for head in heads:
                head.add(values, labels)
        for head in heads:
            head.update(step)
    shipped = {head.manifest.stage: head.bundle for head in heads}
    remark = _trained_remark(heads, _scores(heads, trunk, source), source)
    return Shipment(
        [shipped.get(stage, bundle) for stage, bundle in enumerate(bundles)],
        (*source.remarks, remark),
    )


def _batches(samples: int, microbatch: int, seed: int) -> Iterator[tuple[Rows, ...]]:
    """The microbatches of each step; together `BATCH` samples, where there are so many."""
    count = max(1, min(-(-BATCH // microbatch), samples // microbatch))
    order = BatchOrder(samples, count * microbatch, count, seed, shuffle=True)
    for step in range(STEPS):
        yield tuple(order.rows(step, m) for m in range(count))


class _Trunk:
    """The stages up to the last one with a head, as deployed."""

    def __init__(self, bundles: Sequence[Bundle], engine: Engine) -> None:
        self._manifests = [bundle.manifest for bundle in bundles]
        self._graphs: list[LoadedGraph] = []
        for bundle in bundles:
            spec = bundle.manifest.graphs[GraphName.EVALUATE]
            held = Parameters(bundle).held(spec)
            self._graphs.append(engine.load(bundle.graphs[GraphName.EVALUATE], spec, held))

    def run(self, samples: Samples) -> tuple[Values, Array]:
        """All values that cross cuts, and the labels."""
        values = dict(samples.inputs)
        for graph in self._graphs:
            values |= graph.run(values)
        return values, samples.arrays()["labels"]


class _Head:
    """One head that learns, apart from its stage.

    Attributes:
        manifest: of its stage.
    """

    def __init__(self, bundle: Bundle, engine: Engine) -> None:
        self.manifest: Manifest = bundle.manifest
        self._bundle = bundle
        self._spec = bundle.manifest.graphs[GraphName.HEAD]
        ports = list(self._spec.ports(Role.WEIGHT))
        specs = {spec.name: spec for spec in bundle.manifest.weights}
        self._weights = [specs[port.key] for port in ports]
        self._flat = np.concatenate(
            [view(bundle.weights, spec).ravel() for spec in self._weights]
        )
        self._gradient, self._sum = np.zeros_like(self._flat), np.zeros_like(self._flat)
        self._count = 0
        held = dict(self._parts(self._flat))
        gradients = self._parts(self._gradient)
        held |= {p.name: gradients[p.key] for p in self._spec.ports(Role.GRADIENT)}
        self._graph = engine.load(bundle.graphs[GraphName.HEAD], self._spec, held)
        self._adam = Adam(self._flat.size)

    @property
    def bundle(self) -> Bundle:
        """The stage's, with the head as it is now."""
        weights = self._bundle.weights.copy()
        parts = self._parts(self._flat)
        for spec in self._weights:
            view(weights, spec)[...] = parts[spec.name]
        return replace(self._bundle, weights=weights)

    def add(self, values: Values, labels: Array) -> None:
        """Add a microbatch's gradient."""
        self._graph.run({**values, "labels": labels})
        self._sum += self._gradient
        self._count += 1

    def update(self, step: int) -> None:
        """Take an optimizer step with the mean of what was added."""
        self._sum /= np.float32(self._count)
        self._adam.step(self._flat, self._sum, learning_rate(RATE, step))
        self._sum[...] = 0
        self._count = 0

    def judge(self, values: Values, labels: Array) -> Array:
        """Of each sample, the share of labels hit; its loss where labels are no classes."""
        results = self._graph.run({**values, "labels": labels})
        role = Role.OUTPUT if labels.dtype.kind == "i" else Role.LOSS
        found = next(results[p.name] for p in self._spec.outputs if p.role is role)
        if role is Role.LOSS:
            return found
        return hit_share(found, labels, self.manifest.loss_options)

    def _parts(self, flat: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[np.float32]]:
        """Views of a flat buffer, by the weight's name."""
        parts, start = {}, 0
        for spec in self._weights:
            parts[spec.name] = flat[start : start + spec.elements].reshape(spec.shape)
            start += spec.elements
        return parts


def _scores(heads: Sequence[_Head], trunk: _Trunk, source: Samples) -> list[float]:
    """The mean of what each head is judged by."""
    samples = min(SCORED, len(source))
    totals = [0.0] * len(heads)
    for rows, count in evaluation_rows(samples, heads[0].manifest.microbatch):
        values, labels = trunk.run(source.take(rows))
        for index, head in enumerate(heads):
            totals[index] += float(head.judge(values, labels)[:count].sum())
    return [total / samples for total in totals]


def _trained_remark(
    heads: Sequence[_Head], scores: Sequence[float], source: Samples
) -> str:
    labels = heads[0].manifest.labels
    classes = labels is not None and not labels.is_float
    texts = [f"{score:.1%}" if classes else f"{score:.3g}" for score in scores]
    told = "they label so much of it right" if classes else "their mean losses there are"
    return (
        f"{_stages([head.manifest.stage for head in heads])}: the heads were trained for"
        f" {STEPS} steps on {len(source):,} samples of {source.source}, the model as it is;"
        f" {told}: {', '.join(texts)}."
    )


def _random_remark(stages: Sequence[int]) -> tuple[str, ...]:
    if not stages:
        return ()
    remark = (
        f"{_stages(stages)}: the heads begin at random. Where the model comes trained, a"
        " local stage then usually does worse than a frozen one: give [model] source, a"
        " file with samples of the task it was trained on, or set gradient to 'frozen'."
    )
    return (remark,)


def _stages(numbers: Sequence[int]) -> str:
    return f"Stage{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
