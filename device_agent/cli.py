"""`edgetrain-agent`: the device's command line, and the only reader of its environment."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from device_agent import config as agent_config
from device_agent.agent import Agent
from device_agent.config import AgentConfig
from device_agent.equip import Limits, equip
from device_agent.name_check import claim_name
from device_agent.simulation import add_simulation_options, end_as_in_a_crash, simulation
from edgetrain.errors import ConfigError, EdgeTrainError, InputError, TransportError
from edgetrain.settings import check_device_name
from edgetrain.sim.shaped import behind_link
from edgetrain.sim.timetable import Timetable
from edgetrain.transport.address import BrokerAddress
from edgetrain.transport.link import MqttSettings
from edgetrain.transport.mqtt import MqttTransport

log = logging.getLogger(__name__)

PROGRAM: Final = "edgetrain-agent"
PASSWORD_VARIABLE: Final = "EDGETRAIN_BROKER_PASSWORD"  # noqa: S105  not the password
# Options of `run` that are keys of an agent file of the same name.
_TEXT_KEYS: Final = ("broker", "name", "namespace", "memory", "gradient")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: without the program's name; the process's own when None.

    Returns:
        The exit code: 0 done, 2 the input was wrong or there is no broker, 1 anything else.
    """
    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given
    try:
        options = _parser().parse_args(given)
        if options.command == "probe":
            _probe(as_json=options.json)
        else:
            _run(options)
    except KeyboardInterrupt:
        return 0
    except EdgeTrainError as error:
        if debug:
            raise
        return _fail(str(error), 2 if isinstance(error, InputError) else 1)
    except Exception as error:
        if debug:
            raise
        reason = f"{type(error).__name__}: {error}"
        advice = "this is a bug; please report it with the output of --debug"
        return _fail(f"{reason} ({advice})", 1)
    return 0


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"{PROGRAM}: error: {' '.join(message.split())}\n")
    return code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Fail like everything else does, in one line."""
        raise ConfigError(f"{message} (see {PROGRAM} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        PROGRAM, description="Lend this device to a training run.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="join a broker and serve until stopped",
        description="Join a broker and serve training runs until stopped."
        f" The broker password may also be given in {PASSWORD_VARIABLE}.",
        allow_abbrev=False,
    )
    _add_run_options(run)
    probe = commands.add_parser("probe", help="show what this device can do")
    probe.add_argument("--json", action="store_true", help="as one JSON object")
    for command in (run, probe):
        command.add_argument(
            "--debug", action="store_true", help="show where an error came from"
        )
    return parser


def _add_run_options(run: argparse.ArgumentParser) -> None:
    add = run.add_argument
    add("file", nargs="?", type=Path, metavar="AGENT.toml", help="settings of this device")
    add("--broker", metavar="URL", help="mqtt://user@host:1883, or mqtts:// for TLS")
    add("--name", help="this device's name, its own on that broker")
    add("--namespace", help="first word of all topics (edgetrain)")
    add("--threads", type=int, metavar="N", help="of the inference engine (1)")
    add("--memory", metavar="SIZE", help="to lend, such as 512MB (half of what is free)")
    add(
        "--gradient",
        metavar="MODE",
        help="only this one: vjp, hybrid, local or frozen (auto)",
    )
    add("--runs", metavar="WORDS", help="graphs to offer: backward,jvp,weights (all)")
    add(
        "--dataset",
        action="append",
        default=[],
        metavar="NAME=TRAIN[,EVAL]",
        help="samples that stay on this device; may be repeated",
    )
    add("--password-file", type=Path, metavar="FILE", help="holds the broker password")
    add_simulation_options(run)
    add("--verbose", action="store_true", help="log more")


def _probe(*, as_json: bool) -> None:
    hello = equip("probe", Limits()).hello
    facts = {
        "engine": hello.engine,
        "providers": list(hello.providers),
        "cores": hello.cores,
        "memory_bytes": hello.memory_bytes,
        "flop_per_s": round(hello.flop_per_s),
        "runs": list(hello.runs),
        "version": hello.version,
    }
    if as_json:
        sys.stdout.write(msgspec.json.encode(facts).decode() + "\n")
        return
    sys.stdout.write(
        f"engine     {hello.engine} ({', '.join(hello.providers)})\n"
        f"runs       {', '.join(hello.runs) or 'plain inference'} graphs\n"
        f"cores      {hello.cores}\n"
        f"memory     {hello.memory_bytes / 1e6:.0f} MB to lend\n"
        f"speed      {hello.flop_per_s / 1e9:.2f} Gflop/s on one thread\n"
        f"edgetrain  {hello.version}\n"
    )


def _run(options: argparse.Namespace) -> None:
    config = agent_config.load(options.file, _overrides(options))
    _log_to_stderr(config.name, verbose=options.verbose)
    conditions = simulation(options)
    limits = Limits(
        config.threads, config.memory_bytes, config.gradient, config.runs, conditions
    )
    timetable = Timetable(conditions)
    equipment = equip(config.name, limits, config.datasets, timetable)
    transport = behind_link(_transport(config), conditions, timetable, end_as_in_a_crash)
    agent = Agent(transport, equipment)
    try:
        claim_name(_transport(config))
    except TransportError as error:
        raise ConfigError(str(error)) from error
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: agent.stop())
    agent.run()
    log.info("stopped")


def _transport(config: AgentConfig) -> MqttTransport:
    password = config.password()
    if password is None and BrokerAddress.parse(config.broker).password is None:
        password = os.environ.get(PASSWORD_VARIABLE)
    settings = MqttSettings(namespace=config.namespace)
    return MqttTransport(config.broker, config.name, password=password, settings=settings)


def _overrides(options: argparse.Namespace) -> list[str]:
    """The options as assignments over the agent file; texts in quotes, as they stand."""
    given = {key: getattr(options, key) for key in _TEXT_KEYS}
    if options.password_file is not None:
        given["password_file"] = str(options.password_file.absolute())
    for text in options.dataset:
        given |= _dataset(text)
    assignments = [
        f"{key}={msgspec.json.encode(value).decode()}"
        for key, value in given.items()
        if value is not None
    ]
    if options.threads is not None:
        assignments.append(f"threads={options.threads}")
    if options.runs is not None:
        words = [word for word in options.runs.split(",") if word]
        assignments.append(f"runs={msgspec.json.encode(words).decode()}")
    return assignments


def _dataset(text: str) -> dict[str, str]:
    name, equals, paths = text.partition("=")
    train, comma, evaluation = paths.partition(",")
    if not (equals and name and train and bool(comma) == bool(evaluation)):
        raise ConfigError(
            f"--dataset {text!r}: write NAME=TRAIN or NAME=TRAIN,EVAL, such as"
            " watch=train.npz,eval.npz"
        )
    check_device_name("--dataset", name)
    if "." in name:
        raise ConfigError(f"--dataset {text!r}: a name has no '.'; it stands before '='")
    files = {f"datasets.{name}.train": str(Path(train).absolute())}
    if evaluation:
        files[f"datasets.{name}.eval"] = str(Path(evaluation).absolute())
    return files


class _OneLine(logging.Formatter):
    """A record a line, whatever its message holds, so that journals stay readable."""

    def format(self, record: logging.LogRecord) -> str:
        return " | ".join(filter(None, super().format(record).splitlines()))


def _log_to_stderr(device: str, *, verbose: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    form = f"%(asctime)s {device} %(levelname)s %(message)s"
    handler.setFormatter(_OneLine(form, "%Y-%m-%dT%H:%M:%S"))
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO, handlers=[handler], force=True
    )
