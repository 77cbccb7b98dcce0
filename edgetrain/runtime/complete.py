"""Whether a stage came with all the graphs that its gradient mode runs."""

from __future__ import annotations

from edgetrain.errors import BundleError
from edgetrain.manifest import DECOUPLED, SEGMENTED, GraphName, Manifest


def check_complete(manifest: Manifest) -> None:
    """Refuse a manifest that lacks the graphs its mode needs.

    Raises:
        BundleError: naming the graph.
    """
    if GraphName.EVALUATE not in manifest.graphs:
        raise BundleError(f"stage {manifest.stage} has no graph 'evaluate'")
    if manifest.mode in SEGMENTED and GraphName.FORWARD not in manifest.graphs:
        raise BundleError(f"stage {manifest.stage} has no graph 'forward'")
    headless = GraphName.HEAD not in manifest.graphs or manifest.labels is None
    learns = manifest.trainable_elements > 0 and not manifest.is_last
    if manifest.mode in DECOUPLED and learns and headless:
        raise BundleError(f"stage {manifest.stage} has no graph 'head'")
    if manifest.is_last and not {GraphName.LOSS, GraphName.CRITERION} & set(
        manifest.graphs
    ):
        raise BundleError(f"stage {manifest.stage} is the last and has no loss")
