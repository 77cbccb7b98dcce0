"""BatchNormalization that normalises by its microbatch and reports what it saw."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Final

import numpy as np

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.manifest import Port, Role, RunningStatistic

DEFAULT_MOMENTUM: Final = 0.9  # ONNX BatchNormalization


def running_statistics(
    g: GraphBuilder, nodes: Iterable[Node], weights: Collection[str]
) -> tuple[RunningStatistic, ...]:
    """The running mean and variance that each BatchNormalization of a stage keeps."""
    statistics = []
    for node in nodes:
        if node.op_type == "BatchNormalization" and all(
            name in weights for name in node.inputs[3:5]
        ):
            shape = g.shape(node.inputs[0])
            momentum = float(node.get("momentum", DEFAULT_MOMENTUM))
            count = math.prod(shape) // shape[1]
            statistics.append(
                RunningStatistic(node.inputs[3], node.inputs[4], momentum, count)
            )
    return tuple(statistics)


def use_batch_statistics(
    g: GraphBuilder, nodes: Iterable[Node]
) -> tuple[list[Node], list[Port]]:
    """Switch BatchNormalization nodes to training form.

    The node's momentum becomes 0, so that its further outputs are the plain statistics of
    the microbatch; the device does the running average. The kernel overwrites the mean and
    variance it is fed, so it gets constants of its own and never the weights.

    Returns:
        The nodes, and a port for each statistic, keyed by the running one it updates.
    """
    rewritten = []
    ports = []
    for node in nodes:
        if node.op_type != "BatchNormalization":
            rewritten.append(node)
            continue
        x, scale, bias, *running = node.inputs
        shape = g.shape(scale)
        outputs = [f"{node.output}/batch_mean", f"{node.output}/batch_variance"]
        for name, key in zip(outputs, running, strict=True):
            g.describe(name, g.dtype(scale), shape)
            ports.append(Port(name, Role.STATISTIC, key, g.dtype(scale), shape))
        scratch = [g.constant(np.full(shape, fill, g.dtype(scale))) for fill in (0, 1)]
        attributes = {
            "epsilon": node.get("epsilon", 1e-5),
            "momentum": 0.0,
            "training_mode": 1,
        }
        inputs = (x, scale, bias, *scratch)
        rewritten.append(
            Node(node.op_type, node.name, inputs, (node.output, *outputs), attributes)
        )
    return rewritten, ports
