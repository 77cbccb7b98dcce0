"""Device profiles for tests: what a device of known rates would measure."""

from __future__ import annotations

from collections.abc import Mapping

from edgetrain.device_profile import Case, DeviceProfile
from edgetrain.op_groups import Amount, OpGroup

Rates = Mapping[OpGroup, tuple[float, float, float]]

RUN_S = 2e-5
# Seconds a flop, a byte and a node.
RATES: Rates = {
    group: (1e-10 * (n + 1), 2e-10 / (n + 1), 1e-6 * (n % 3 + 1))
    for n, group in enumerate(OpGroup)
}
# Shapes of work that tell the three apart.
SHAPES = (
    Amount(2e6, 3e5, 4),
    Amount(8e6, 5e5, 2),
    Amount(1e5, 4e6, 1),
    Amount(4e7, 2e6, 6),
)


def seconds(amount: Amount, rates: tuple[float, float, float]) -> float:
    a, b, c = rates
    return a * amount.flop + b * amount.nbytes + c * amount.nodes


def _fixed_s(group: OpGroup) -> float:
    """An update is no run of the engine."""
    return 0.0 if group is OpGroup.OPTIMIZER else RUN_S


def profile(device: str = "pi", rates: Rates = RATES, **changes: object) -> DeviceProfile:
    """Of a device that takes exactly that long, and twice as long backward."""
    cases = tuple(
        Case(
            f"{group}-{n}",
            group,
            8,
            *(shape.flop, shape.nbytes, shape.nodes),
            forward_s=_fixed_s(group) + seconds(shape, rate),
            backward_s=0.0
            if group is OpGroup.OPTIMIZER
            else RUN_S + 2 * seconds(shape, rate),
        )
        for group, rate in rates.items()
        for n, shape in enumerate(SHAPES)
    )
    facts: dict[str, object] = {
        "device": device,
        "engine": "onnxruntime 1.22",
        "cores": 4,
        "memory_bytes": 10**9,
        "threads": 1,
        "spinning": False,
        "run_overhead_s": RUN_S,
        "node_overhead_s": 1e-6,
        "cases": cases,
    }
    return DeviceProfile(**{**facts, **changes})
