"""Prepares a run anew for what its fleet is best at, where the run file leaves it open."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from coordinator.job import Job, prepare
from coordinator.planning import Planner
from coordinator.profile_cache import NO_CACHE, ProfileCache
from edgetrain.train_config import AUTO
from edgetrain.wire.hello import Hello


def for_fleet(
    job: Job, devices: Mapping[str, Hello], cache: ProfileCache = NO_CACHE
) -> Job:
    """The job with as many microbatches as suit these devices, if that was left to us.

    Args:
        job: as prepared before the devices were known.
        devices: those that may take part.
        cache: of what earlier runs measured.

    Raises:
        InputError: as `prepare` and `Planner.best_microbatches`.
    """
    train = job.asked.train
    fixed = job.program.batch != train.microbatch  # by a model that runs at one size only
    if train.microbatches != AUTO or fixed:
        return job
    planner = Planner(job.config, job, devices, cache)
    count = planner.best_microbatches()
    if count == planner.microbatches:
        return job
    train = msgspec.structs.replace(train, microbatches=count)
    return prepare(msgspec.structs.replace(job.asked, train=train))
