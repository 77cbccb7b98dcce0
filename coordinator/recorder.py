"""Keeps the books of a run: metrics to the folder, figures to the progress display."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final

from coordinator.figures import DeviceFigures, DeviceRow, Snapshot, seconds_text
from coordinator.gate import Verdict
from coordinator.metrics import EvalMetrics, GateMetrics, MoveMetrics, StepMetrics
from coordinator.noise_watch import NoiseWatch
from coordinator.progress import Progress
from coordinator.run_folder import RunFolder
from coordinator.score import Score
from coordinator.tally import StepTotal, Tally
from edgetrain.errors import RunError
from edgetrain.plan import Plan

WINDOW_STEPS: Final = 20


class Recorder:
    """Watches the loop.

    Attributes:
        score: of the last evaluation.
        last: of the steps so far, the last one.
        remarks: what was decided on the way, for whoever reads the end.

    Args:
        folder: gets a line a step and evaluation.
        progress: shows it.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        folder: RunFolder,
        progress: Progress,
        clock: Callable[[], float],
    ) -> None:
        self.score: Score | None = None
        self.last: StepTotal | None = None
        self.remarks: list[str] = []
        self._folder = folder
        self._progress = progress
        self._clock = clock
        self._start_s = clock()
        self._plan: Plan | None = None
        self._noise: NoiseWatch | None = None
        self._steps = 0
        self._steps_per_epoch = 1
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=WINDOW_STEPS + 1)

    def begin(self, plan: Plan, steps: int, steps_per_epoch: int) -> None:
        """Write the plan down, and say what is about to run."""
        self._take(plan)
        self._noise = NoiseWatch(len(plan.stages))
        self._steps = steps
        self._steps_per_epoch = steps_per_epoch
        self._recent.append((self._clock(), 0, 0))
        for stage in plan.stages:
            self._progress.say(f"stage {stage.stage}: {stage.mode}; {stage.reason}")

    def moved(self, plan: Plan, move: MoveMetrics) -> None:
        """Another plan is in force."""
        self._take(plan)
        self._folder.append(move)
        devices = ", ".join(move.move_devices)
        self._remark(
            f"after step {move.step} the stages moved, now on {devices}, as"
            f" {move.move_reason}: {seconds_text(move.moved_s)} a step is predicted in"
            f" place of {seconds_text(move.stayed_s)}; training paused for"
            f" {seconds_text(move.pause_s)}"
        )

    def _take(self, plan: Plan) -> None:
        self._plan = plan
        self._folder.write_plan(plan.encode())

    @property
    def plan(self) -> Plan:
        """The one in force; there is none before `begin`."""
        if self._plan is None:
            raise RunError("the run has not begun: there is no plan")
        return self._plan

    def stepped(self, total: StepTotal, tally: Tally) -> None:
        """See `Watcher.stepped`."""
        self.last = total
        step = total.step + 1
        self._folder.append(
            StepMetrics(
                step=step,
                epoch=total.step // self._steps_per_epoch,
                loss=total.loss if math.isfinite(total.loss) else None,
                seconds=round(self._clock() - self._start_s, 6),
                bytes_sent=total.sent_bytes,
                signal_to_noise=_rounded(total.signals),
            )
        )
        self._look_for_noise(total)
        self._progress.update(self._snapshot(total, tally))

    def evaluated(self, step: int, score: Score) -> None:
        """See `Watcher.evaluated`."""
        self.score = score
        self._folder.append(
            EvalMetrics(
                step=step,
                epoch=max(0, step - 1) // self._steps_per_epoch,
                seconds=round(self._clock() - self._start_s, 6),
                eval_loss=score.loss if math.isfinite(score.loss) else None,
                eval_accuracy=score.accuracy,
            )
        )

    def gated(self, verdict: Verdict) -> None:
        """See `Judge.gated`."""
        trained, deployed = verdict.trained, verdict.deployed
        self._folder.append(
            GateMetrics(
                step=verdict.step,
                gate_stage=verdict.stage,
                gate_measure=verdict.measure,
                gate_trained=trained if math.isfinite(trained) else None,
                gate_deployed=deployed if math.isfinite(deployed) else None,
                rolled_back=verdict.rolled_back,
            )
        )
        if verdict.rolled_back and self._plan is not None:
            stage = self._plan.stages[verdict.stage]
            self._remark(
                f"stage {stage.stage} ({stage.mode} on {stage.device}) was rolled back at"
                f" step {verdict.step} and trains no more: {verdict.measure}"
                f" {trained:.4g} with its training, {deployed:.4g} without"
            )

    def _look_for_noise(self, total: StepTotal) -> None:
        if self._noise is None or self._plan is None:
            return
        for number in self._noise.hopeless(total.loss, total.signals):
            stage = self._plan.stages[number]
            self._remark(
                f"stage {number} ({stage.mode} on {stage.device}) learns from noise: its"
                f" gradients' signal to noise is {total.signals[number]:.2g} at step"
                f" {total.step + 1} and the loss does not fall; train fewer of its layers,"
                " raise batch_size or [estimator] tangents, or choose another mode"
            )

    def _remark(self, text: str) -> None:
        self.remarks.append(text)
        self._progress.say(text)

    def rows(self, tally: Tally) -> list[DeviceRow]:
        """What each device did, predicted beside measured."""
        if self._plan is None:
            return []
        rows = []
        for stage, totals in zip(self._plan.stages, tally.stages, strict=True):
            compute_s = stage.predicted_forward_s + stage.predicted_backward_s
            rows.append(
                DeviceRow(
                    device=stage.device,
                    stage=stage.stage,
                    mode=stage.mode,
                    parameters=stage.parameters,
                    busy=totals.busy,
                    sent_bytes=totals.sent_bytes,
                    predicted_s=compute_s * self._plan.microbatches,
                    measured_s=totals.compute_s / totals.steps if totals.steps else None,
                    predicted_memory_bytes=stage.predicted_memory_bytes,
                    measured_memory_bytes=totals.memory_peak_bytes or None,
                    reason=stage.reason,
                    signal_to_noise=totals.signal_to_noise,
                    predicted_activation_bytes=stage.predicted_activation_bytes or None,
                    measured_activation_bytes=totals.activation_peak_bytes or None,
                )
            )
        return rows

    def _snapshot(self, total: StepTotal, tally: Tally) -> Snapshot:
        self._recent.append((self._clock(), total.samples, total.sent_bytes))
        recent = list(self._recent)
        seconds = max(recent[-1][0] - recent[0][0], 1e-9)
        devices = self._plan.stages if self._plan else ()
        return Snapshot(
            step=total.step + 1,
            steps=self._steps,
            epoch=total.step // self._steps_per_epoch,
            loss=total.loss,
            accuracy=self.score.accuracy if self.score else None,
            samples_per_s=sum(samples for _, samples, _ in recent[1:]) / seconds,
            bytes_per_s=sum(sent for _, _, sent in recent[1:]) / seconds,
            devices=tuple(
                DeviceFigures(stage.device, totals.recently_busy)
                for stage, totals in zip(devices, tally.stages, strict=False)
            ),
        )


def _rounded(signals: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(round(signal, 6) for signal in signals) if any(signals) else ()
