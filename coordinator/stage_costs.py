"""What layers and stages cost on the devices of a run, as far as it is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgetrain.op_groups import Amount, LayerFeatures, stage_features
from edgetrain.planner.latency_model import LatencyModel
from edgetrain.train_config import TrainConfig
from edgetrain.wire.hello import Hello


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Predicted of one stage on its device: of a microbatch, and of a step's update."""

    forward_s: float
    backward_s: float
    update_s: float

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class StageWork:
    """What a stage computed in a step: its layers, microbatches and seconds."""

    layers: range
    microbatches: int
    seconds: float


class StageCosts:
    """Predicts, and learns from what stages really take.

    Attributes:
        models: of each device.
        drifts: by device, how many times as long it takes at present.
        memory_bytes: of each device, that its stages may be counted to need.

    Args:
        features: of each layer, for one microbatch.
        devices: that may take part.
        slowdowns: how much longer a device takes than for exact gradients.
        train: names the optimizer.
    """

    def __init__(
        self,
        features: Sequence[LayerFeatures],
        devices: Mapping[str, Hello],
        slowdowns: Mapping[str, float],
        train: TrainConfig,
    ) -> None:
        self._features = tuple(features)
        self._slowdowns = slowdowns
        self._optimizer = optimizer_name(train)
        self.models = {name: _model(hello) for name, hello in devices.items()}
        self.drifts = dict.fromkeys(devices, 1.0)
        self.memory_bytes = {n: float(h.memory_bytes) for n, h in devices.items()}

    def layers(
        self, device: str, scale: float = 1.0
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds forward and backward of each layer on a device.

        Args:
            device: its name.
            scale: of a microbatch, so many times as large as the one that features are of.
        """
        times = [self._times(device, scaled(f, scale)) for f in self._features]
        return tuple(t.forward_s for t in times), tuple(t.backward_s for t in times)

    def stage(self, device: str, layers: range, scale: float = 1.0) -> StageTimes:
        """Of a stage of these layers; arguments as of `layers`."""
        stage = stage_features(self._features[layers.start : layers.stop])
        return self._times(device, scaled(stage, scale))

    def trainable_elements(self, layer: int) -> int:
        return self._features[layer].trainable_elements

    def correct_memory(self, device: str, share: float) -> None:
        """Count on less of a device's memory, as stages need more than is counted."""
        self.memory_bytes[device] *= share

    def learn(self, device: str, layers: range, seconds: float) -> None:
        """A microbatch took a stage so long, forward and backward together."""
        stage = stage_features(self._features[layers.start : layers.stop])
        exact_s = max(seconds, 1e-7) / self._slowdowns[device]
        model = self.models[device]
        self.models[device] = model.learn(stage, exact_s, 0.0, fused=True)

    def track(self, device: str, stages: Sequence[StageWork]) -> None:
        """A device's stages take so long at present.

        What is learnt of layers stays; the whole device counts as slower or faster.
        """
        self.drifts[device] = 1.0
        known_s = 0.0
        for work in stages:
            times = self.stage(device, work.layers)
            known_s += work.microbatches * times.compute_s + times.update_s
        taken_s = sum(work.seconds for work in stages)
        self.drifts[device] = max(taken_s, 1e-7) / max(known_s, 1e-7)

    def _times(self, device: str, features: LayerFeatures) -> StageTimes:
        """Where gradients are estimated, more forwards take the place of the backward."""
        model, slowdown = self.models[device], self._slowdowns[device]
        drift = self.drifts[device]
        forward_s = drift * model.forward_s(features)
        backward_s = drift * model.backward_s(features)
        if slowdown != 1.0:
            backward_s = max(0.0, slowdown * (forward_s + backward_s) - forward_s)
        update_s = drift * model.update_s(features, self._optimizer)
        return StageTimes(forward_s, backward_s, update_s)


def optimizer_name(train: TrainConfig) -> str:
    """As `update_amount` knows it."""
    momentum = train.optimizer == "sgd" and train.momentum > 0
    return "momentum" if momentum else train.optimizer


def optimizer_states(train: TrainConfig) -> int:
    """Numbers that it keeps a weight."""
    return {"sgd": 0, "momentum": 1}.get(optimizer_name(train), 2)


def scaled(features: LayerFeatures, scale: float) -> LayerFeatures:
    """Of a microbatch so many times as large: work and bytes grow, operators do not."""
    if scale == 1.0:
        return features
    return LayerFeatures(
        {group: _scaled(amount, scale) for group, amount in features.forward.items()},
        {group: _scaled(amount, scale) for group, amount in features.backward.items()},
        features.trainable_elements,
    )


def _scaled(amount: Amount, scale: float) -> Amount:
    return Amount(scale * amount.flop, scale * amount.nbytes, amount.nodes)


def _model(hello: Hello) -> LatencyModel:
    if hello.profile is not None:
        return LatencyModel.of(hello.profile)
    return LatencyModel.of_speed(hello.flop_per_s)
