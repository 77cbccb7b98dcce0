"""The planner's door: a problem in, a plan with its proof and its reasons out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from edgetrain.planner.approximate import approximate, exact_work
from edgetrain.planner.exact import Solver
from edgetrain.planner.explain import left_out_reasons, misfit
from edgetrain.planner.placement import Placement
from edgetrain.planner.problem import Problem
from edgetrain.planner.search import Optimum, optimise

EXACT_WORK: Final = 60_000_000.0  # 16 unlike devices with 96 layers
_MERGED_WORK: Final = 15_000_000.0  # of the types that bound a larger fleet's plans
_WORK_LIMIT: Final = 3e9  # table entries that a search for a training step may combine


@dataclass(frozen=True, slots=True)
class Solution:
    """A plan, how sure it is, and why it is as it is.

    Attributes:
        placement: the best found.
        gap: by which part of its time another may be faster at the most; 0: none is.
        left_out: (device, reason) of each that has no stage.
        alternatives: placements seen on the way that no other beats in both bottleneck
            and fill, best first, the chosen one among them.
    """

    placement: Placement
    gap: float
    left_out: tuple[tuple[str, str], ...]
    alternatives: tuple[Placement, ...]


def plan(problem: Problem, *, explain: bool = True) -> Solution:
    """Choose cuts, devices, their order and their options together.

    Inference: the least bottleneck; of those plans one of the least fill, and of those
    one of the fewest stages. Training: the shortest step, as `placement.evaluate` defines
    it; of those one of the least fill. Devices may be left out unless `problem.stages`
    says how many to use.

    Exact, with a gap of 0, up to 16 unlike devices of 96 layers or many more of few types;
    with a broker of finite rate, a training plan may have a gap left. Beyond, devices that
    are alike are taken for as good as the best of them in everything, which bounds all
    plans; a plan of theirs is improved by exchanging devices, and the gap says how far it
    is from the bound at the most. The same devices in any order give the same plan.

    Args:
        problem: what to plan.
        explain: whether to say why devices are left out, for which each of them is tried.

    Raises:
        PlanError: no placement fits; it says which device is short, by how much, and what
            would help.

    Time O(L^2 sum_t n_t prod_t (n_t + 1)) for each sweep with n_t devices of type t, less
    where the optimum's stages are short. Memory O(L prod_t (n_t + 1)).

    Source: the states are PipeEdge's (Hu et al., DSD 2022): layers and device counts by
    type, from which devices may be left out. Ours go from the last stage backwards, so
    that the stash of a schedule is known; heterogeneous links, pins, training and the
    broker are ours.
    """
    optimum = _optimum(problem)
    if optimum is None:
        raise misfit(problem, exact=exact_work(problem) <= EXACT_WORK)
    reasons: tuple[tuple[str, str], ...] = ()
    if explain:
        reasons = left_out_reasons(problem, optimum.best, exact_work(problem))
    return Solution(optimum.best, optimum.gap, reasons, optimum.pareto)


def _optimum(problem: Problem) -> Optimum | None:
    if exact_work(problem) <= EXACT_WORK:
        return optimise(Solver(problem), _WORK_LIMIT)
    return approximate(problem, _MERGED_WORK, _WORK_LIMIT)
