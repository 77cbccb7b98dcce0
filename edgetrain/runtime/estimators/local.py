"""Learning from a head at the stage's own end, without a backward graph."""

from __future__ import annotations

from edgetrain.bundle import Bundle
from edgetrain.manifest import Mode
from edgetrain.runtime.engines.base import Engine
from edgetrain.runtime.estimators.base import Estimator
from edgetrain.runtime.estimators.hybrid import Hybrid
from edgetrain.runtime.estimators.identity import Identity
from edgetrain.runtime.parameters import Parameters


def local(bundle: Bundle, engine: Engine, parameters: Parameters, seed: int) -> Estimator:
    """Mode ``local``: plain forwards, no cotangent from downstream, none to upstream.

    The graph ``head`` gives the exact cotangent c of the stage's end, by products with the
    head's own matrix, and the gradient of the head. Inside the stage c is used as one that
    arrives: by `Identity` where the stage is residual, otherwise by `Hybrid`, so the last
    layer is exact up to the head.

    A cotangent of what passes the stage unchanged is handed on. The last stage has the
    model's loss in place of a head.

    Source: Mono-Forward (arXiv:2501.09238), where every layer has a head and learns from
    nothing else. Ours: one head a stage, and estimates within the stage.
    """
    if bundle.manifest.inner is Mode.IDENTITY:
        return Identity(bundle, engine, parameters)
    return Hybrid(bundle, engine, parameters, seed)
