"""Data sets that stay on this device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from device_agent.config import DatasetConfig
from edgetrain.errors import DataError
from edgetrain.manifest import Manifest
from edgetrain.runtime.estimators.base import Array, Arrays, Tick
from edgetrain.sample_check import check
from edgetrain.sample_files import load
from edgetrain.samples import BatchOrder, Rows, Samples, evaluation_rows
from edgetrain.tensors import TensorSpec
from edgetrain.wire.hello import DatasetInfo
from edgetrain.wire.messages import LocalData


@dataclass(frozen=True, slots=True)
class Dataset:
    """Training samples and, if there are any, evaluation samples."""

    name: str
    train: Samples
    eval: Samples | None

    @property
    def info(self) -> DatasetInfo:
        """What the coordinator may know: shapes and counts, no sample."""
        return DatasetInfo(
            self.name,
            tuple(_spec(name, array) for name, array in self.train.inputs.items()),
            None if self.train.labels is None else _spec("labels", self.train.labels),
            len(self.train),
            0 if self.eval is None else len(self.eval),
        )


def open_datasets(configs: Mapping[str, DatasetConfig]) -> dict[str, Dataset]:
    """Read all data sets of an agent file.

    Raises:
        DataError: a file is missing or malformed.
    """
    return {
        name: Dataset(name, load(config.train), load(config.eval) if config.eval else None)
        for name, config in configs.items()
    }


class LocalSource:
    """Feeds stage 0 from this device's own samples.

    Raises:
        DataError: the samples do not fit the model.
    """

    def __init__(
        self, dataset: Dataset, local: LocalData, manifest: Manifest, batches: BatchOrder
    ) -> None:
        specs = manifest.receives
        self._train = check(dataset.train, specs, local.labels, at_least=local.batch_size)
        self._order = batches
        self._eval = None
        self._eval_rows: list[Rows] = []
        if dataset.eval is not None:
            self._eval = check(dataset.eval, specs, local.labels)
            rows = evaluation_rows(len(self._eval), manifest.microbatch)
            self._eval_rows = [chosen for chosen, _ in rows]

    def training(self, tick: Tick) -> tuple[Arrays, Array | None]:
        """Inputs and labels of one microbatch."""
        taken = self._train.take(self._order.rows(tick.step, tick.microbatch))
        return taken.inputs, taken.labels

    def evaluation(self, microbatch: int) -> tuple[Arrays, Array | None]:
        """Inputs and labels; the last microbatch is filled up with its last sample."""
        if self._eval is None:
            raise DataError(
                "this device's data set has no evaluation samples: give it an `eval` file"
            )
        taken = self._eval.take(self._eval_rows[microbatch])
        return taken.inputs, taken.labels


def _spec(name: str, array: Array) -> TensorSpec:
    return TensorSpec(name, array.dtype.name, array.shape[1:])
