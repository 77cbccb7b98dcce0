"""`edgetrain`: the coordinator's command line, and the only reader of its environment."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, cast

import typer

from coordinator import (
    broker_command,
    devices_command,
    doctor_command,
    evaluate_command,
    fleet_command,
    grad_command,
    inspect_command,
    plan_command,
    plan_run,
    simulate_run,
    train_command,
)
from coordinator import (
    demo as demo_command,
)
from coordinator.connection import coordinator_transport, fleet_at
from coordinator.doctor import examine
from coordinator.options import (
    AnyLoss,
    AsJson,
    Assignments,
    BrokerUrl,
    FleetFile,
    Insecure,
    Loss,
    LossOption,
    LossOutput,
    Model,
    Namespace,
    Out,
    RunFile,
    Trace,
)
from coordinator.profile_cache import ProfileCache, cache_folder
from edgetrain.config import ModelConfig, load
from edgetrain.errors import EdgeTrainError, InputError
from edgetrain.losses import LOSSES, assigned

PROGRAM: Final = "edgetrain"
PASSWORD_VARIABLE: Final = "EDGETRAIN_BROKER_PASSWORD"  # noqa: S105  not the password
INTERRUPTED: Final = 130
_DEBUG: Final = "--debug"
# Typer exports only this subclass, and brings its base from click or from its own copy.
_USAGE_ERROR: Final = cast(type[typer.BadParameter], typer.BadParameter.__base__)

app = typer.Typer(
    name=PROGRAM,
    help="Train an ONNX model across devices that only have an inference engine.",
    epilog=f"{_DEBUG}, with any command, shows where an error came from.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(fleet_command.app, name="fleet")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: without the program's name; the process's own when None.

    Returns:
        The exit code: 0 done, 1 the run failed, 2 the input was wrong, 130 interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = _DEBUG in given
    given = [argument for argument in given if argument != _DEBUG]
    logging.basicConfig(
        level=logging.INFO if debug else logging.WARNING, format=f"{PROGRAM}: %(message)s"
    )
    try:
        return app(given, prog_name=PROGRAM, standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED)
    except _USAGE_ERROR as error:
        message = error.format_message()  # empty once the help was shown instead
        return _fail(f"{message} (see {PROGRAM} --help)", 2) if message else 2
    except EdgeTrainError as error:
        if debug:
            raise
        return _fail(str(error), 2 if isinstance(error, InputError) else 1)
    except Exception as error:
        if debug:
            raise
        reason = f"{type(error).__name__}: {error}"
        advice = f"this is a bug; please report it with the output of {_DEBUG}"
        return _fail(f"{reason} ({advice})", 1)


@app.command()
def train(
    run_file: RunFile,
    assignments: Assignments = None,
    out: Out = None,
    fleet: FleetFile = None,
    as_json: AsJson = False,
) -> int:
    """Train a model as a run file says; Ctrl-C stops and keeps the weights so far."""
    config = load(run_file, assignments or (), fleet)
    password = os.environ.get(PASSWORD_VARIABLE)
    options = train_command.Options(out, as_json, password, _cache())
    return train_command.train(config, options)


@app.command()
def evaluate(  # noqa: PLR0913  one parameter an option
    model: Model,
    data: Annotated[Path, typer.Option("--data", metavar="F", help=".npz, .npy or .csv")],
    loss: Loss = LOSSES[0],
    loss_option: LossOption = None,
    output: LossOutput = None,
    as_json: AsJson = False,
) -> None:
    """Measure loss and accuracy of a file, run on this machine as it is."""
    options = assigned(loss_option or ())
    config = ModelConfig(path=model, loss=loss, loss_options=options, output=output)
    evaluate_command.show(evaluate_command.evaluate(config, data), as_json=as_json)


@app.command()
def inspect(
    model: Model,
    batch: Annotated[int, typer.Option("--batch", help="Samples a microbatch.")] = 1,
    loss: AnyLoss = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a model can train, where it can be cut, and what crosses the cuts."""
    facts = inspect_command.inspect(model, batch, loss)
    inspect_command.show(facts, as_json=as_json)


@app.command()
def plan(  # noqa: PLR0913  one parameter an option
    run_file: Annotated[
        Path | None, typer.Argument(metavar="RUN.toml", help="What would be trained.")
    ] = None,
    profiles: Annotated[
        Path | None,
        typer.Option("--profiles", metavar="P.json", help="Layers and devices, as below."),
    ] = None,
    assignments: Assignments = None,
    fleet: FleetFile = None,
    trace: Trace = None,
    as_json: AsJson = False,
) -> None:
    """Say which device would run which layers, how fast that is, and why.

    A profile file holds "batch_size", "layers": [{"memory_bytes", "output_bytes"}, ...] and
    "devices": [{"name", "forward_s", "memory_bytes", "link_bytes_per_s"}, ...], where
    forward_s lists a time per layer; it may hold "objective" ("inference" or "training"),
    "topology" ("peer" or "broker"), and in devices "latency_s" and "count". Training takes
    "microbatches", and "backward_s" in devices. All keys: docs/profiles.md.
    """
    if (profiles is None) == (run_file is None):
        raise InputError(
            "plan takes either a run file, or --profiles P.json with layers and devices"
        )
    if profiles is not None:
        plan_command.show(plan_command.plan_profiles(profiles), as_json=as_json)
    elif run_file is not None:
        config = load(run_file, assignments or (), fleet)
        found = plan_run.plan_run(config, os.environ.get(PASSWORD_VARIABLE), _cache())
        plan_run.show(found, as_json=as_json, trace=trace)


@app.command()
def simulate(
    run_file: RunFile,
    assignments: Assignments = None,
    steps: Annotated[
        int, typer.Option("--steps", help="To play on the virtual clock.")
    ] = simulate_run.DEFAULT_STEPS,
    trace: Trace = None,
    as_json: AsJson = False,
) -> None:
    """Predict a run on its simulated devices, without running it."""
    config = load(run_file, assignments or ())
    run, rehearsal = simulate_run.simulate_run(config, steps)
    simulate_run.show(run, rehearsal, as_json=as_json, trace=trace)


@app.command()
def grad(  # noqa: PLR0913  one parameter an option
    model: Model,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="To write.")],
    mode: Annotated[str, typer.Option("--mode", help="vjp or jvp.")] = "vjp",
    loss: AnyLoss = None,
    loss_option: LossOption = None,
    output: LossOutput = None,
    wrt: Annotated[
        list[str] | None,
        typer.Option("--wrt", metavar="REGEX", help="Weights, or last:N; repeatable."),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Samples.")] = 1,
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", metavar="IN=3,8", help="Where open; without the batch."),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option("--weights", metavar="F", help="Their values, .npz.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a model and its derivative as one ONNX file for any runtime."""
    request = grad_command.Request(
        mode=mode,
        loss=loss,
        loss_options=loss_option or (),
        output=output or "",
        wrt=wrt or (),
        batch=batch,
        shapes=shape or (),
        weights=weights,
    )
    grad_command.show(grad_command.write(model, out, request), as_json=as_json)


@app.command()
def devices(  # noqa: PLR0913  one parameter an option
    broker: BrokerUrl = None,
    namespace: Namespace = None,
    fleet: FleetFile = None,
    insecure: Insecure = False,
    wait: Annotated[float, typer.Option("--wait", help="Seconds of quiet.")] = 0.5,
    as_json: AsJson = False,
) -> None:
    """List the devices on a broker and what each can do."""
    place = fleet_at(broker, namespace, fleet, insecure=insecure)
    transport = coordinator_transport(place, os.environ.get(PASSWORD_VARIABLE))
    found = devices_command.find_devices(transport, wait)
    devices_command.show_devices(found, as_json=as_json)


@app.command()
def doctor(  # noqa: PLR0913  one parameter an option
    broker: BrokerUrl = None,
    namespace: Namespace = None,
    fleet: FleetFile = None,
    agent: Annotated[
        Path | None, typer.Option("--agent", metavar="FILE", help="As that device.")
    ] = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> int:
    """Examine a broker: TLS, identity, access list, limits, speed; say what to change."""
    password = os.environ.get(PASSWORD_VARIABLE)
    if agent is not None:
        party = doctor_command.as_device(agent, password)
    else:
        place = fleet_at(broker, namespace, fleet, insecure=insecure)
        party = doctor_command.as_coordinator(place, password)
    return doctor_command.show(examine(party), as_json=as_json)


@app.command()
def broker(
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Run a broker for agents on this machine until Ctrl-C."""
    broker_command.run_broker(port, as_json=as_json)


@app.command()
def demo(out: Out = None, as_json: AsJson = False) -> int:
    """Train a small CNN on digits over three simulated devices, one without backprop."""
    return demo_command.demo(out, as_json=as_json)


def _cache() -> ProfileCache:
    return ProfileCache(cache_folder(os.environ))


def _fail(message: str, code: int) -> int:
    text = f"{PROGRAM}: error: {' '.join(message.split())}"
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns
        text = textwrap.fill(text, columns, break_long_words=False, break_on_hyphens=False)
    sys.stderr.write(f"{text}\n")
    return code
