"""What earlier runs measured on a run's devices, and what this one adds."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

from coordinator.profile_cache import ProfileCache, StageTime, Subject
from edgetrain.config import RunConfig
from edgetrain.manifest import Mode
from edgetrain.planner.latency_model import LatencyModel
from edgetrain.wire.hello import Hello

# First and last node of a stage, and whether it is the last one -> forward and backward.
Known = Mapping[tuple[int, int, bool], tuple[float, float]]


class Experience:
    """One run's way to the cache.

    Args:
        cache: of all runs.
        subject: the run's model, as it is trained.
    """

    def __init__(self, cache: ProfileCache, subject: Subject) -> None:
        self._cache = cache
        self._subject = subject

    def model(self, hello: Hello) -> LatencyModel:
        """What is known of a device's speed: learnt, else profiled, else guessed."""
        learnt = self._cache.model(hello)
        if learnt is not None:
            return learnt
        if hello.profile is not None:
            return LatencyModel.of(hello.profile)
        return LatencyModel.of_speed(hello.flop_per_s)

    def known(self, hello: Hello) -> Known:
        """The stages of this model that were measured on the device, exact ones."""
        return {
            (stage.start, stage.stop, stage.fused): (stage.forward_s, stage.backward_s)
            for stage in self._cache.stages(hello, self._subject)
            if stage.mode == Mode.VJP
        }

    def add(self, hello: Hello, stage: StageTime, model: LatencyModel) -> None:
        """Keep a stage's time and what was learnt of it."""
        self._cache.keep_stages(hello, self._subject, [stage])
        self._cache.keep_model(hello, model)


def subject_of(
    config: RunConfig, sha256: str, microbatch: int, trainable: Collection[str]
) -> Subject:
    """What the run's stage times depend on beside the device."""
    train, model = config.train, config.model
    settings = (
        *(model.loss, train.batchnorm, str(config.plan.recompute), train.optimizer),
        *sorted(trainable),
    )
    digest = hashlib.sha256("\n".join(settings).encode()).hexdigest()[:16]
    return Subject(sha256, microbatch, digest)
