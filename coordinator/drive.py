"""Training from the first step to the last: steps, evaluations, moves, weights kept."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from coordinator.gate import Gate
from coordinator.job import Job
from coordinator.mover import Mover
from coordinator.pipeline_loop import PipelineLoop
from coordinator.recorder import Recorder
from coordinator.run_folder import MODEL_FILE, RunFolder
from coordinator.watch import Watch
from coordinator.weights import Weights
from edgetrain.errors import DivergedError, RunError

KEEP_EVERY_S: Final = 2.0


class Drive:
    """Drives one run.

    Args:
        job: what is trained.
        watch: who looks on, and may stop it.
        folder: gets the weights.
        recorder: is told of moves.
    """

    def __init__(
        self, job: Job, watch: Watch, folder: RunFolder, recorder: Recorder
    ) -> None:
        self._job = job
        self._watch = watch
        self._folder = folder
        self._recorder = recorder
        self._kept_step = 0
        self._kept_s = watch.clock()

    def train(self, loop: PipelineLoop, gate: Gate, mover: Mover) -> Path:
        """Alternate training and evaluation, keeping the weights at some evaluations.

        A run that fails leaves the last weights kept, and says of which step they are.

        Returns:
            The trained model.
        """
        try:
            self._alternate(loop, gate, mover)
            return self._keep(loop.weights())
        except DivergedError as error:
            self._keep(loop.weights(max(loop.first_step - 1, error.step - 2)))
            raise
        except RunError as error:
            if self._kept_step:
                path = self._folder.path / MODEL_FILE
                error.add_note(f"{path} holds the weights after step {self._kept_step}")
            raise

    def _alternate(self, loop: PipelineLoop, gate: Gate, mover: Mover) -> None:
        total = mover.total_steps
        every = self._job.config.train.eval_every or loop.steps_per_epoch
        tally, stopped = loop.tally, self._watch.stopped
        while tally.committed + 1 < total and not stopped():
            goal = min(total, ((tally.committed + 1) // every + 1) * every)
            loop.train_until(goal, lambda: mover.due(tally))
            if mover.due(tally) and tally.committed + 1 < total and not stopped():
                self._move(loop, mover)
            if tally.committed + 1 < goal and not stopped():
                continue
            if not stopped():
                self._evaluate(loop, gate)
            if not self._kept_step or self._watch.clock() - self._kept_s > KEEP_EVERY_S:
                self._keep(loop.weights())
                self._kept_step = tally.committed + 1
                self._kept_s = self._watch.clock()

    def _move(self, loop: PipelineLoop, mover: Mover) -> None:
        moved = mover.move(loop)
        if moved is not None:
            self._recorder.moved(*moved)

    def _evaluate(self, loop: PipelineLoop, gate: Gate) -> None:
        step = loop.tally.committed + 1
        due = gate.due(step)
        measured = loop.evaluate(each=due)
        if due and measured is not None:
            gate.compare(step, measured)

    def _keep(self, weights: Weights) -> Path:
        return self._folder.write_model(lambda path: self._job.export(path, weights))
