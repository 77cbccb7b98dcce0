"""The ranges of activations that a quantised forward rounds, from training samples."""

from __future__ import annotations

from typing import Final

from coordinator.calibration import spread
from edgetrain.compiler import reference
from edgetrain.compiler.grids import Range, observed
from edgetrain.compiler.program import Program
from edgetrain.config import RunConfig
from edgetrain.errors import ConfigError
from edgetrain.samples import Samples

ROOM: Final = 1.25  # over what was seen, for what training makes of it


def known_ranges(
    program: Program, config: RunConfig, samples: Samples | None
) -> dict[str, Range]:
    """The ranges a run needs; none where nothing is quantised.

    Raises:
        ConfigError: the samples stay on a device.
    """
    if not config.estimator.quantised:
        return {}
    if samples is None:
        raise ConfigError(
            "[estimator] quantised = true: how finely activations are rounded is settled by"
            f" a few training samples, and these stay on {config.data.device!r}: give some"
            " of their kind to the coordinator with [data] train, or leave quantised out"
        )
    return activation_ranges(program, samples)


def activation_ranges(program: Program, samples: Samples) -> dict[str, Range]:
    """What each activation that a linear op reads is between, 0 included, and some room.

    Args:
        program: on its present weights.
        samples: of the training data; some from all over them are taken.
    """
    names = observed(program)
    ranges = dict.fromkeys(names, (0.0, 0.0))
    for rows in spread(len(samples), program.batch):
        feeds = {**program.weights, **samples.take(rows).inputs}
        computed = [name for name in names if name not in feeds]
        results = reference.run(program.model, feeds, computed) if computed else {}
        for name in names:
            value = {**feeds, **results}[name]
            low, high = ranges[name]
            low, high = min(low, float(value.min())), max(high, float(value.max()))
            ranges[name] = low, high
    return {name: (ROOM * low, ROOM * high) for name, (low, high) in ranges.items()}
