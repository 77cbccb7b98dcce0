"""Sends the coordinator's samples into the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgetrain.manifest import Manifest
from edgetrain.runtime.outbox import Outbox
from edgetrain.samples import Array, BatchOrder, Samples, evaluation_rows
from edgetrain.wire.frame import Address, Kind


@dataclass(frozen=True, slots=True)
class Ends:
    """Where samples enter and where labels are compared.

    Attributes:
        run, epoch: of the plan in force.
        first, last: manifests of the first and the last stage.
        first_device, last_device: who runs them.
        heads: the stages before the last that take labels in training, with their devices.
    """

    run: int
    epoch: int
    first: Manifest
    last: Manifest
    first_device: str
    last_device: str
    chunk_bytes: int
    heads: tuple[tuple[int, str], ...] = ()


class Feed:
    """Inputs to the first stage and labels to those that compare, by microbatches."""

    def __init__(
        self, outbox: Outbox, ends: Ends, train: Samples, evaluation: Samples | None
    ) -> None:
        self._step_bytes: dict[int, int] = {}
        self._outbox = outbox
        self._ends = ends
        self._train = train
        self._evaluation = evaluation
        self._eval_rows = (
            list(evaluation_rows(len(evaluation), ends.first.microbatch))
            if evaluation is not None
            else []
        )

    def training(self, step: int, order: BatchOrder) -> None:
        """Send all microbatches of a step."""
        self._step_bytes[step] = 0
        for m in range(order.microbatches):
            taken = self._train.take(order.rows(step, m))
            self._step_bytes[step] += self._send(taken, step, m, evaluation=False)

    def sent_for(self, step: int) -> int:
        """Bytes of a training step's frames, headers included; forgotten once told."""
        return self._step_bytes.pop(step, 0)

    def evaluation(self, block: int, microbatches: Sequence[int]) -> None:
        """Send microbatches of the evaluation data."""
        if self._evaluation is None:
            return
        for m, index in enumerate(microbatches):
            rows, _ = self._eval_rows[index]
            self._send(self._evaluation.take(rows), block, m, evaluation=True)

    def _send(self, samples: Samples, step: int, m: int, *, evaluation: bool) -> int:
        ends = self._ends
        sent = 0
        for index, spec in enumerate(ends.first.receives):
            address = Address(
                Kind.ACTIVATION, ends.run, ends.epoch, 0, step, m, index, evaluation
            )
            sent += self._put(ends.first_device, address, samples.inputs[spec.name])
        if samples.labels is not None:
            heads = () if evaluation else ends.heads
            for stage, device in (*heads, (ends.last.stage, ends.last_device)):
                address = Address(
                    Kind.LABELS, ends.run, ends.epoch, stage, step, m, 0, evaluation
                )
                sent += self._put(device, address, samples.labels)
        return sent

    def _put(self, device: str, address: Address, array: Array) -> int:
        chunk_bytes = self._ends.chunk_bytes
        return self._outbox.put(device, address, array, chunk_bytes=chunk_bytes)
