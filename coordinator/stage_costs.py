"""What layers and stages cost on the devices of a run, as far as it is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.experience import Experience
from coordinator.profile_cache import StageTime
from edgetrain.manifest import Mode
from edgetrain.op_groups import Amount, LayerFeatures, stage_features
from edgetrain.train_config import TrainConfig
from edgetrain.wire.hello import Hello


@dataclass(frozen=True, slots=True)
class CostedLayer:
    """A layer of the planner: its nodes, from `start` to before `stop`, and their work."""

    start: int
    stop: int
    features: LayerFeatures


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Predicted of one stage on its device: of a microbatch, and of a step's update."""

    forward_s: float
    backward_s: float
    update_s: float

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s

    def taking(self, step_s: float, microbatches: int) -> StageTimes:
        """The same proportions, if all of a step is `step_s`."""
        known_s = microbatches * self.compute_s + self.update_s
        factor = step_s / max(known_s, 1e-9)
        return StageTimes(
            factor * self.forward_s, factor * self.backward_s, factor * self.update_s
        )


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
        layers: of the model, for one microbatch.
        devices: that may take part.
        slowdowns: how much longer a device takes than for exact gradients.
        train: names the optimizer.
        experience: of earlier runs.
    """

    def __init__(
        self,
        layers: Sequence[CostedLayer],
        devices: Mapping[str, Hello],
        slowdowns: Mapping[str, float],
        train: TrainConfig,
        experience: Experience,
    ) -> None:
        self._layers = tuple(layers)
        self._devices = devices
        self._slowdowns = slowdowns
        self._optimizer = optimizer_name(train)
        self._experience = experience
        self.models = {name: experience.model(hello) for name, hello in devices.items()}
        self._known = {n: dict(experience.known(hello)) for n, hello in devices.items()}
        self.drifts = dict.fromkeys(devices, 1.0)
        self.memory_bytes = {n: float(h.memory_bytes) for n, h in devices.items()}

    def layers(
        self, device: str, scale: float = 1.0
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds forward and backward of each layer on a device.

        Args:
            device: its name.
            scale: of a microbatch, so many times as large as the one the layers are of.
        """
        times = [self._times(device, scaled(x.features, scale)) for x in self._layers]
        return tuple(t.forward_s for t in times), tuple(t.backward_s for t in times)

    def stage(self, device: str, layers: range) -> StageTimes:
        """Of a stage of these layers: as it was measured, else predicted."""
        predicted = self._times(device, self._work(layers))
        known = self._known[device].get(self._place(layers))
        if known is None or self._slowdowns[device] != 1.0:
            return predicted
        forward_s, backward_s = (self.drifts[device] * seconds for seconds in known)
        return StageTimes(forward_s, backward_s, predicted.update_s)

    def trainable_elements(self, layer: int) -> int:
        return self._layers[layer].features.trainable_elements

    def learn(
        self, device: str, layers: range, measured: tuple[float, float], mode: Mode
    ) -> None:
        """A microbatch took a stage so long, forward and backward, when it was loaded."""
        forward_s, backward_s = (max(seconds, 0.0) for seconds in measured)
        exact_s = max(forward_s + backward_s, 1e-7) / self._slowdowns[device]
        model = self.models[device].learn(self._work(layers), exact_s, 0.0, fused=True)
        self.models[device] = model
        start, stop, last = place = self._place(layers)
        if mode is Mode.VJP:
            self._known[device][place] = (forward_s, backward_s)
        stage = StageTime(start, stop, mode.value, last, forward_s, backward_s)
        self._experience.add(self._devices[device], stage, model)

    def correct_memory(self, device: str, share: float) -> None:
        """Count on less of a device's memory, as stages need more than is counted."""
        self.memory_bytes[device] *= share

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

    def _work(self, layers: range) -> LayerFeatures:
        mine = self._layers[layers.start : layers.stop]
        return stage_features(layer.features for layer in mine)

    def _place(self, layers: range) -> tuple[int, int, bool]:
        first, last = self._layers[layers.start], self._layers[layers.stop - 1]
        return first.start, last.stop, layers.stop == len(self._layers)

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
