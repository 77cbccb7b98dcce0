"""Whether a file's weights have learnt the task already: told from a few samples."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from coordinator.job import Job
from edgetrain.manifest import Mode
from edgetrain.optimizer_spec import LRSpec, OptimizerSpec
from edgetrain.runtime.engines.onnxruntime import OnnxRuntimeEngine
from edgetrain.runtime.stage import Stage
from edgetrain.samples import Samples
from edgetrain.train_config import AUTO

SAMPLES: Final = 256
CLEARLY: Final = 0.75


def is_pretrained(job: Job) -> bool:
    """As ``[model] pretrained`` says, or by the loss on some of the coordinator's samples.

    A model that a source task is named of is one.

    Whoever knows the task loses less on samples with their own labels than with the labels
    of others: less than `CLEARLY` of it counts. That needs no notion of chance, and so
    serves all losses. Without samples here, the answer is no.
    """
    asked = job.config.model.pretrained
    if asked != AUTO:
        return bool(asked)
    if job.source is not None:
        return True
    samples = job.data.eval if job.data.eval is not None else job.data.train
    if samples is None or samples.labels is None:
        return False
    batch = job.program.batch
    count = min(SAMPLES, len(samples)) // batch * batch
    if not count:
        return False
    rows = np.linspace(0, len(samples) - 1, count).astype(np.int64)
    mixed = np.random.Generator(np.random.Philox(0)).permutation(count)
    taken = samples.take(rows)
    (bundle,) = job.compile((), (Mode.FROZEN,))
    optimizer = OptimizerSpec("sgd", LRSpec(1.0))  # which never makes a step
    stage = Stage(bundle, OnnxRuntimeEngine(), optimizer, microbatches=1, seed=0)
    own, others = (
        _loss(stage, Samples(taken.inputs, labels), batch)
        for labels in (samples.labels[rows], samples.labels[rows[mixed]])
    )
    return bool(own < CLEARLY * others)


def _loss(stage: Stage, samples: Samples, batch: int) -> float:
    losses: list[npt.NDArray[np.float32]] = []
    for first in range(0, len(samples), batch):
        part = samples.take(np.arange(first, first + batch))
        arrays = part.arrays()
        losses.append(stage.evaluate_loss(part.inputs, arrays["labels"]).losses)
    return float(np.mean(losses, dtype=np.float64))
