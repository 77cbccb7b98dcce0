"""A run as a task for the planner: its layers and devices, in bytes and seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.cut_codecs import CodecChooser, encoded_bytes
from coordinator.experience import Experience, subject_of
from coordinator.job import Job, keep_of
from coordinator.network import DeviceLink, link_of, network_of
from coordinator.profile_cache import ProfileCache
from coordinator.stage_costs import CostedLayer, StageCosts, optimizer_states
from edgetrain.codec_spec import CutCodecs
from edgetrain.compiler.cut import CutFinder
from edgetrain.compiler.cut import Layer as CutLayer
from edgetrain.compiler.features import layer_features
from edgetrain.compiler.forecast import stash_forecast
from edgetrain.config import RunConfig
from edgetrain.errors import PlanError
from edgetrain.plan_config import ALL
from edgetrain.planner.problem import PLAIN, RECOMPUTE, Device, Layer, Problem
from edgetrain.planner.timeline_case import Network
from edgetrain.train_config import AUTO
from edgetrain.wire.hello import Hello

COMMITS: Final = 2  # copies of all weights that a stage keeps


@dataclass(frozen=True, slots=True)
class PlanTask:
    """What a run's plans have in common.

    Attributes:
        config: what was asked.
        layers: of the model, as prepared.
        stash_bytes: of each.
        input_bytes: of the model's inputs.
        microbatch: samples, as the model was prepared for; sizes and times of others are
            scaled.
        costs: of the layers on the devices.
        devices, links: that may take part.
        exact: whether all of them can give exact gradients.
        network: what messages take beside their links.
        codecs: chooses what cuts travel in.
    """

    config: RunConfig
    layers: Sequence[CutLayer]
    stash_bytes: Sequence[int]
    input_bytes: int
    microbatch: int
    costs: StageCosts
    devices: Mapping[str, Hello]
    links: Mapping[str, DeviceLink]
    exact: bool
    network: Network
    codecs: CodecChooser

    def problem(self, schedule: str, microbatches: int) -> Problem:
        """The task under a schedule, with a batch in so many parts.

        Raises:
            PlanError: more stages are asked for than there are cuts.
        """
        config, pin = self.config, self.config.plan.pin
        microbatch = config.train.batch_size // microbatches
        scale = microbatch / self.microbatch
        recompute = config.plan.recompute == AUTO and self.exact
        return Problem(
            layers=tuple(self._layer(index, scale) for index in range(len(self.layers))),
            devices=tuple(self._device(name, scale) for name in self.devices),
            objective="training",
            topology="broker",
            microbatches=microbatches,
            schedule=schedule,
            samples=microbatch,
            pin_first=pin.first or config.data.device,
            pin_last=pin.last,
            stages=self._stages(),
            options=(PLAIN, RECOMPUTE) if recompute else (PLAIN,),
            hop_overhead_s=self.network.hop_s + self.network.op_s,
            input_bytes=scale * self.input_bytes,
        )

    def _stages(self) -> int | None:
        """How many stages are asked for; None: as many as is best."""
        plan = self.config.plan
        if plan.cuts:
            return len(self.layers)
        wanted = len(self.devices) if plan.stages == ALL else plan.stages
        if not isinstance(wanted, int):
            return None
        if wanted > len(self.layers):
            raise PlanError(
                f"{wanted} stages are asked for, but this model has only"
                f" {len(self.layers) - 1} valid cuts, enough for {len(self.layers)}"
                " stages: set [plan] stages or [fleet] devices lower"
            )
        return wanted

    def _layer(self, index: int, scale: float) -> Layer:
        layer = self.layers[index]
        states = optimizer_states(self.config.train)
        trained = (2 + states) * self.costs.trainable_elements(index)
        crossing, inner = layer.output.crossing, index < len(self.layers) - 1
        codecs = self._codecs(index) if inner else CutCodecs()
        return Layer(
            name=layer.output.name,
            memory_bytes=4 * (COMMITS * layer.weight_elements + trained),
            output_bytes=scale * encoded_bytes(codecs.activations, crossing),
            stash_bytes=scale * self.stash_bytes[index],
            cotangent_bytes=scale * encoded_bytes(codecs.cotangents, crossing),
            kept_bytes=scale * layer.output.nbytes,
        )

    def _codecs(self, index: int) -> CutCodecs:
        """Of the cut after a layer, wherever it comes to be: by the slowest link."""
        slowest = min(self.links.values())
        return self.codecs.of(index if self.config.plan.cuts else 0, slowest, slowest)

    def _device(self, name: str, scale: float) -> Device:
        forward_s, backward_s = self.costs.layers(name, scale)
        link = self.links[name]
        return Device(
            name,
            forward_s,
            backward_s,
            self.costs.memory_bytes[name],
            1 / (self.network.hop_s_per_byte + 1 / link.bytes_per_s),
            link.latency_s,
        )


def task_of(
    config: RunConfig,
    job: Job,
    devices: Mapping[str, Hello],
    slowdowns: Mapping[str, float],
    cache: ProfileCache,
) -> PlanTask:
    """What the plans of a run have in common.

    Args:
        config: what was asked.
        job: the model.
        devices: that may take part.
        slowdowns: how much longer each takes than for exact gradients.
        cache: of earlier runs' measurements.

    Raises:
        PlanError: cuts that are asked for cannot be made.
    """
    program, trainable = job.program, job.trainable
    network = network_of(config.fleet)
    finder = CutFinder(program, trainable)
    layers = _cut_layers(finder, config)
    stretches = [finder.nodes[layer.start : layer.stop] for layer in layers]
    features = layer_features(program, trainable, finder.nodes, layers)
    costs = StageCosts(
        [
            CostedLayer(layer.start, layer.stop, work)
            for layer, work in zip(layers, features, strict=True)
        ],
        devices,
        slowdowns,
        config.train,
        Experience(cache, subject_of(config, job.sha256, program.batch, trainable)),
    )
    batch_statistics = config.train.batchnorm == "train"
    return PlanTask(
        config=config,
        layers=layers,
        stash_bytes=stash_forecast(
            program,
            trainable,
            stretches,
            keep_of(config),
            batch_statistics=batch_statistics,
        ),
        input_bytes=sum(spec.nbytes for spec in program.inputs),
        microbatch=program.batch,
        costs=costs,
        devices=devices,
        links={name: link_of(hello, config.fleet) for name, hello in devices.items()},
        exact=all(factor == 1.0 for factor in slowdowns.values()),
        network=network,
        codecs=CodecChooser(config.plan, network),
    )


def _cut_layers(finder: CutFinder, config: RunConfig) -> tuple[CutLayer, ...]:
    names = config.plan.cuts
    if not names:
        return finder.layers()
    cuts = [finder.named(n if isinstance(n, str) else n[0]) for n in names]
    if sorted({cut.position for cut in cuts}) != [cut.position for cut in cuts]:
        raise PlanError("[plan] cuts are not in the order of the model, or one is twice")
    return finder.between([*cuts, finder.layers()[-1].output])
