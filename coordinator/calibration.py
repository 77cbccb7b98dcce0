"""Statistics for a BatchNormalization that has never seen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgetrain.compiler import reference
from edgetrain.compiler.batch_statistics import use_batch_statistics
from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.program import Program
from edgetrain.compiler.values import constants, value_table
from edgetrain.samples import Samples

SAMPLES: Final = 512


def is_fresh(program: Program) -> bool:
    """Whether the model has running statistics, and all are as they were made: 0 and 1."""
    states = [program.weights[name] for name in program.states]
    return bool(states) and all(
        (s == s.flat[0]).all() and s.flat[0] in (0, 1) for s in states
    )


def calibrate(program: Program, samples: Samples) -> Program:
    """The program with the statistics of a few batches of its samples.

    A stage that does not train by its batch's statistics needs them to start with: with
    means of 0 and variances of 1 its layers would grow or fade from one to the next. Every
    layer is given what it sees when those before it normalise by the batch.

    Args:
        program: with a BatchNormalization.
        samples: of the training data; `SAMPLES` of them are taken.
    """
    g = GraphBuilder(value_table(program.model), constants(program.model))
    nodes = [Node.from_proto(proto) for proto in program.model.graph.node]
    rewritten, ports = use_batch_statistics(g, nodes)
    for node in rewritten:
        g.append(node)
    weights = [g.spec(name) for name in program.weights if name not in program.states]
    outputs = [g.spec(port.name) for port in ports]
    model = g.model([*program.inputs, *weights], outputs, "calibration")
    seen: dict[str, list[npt.NDArray[Any]]] = {port.key: [] for port in ports}
    for rows in spread(len(samples), program.batch):
        results = reference.run(model, {**program.weights, **samples.take(rows).inputs})
        for port in ports:
            seen[port.key].append(results[port.name])
    return replace(program, weights={**program.weights, **_pooled(nodes, seen)})


def spread(samples: int, batch: int) -> npt.NDArray[np.int64]:
    """Rows [batches, batch] from all over the data, which may be sorted."""
    count = max(1, min(SAMPLES, samples) // batch)
    places = np.arange(count * batch, dtype=np.int64) * max(1, samples // (count * batch))
    return (places % samples).reshape(batch, count).T


def _pooled(
    nodes: list[Node], seen: Mapping[str, list[npt.NDArray[Any]]]
) -> dict[str, npt.NDArray[np.float32]]:
    """Mean and variance over all batches, from those of each."""
    pooled: dict[str, npt.NDArray[np.float32]] = {}
    for node in nodes:
        if node.op_type == "BatchNormalization" and node.inputs[3] in seen:
            mean, variance = (
                np.asarray(seen[name], np.float64) for name in node.inputs[3:5]
            )
            pooled[node.inputs[3]] = mean.mean(0).astype(np.float32)
            pooled[node.inputs[4]] = (variance.mean(0) + mean.var(0)).astype(np.float32)
    return pooled
