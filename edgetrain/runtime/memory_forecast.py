"""How much memory a stage will take while it trains, told from its manifest."""

from __future__ import annotations

import msgspec

from edgetrain.estimator_spec import WEIGHTS
from edgetrain.manifest import CARRYING, Manifest, Mode
from edgetrain.optimizer_spec import OptimizerSpec
from edgetrain.runtime.fallback import gated
from edgetrain.runtime.parameters import commits_kept
from edgetrain.tensors import TensorSpec


def required_bytes(
    manifest: Manifest, optimizer: OptimizerSpec, stash_microbatches: int
) -> int:
    """What a stage needs while it trains, without the engine and its temporaries.

    Args:
        manifest: of the stage.
        optimizer: decides the bytes of state a weight.
        stash_microbatches: the most that the schedule keeps at once.

    Returns:
        Weights, earlier commits and perhaps a perturbed copy; gradient, scratch and
        optimizer state, and the deployed weights if kept; for each microbatch in flight
        its stash and what crosses the cuts; and for one more what crosses the cuts and what
        the largest graph gives. The stash is exact; of the portable graphs and the fast
        path, the larger.
    """
    states = optimizer_states(optimizer)
    copies = commits_kept(manifest) + moved_copies(manifest)
    trained = 2 + states + gated(manifest)
    buffers = copies * manifest.elements + trained * manifest.trainable_elements
    rays = (*manifest.rays.received, *manifest.rays.slopes_in)
    crossing = sum(s.nbytes for s in (*manifest.receives, *manifest.downstream, *rays))
    given = max(
        sum(TensorSpec(p.name, p.dtype, p.shape).nbytes for p in spec.outputs)
        for spec in manifest.all_graphs.values()
    )
    stash = manifest.stash_bytes
    if manifest.fast is not None:
        fast = msgspec.structs.replace(manifest, graphs=manifest.fast.graphs)
        stash = max(stash, fast.stash_bytes)
    return 4 * buffers + (stash + crossing) * stash_microbatches + crossing + given


def moved_copies(manifest: Manifest) -> int:
    """Copies of the weights with noise added, where weights are perturbed."""
    perturbs = manifest.inner is Mode.HYBRID or manifest.mode in CARRYING
    return int(perturbs and manifest.estimator.noise == WEIGHTS)


def optimizer_states(optimizer: OptimizerSpec) -> int:
    """How many numbers an optimizer keeps a weight."""
    return {"sgd": 1 if optimizer.momentum else 0}.get(optimizer.name, 2)
