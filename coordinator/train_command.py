"""`edgetrain train`: broker, simulated devices, session, and what is said at the end."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from coordinator.connection import coordinator_transport, signer
from coordinator.job import prepare
from coordinator.profile_cache import NO_CACHE, ProfileCache
from coordinator.progress import Progress, open_progress
from coordinator.session import Outcome, Session
from coordinator.stop import StopRequest, signals_to
from coordinator.watch import Watch
from edgetrain.config import RunConfig
from edgetrain.errors import ConfigError, FleetError, TransportError
from edgetrain.fleet_config import EMBEDDED
from edgetrain.sim.fleet import ProcessFleet, SimDevice
from edgetrain.transport.address import BrokerAddress
from edgetrain.transport.broker import embedded_broker

INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Options:
    """How `train` was called.

    Attributes:
        out: the run folder; None: a new one under ``runs``.
        password: of the broker, where its URL has none.
        cache: of what earlier runs measured.
    """

    out: Path | None = None
    as_json: bool = False
    password: str | None = None
    cache: ProfileCache = NO_CACHE


class Summary(msgspec.Struct, frozen=True):
    """A run as one JSON object; no score without held-out samples."""

    folder: str
    model: str
    steps: int
    loss: float | None
    accuracy: float | None
    samples: int
    interrupted: bool
    predicted_step_s: float | None
    measured_step_s: float | None


def train(config: RunConfig, options: Options) -> int:
    """Run it and say how it went.

    Returns:
        The exit code: 0, or 130 when it was stopped before its end.

    Raises:
        EdgeTrainError: as `execute`.
    """
    progress = open_progress(sys.stdout, time.monotonic, silent=options.as_json)
    outcome = execute(config, options, progress)
    if options.as_json:
        print(msgspec.json.encode(summary(outcome)).decode())
    else:
        conclude(outcome, progress)
    return INTERRUPTED if outcome.interrupted else 0


def execute(config: RunConfig, options: Options, progress: Progress) -> Outcome:
    """Read the inputs, start what is to be started here, and train.

    Raises:
        InputError: model, data, plan or broker do not do.
        RunError: the run failed.
    """
    job = prepare(config)
    train = job.config.train
    if train.microbatch != config.train.microbatch:
        progress.say(
            f"{train.batch_size} samples a step, in microbatches of {train.microbatch}, the"
            " batch size that the model fixes"
        )
    fleet = config.fleet
    with contextlib.ExitStack() as stack:
        stop = StopRequest(progress.say)
        stack.enter_context(signals_to(stop.request))
        if fleet.broker == EMBEDDED:
            url = stack.enter_context(embedded_broker()).url
        else:
            url = fleet.broker
        transport = coordinator_transport(fleet, options.password, url)
        if fleet.broker != EMBEDDED:
            probe = coordinator_transport(fleet, options.password)
            check_broker(lambda: probe.open(lambda _: None))
            probe.close()
        simulated = [SimDevice.of(device) for device in fleet.simulate]
        processes = ProcessFleet(
            url,
            simulated,
            fleet.namespace,
            ca_file=fleet.ca_file,
            insecure=fleet.insecure,
        )
        stack.enter_context(processes)
        progress.say(f"waiting for devices at {BrokerAddress.parse(url)}")
        watch = Watch(progress, stop.stopped)
        session = Session(job, transport, watch, options.cache, signer=signer(fleet))
        try:
            return session.train(options.out)
        except FleetError as error:
            raise _explained(error, processes) from error


def check_broker(connect: Callable[[], None]) -> None:
    """Connect to the broker that the user named; if that fails, it is theirs to mend.

    Raises:
        ConfigError: it cannot be reached or refuses us.
    """
    try:
        connect()
    except TransportError as error:
        raise ConfigError(str(error)) from error


def summary(outcome: Outcome) -> Summary:
    score, step = outcome.score, outcome.step
    return Summary(
        folder=str(outcome.folder),
        model=str(outcome.model),
        steps=outcome.steps,
        loss=score.loss if score else None,
        accuracy=score.accuracy if score else None,
        samples=score.samples if score else 0,
        interrupted=outcome.interrupted,
        predicted_step_s=step.predicted if step else None,
        measured_step_s=step.measured if step else None,
    )


def conclude(outcome: Outcome, progress: Progress) -> None:
    """Write the closing table, the result, and where everything is."""
    progress.closing_table(outcome.rows)
    for remark in outcome.remarks:
        progress.say(f"note: {remark}")
    if outcome.step is not None:
        _, predicted, measured, error = outcome.step.cells
        progress.say(f"a step took {measured}, {predicted} was predicted ({error})")
    done = "stopped after" if outcome.interrupted else "finished"
    progress.say(f"{done} {outcome.steps} steps{_result(outcome)}")
    progress.say(f"trained model: {outcome.model}")
    progress.say(f"run folder:    {outcome.folder}")


def _result(outcome: Outcome) -> str:
    if outcome.score is None:
        return ""
    loss, accuracy, samples = outcome.score
    text = f"; on {samples} held-out samples: loss {loss:.4f}"
    return text if accuracy is None else f"{text}, accuracy {accuracy:.4f}"


def _explained(error: FleetError, fleet: ProcessFleet) -> FleetError:
    """Add the last words of simulated devices that are no longer there."""
    words = [f"{name}: {line}" for name, line in fleet.ended().items()]
    if not words:
        return error
    return FleetError(f"{error}. Simulated devices that ended: {'; '.join(words)}")
