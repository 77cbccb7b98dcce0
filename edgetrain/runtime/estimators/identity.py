"""Gradients of residual branches from the cotangent at the end of the stream."""

from __future__ import annotations

import numpy as np

from edgetrain.runtime.estimators.base import Arrays, Backward, Tick
from edgetrain.runtime.estimators.segmented import Segmented


class Identity(Segmented):
    """Mode ``identity``: one contraction a microbatch, no noise.

    In a residual stage y = x + f(x) + g(x + f(x)) the cotangent of y is that of what g
    adds, and a part of that of what f adds: the rest comes through g, which a stage that
    runs no backward leaves out. The last linear layers of the branches learn from it, and
    it goes upstream as the cotangent of x. Biased, without noise; for pretrained models,
    where the branches add little to the stream.

    Source: ours.
    """

    def backward(self, tick: Tick, arriving: Arrays) -> Backward:
        """See `Estimator.backward`."""
        stash = self._stash.pop(tick)
        losses, arriving = self._arrived(stash, arriving)
        own = self._own(arriving)
        found = {n: c for n, c in arriving.items() if n in self._manifest.cotangents_out}
        if len(own) == 1:  # several ends have no stream in common
            (cotangent,) = own.values()
            self._segments.contract(stash, lambda _: cotangent, own)
            skip = self._manifest.skip
            if skip in self._manifest.cotangents_out:
                found[skip] = np.add(found[skip], cotangent) if skip in found else cotangent
        self._parameters.accumulate()
        wanted = self._manifest.cotangents_out
        return Backward({name: found[name] for name in wanted}, losses)
