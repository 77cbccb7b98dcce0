"""How much activation memory a stage will take while it trains, told from its manifest."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from edgetrain.estimator_spec import ACTIVATIONS, JVP
from edgetrain.manifest import SEGMENTED, GraphName, GraphSpec, Manifest, Mode, Port, Role
from edgetrain.runtime.parameters import RUN_AHEAD
from edgetrain.tensors import TensorSpec


def activation_bytes(manifest: Manifest, in_flight: int) -> int:
    """The most that a stage's activations take at once while it trains.

    Counted are the stash of all microbatches in flight, what the running graph takes, what
    is held between two graphs, and what crosses the cuts. Of what was sent, all that
    belongs to microbatches in flight may still wait for a slow link, and one cotangent
    more. Not counted are what arrives before its turn, what numpy needs for a moment, and
    what waits for its receipt.

    Args:
        manifest: of the stage; of the portable graphs and the fast path, the larger counts.
        in_flight: the most microbatches that the schedule keeps at once.
    """
    if manifest.fast is not None:
        portable, fast = (
            msgspec.structs.replace(manifest, graphs=graphs, fast=None)
            for graphs in (manifest.graphs, manifest.fast.graphs)
        )
        return max(activation_bytes(portable, in_flight), activation_bytes(fast, in_flight))
    kept = {spec.name for spec in manifest.stashed}
    received, sent = _total(manifest.receives), _total(manifest.sends)
    queued = _total(spec for spec in manifest.sends if spec.name not in kept)
    returned = _returned(manifest)
    arriving = _total(s for s in manifest.sends if s.name in manifest.cotangents_in)
    arriving += manifest.labels.nbytes if manifest.labels else 0
    stash = manifest.stash_bytes
    segmented = manifest.mode in SEGMENTED
    backward = _estimating(manifest) if segmented else _exact(manifest)
    forward = received + max(_work(manifest, GraphName.FORWARD), sent)
    others = (in_flight - 1) * max(stash + queued, returned)
    return others + returned + max(forward, stash + arriving + max(backward, returned))


def activation_bytes_in_run(manifest: Manifest, in_flight: int) -> int:
    """With what was sent in steps before and is kept until its receipt, at the most.

    It is kept to be sent again if it is lost. Where links are fast next to steps it is next
    to nothing.
    """
    sent = max(_total(manifest.sends), _returned(manifest))
    return activation_bytes(manifest, in_flight) + RUN_AHEAD * in_flight * sent


def work_bytes(spec: GraphSpec) -> int:
    """What one run takes beside its inputs, gradients apart."""
    return max(spec.peak_bytes, given_bytes(spec))


def given_bytes(spec: GraphSpec) -> int:
    """What one run gives, gradients apart."""
    return _ports(port for port in spec.outputs if port.role is not Role.GRADIENT)


def _exact(manifest: Manifest) -> int:
    """For a backward graph, beside the stash and what arrives."""
    return max(_work(manifest, name) for name in (GraphName.LOSS, GraphName.BACKWARD))


def _estimating(manifest: Manifest) -> int:
    """For a stage that is run again segment by segment, as `_exact`."""
    criterion = manifest.graphs.get(GraphName.CRITERION)
    ends = _total(s for s in manifest.sends if s.name in manifest.cotangents_in)
    held = 0
    if criterion is not None:
        ends = _ports(criterion.ports(Role.COTANGENT))
        held = given_bytes(criterion)
    estimator = manifest.estimator
    if manifest.mode is not Mode.HYBRID:
        return held + max(_work(manifest, GraphName.CRITERION), _contracting(manifest, 0))
    returned = _returned(manifest)
    if estimator.noise != ACTIVATIONS:
        forward = manifest.graphs[GraphName.FORWARD]
        moving = _total(manifest.receives) + given_bytes(forward) + work_bytes(forward)
        return held + returned + max(moving, _contracting(manifest, 0))
    pushing = _pushing(manifest)
    if estimator.form != JVP:
        units = (unit for segment in manifest.segments for unit in segment.units)
        pushing += _total(TensorSpec(u.name, u.dtype, u.shape) for u in units)
        pushing += _total(manifest.receives) + ends
    draws = estimator.most_tangents
    held += draws * ends
    return held + max(
        pushing + returned, _contracting(manifest, draws), (draws + 1) * returned
    )


def _pushing(manifest: Manifest) -> int:
    return _walking(manifest, [segment.push for segment in manifest.segments], 0)


def _contracting(manifest: Manifest, draws: int) -> int:
    return _walking(manifest, [segment.contract for segment in manifest.segments], draws)


def _walking(manifest: Manifest, names: list[str], draws: int) -> int:
    """Running these graphs one after another, with values held as long as one needs them.

    Args:
        manifest: of the stage.
        names: one a segment; empty: none.
        draws: of noise at the units, held while their segment runs.
    """
    graphs = manifest.graphs
    later = [
        {
            p.key
            for s in manifest.segments[n:]
            for g in (s.push, s.contract)
            if g
            for p in graphs[g].inputs
        }
        for n in range(1, len(names) + 1)
    ]
    stashed = {spec.name for spec in manifest.stashed}
    live: dict[tuple[str, Role], int] = {}
    most = 0
    for segment, name, wanted in zip(manifest.segments, names, later, strict=True):
        if name not in graphs:
            continue
        spec = graphs[name]
        fed = {
            (p.key, p.role): _ports([p])
            for p in spec.inputs
            if p.role is not Role.WEIGHT and p.key not in stashed
        }
        units = (TensorSpec(u.name, u.dtype, u.shape) for u in segment.units)
        held = sum((live | fed).values()) + draws * _total(units)
        most = max(most, held + work_bytes(spec))
        made = (p for p in spec.outputs if p.role is not Role.GRADIENT)
        live |= {(p.key, p.role): _ports([p]) for p in made}
        live = {key: size for key, size in live.items() if key[0] in wanted}
    return most


def _returned(manifest: Manifest) -> int:
    return _total(s for s in manifest.receives if s.name in manifest.cotangents_out)


def _work(manifest: Manifest, name: str) -> int:
    return work_bytes(manifest.graphs[name]) if name in manifest.graphs else 0


def _ports(ports: Iterable[Port]) -> int:
    return _total(TensorSpec(port.name, port.dtype, port.shape) for port in ports)


def _total(specs: Iterable[TensorSpec]) -> int:
    return sum(spec.nbytes for spec in specs)
