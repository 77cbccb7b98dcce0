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
from device_agent.obedience import obeying
from device_agent.probe_command import Request, default_name, probe
from device_agent.probe_set import load
from device_agent.simulation import add_simulation_options, end_as_in_a_crash, simulation
from edgetrain.device_profile import DeviceProfile
from edgetrain.errors import ConfigError, EdgeTrainError, InputError, TransportError
from edgetrain.settings import check_device_name
from edgetrain.sim.shaped import behind_link
from edgetrain.sim.timetable import Timetable
from edgetrain.transport.address import BrokerAddress
from edgetrain.transport.link import MqttSettings
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.transport.tls import TlsFiles

log = logging.getLogger(__name__)

PROGRAM: Final = "edgetrain-agent"
PASSWORD_VARIABLE: Final = "EDGETRAIN_BROKER_PASSWORD"  # noqa: S105  not the password
# Options that are keys of an agent file of the same name.
_TEXT_KEYS: Final = ("broker", "name", "namespace", "memory", "gradient")
_PATH_KEYS: Final = (
    "password_file",
    "profile",
    "ca_file",
    "cert_file",
    "key_file",
    "coordinator_key_file",
)


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
            _probe(options)
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
    measuring = commands.add_parser(
        "probe",
        help="measure what this device can do",
        description="Measure this device, in well under a minute: the engine's best"
        " threads, every kind of operator forward and backward and, with a broker, the"
        " way to it.",
        allow_abbrev=False,
    )
    _add_probe_options(measuring)
    for command in (run, measuring):
        command.add_argument(
            "--debug", action="store_true", help="show where an error came from"
        )
    return parser


def _add_shared_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("file", nargs="?", type=Path, metavar="AGENT.toml", help="settings of this device")
    add("--broker", metavar="URL", help="mqtt://user@host:1883, or mqtts:// for TLS")
    add("--name", help="this device's name, its own on that broker")
    add("--namespace", help="first word of all topics (edgetrain)")
    add("--threads", type=int, metavar="N", help="of the inference engine")
    add("--memory", metavar="SIZE", help="to lend, such as 512MB (half of what is free)")
    add("--password-file", type=Path, metavar="FILE", help="holds the broker password")
    add("--ca-file", type=Path, metavar="FILE", help="who signed the broker's certificate")
    add("--cert-file", type=Path, metavar="FILE", help="this device's certificate")
    add("--key-file", type=Path, metavar="FILE", help="and its private key")
    add("--insecure", action="store_true", help="mqtt:// to another machine will do")


def _add_probe_options(command: argparse.ArgumentParser) -> None:
    _add_shared_options(command)
    add = command.add_argument
    add("--out", type=Path, metavar="FILE", help="write the profile, for `run --profile`")
    add("--json", action="store_true", help="as one JSON object")
    add("--quick", action="store_true", help="only what an agent without profile tells")


def _add_run_options(run: argparse.ArgumentParser) -> None:
    _add_shared_options(run)
    add = run.add_argument
    add("--profile", type=Path, metavar="FILE", help="written by `probe --out` here")
    add(
        "--coordinator-key-file",
        type=Path,
        metavar="FILE",
        help="public key of the only coordinator to obey",
    )
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
    add_simulation_options(run)
    add("--verbose", action="store_true", help="log more")


def _probe(options: argparse.Namespace) -> None:
    """Measure; without a file and a broker under the host's name and without the link."""
    config = None
    if options.file is not None or options.broker is not None:
        if options.file is None and options.name is None:
            options.name = default_name()
        config = agent_config.load(options.file, _overrides(options))
        _claim(config)
    request = Request(
        name=config.name if config else options.name or default_name(),
        threads=config.threads if config else options.threads,
        memory=config.memory if config else options.memory,
        transport=_transport(config) if config else None,
        out=options.out,
        as_json=options.json,
        quick=options.quick,
    )
    probe(request, load())


def _run(options: argparse.Namespace) -> None:
    config = agent_config.load(options.file, _overrides(options))
    _log_to_stderr(config.name, verbose=options.verbose)
    conditions = simulation(options)
    limits = Limits(
        config.threads,
        config.memory_bytes,
        config.gradient,
        config.runs,
        DeviceProfile.load(config.profile) if config.profile else None,
        conditions,
    )
    timetable = Timetable(conditions)
    equipment = equip(config.name, limits, config.datasets, timetable)
    if config.coordinator_key_file is not None:
        equipment = obeying(equipment, config.coordinator_key_file)
    transport = behind_link(_transport(config), conditions, timetable, end_as_in_a_crash)
    agent = Agent(transport, equipment)
    _claim(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: agent.stop())
    agent.run()
    log.info("stopped")


def _claim(config: AgentConfig) -> None:
    """Refuse a name that is taken, and a broker that is not there."""
    try:
        claim_name(_transport(config))
    except TransportError as error:
        raise ConfigError(str(error)) from error


def _transport(config: AgentConfig) -> MqttTransport:
    password = config.password()
    if password is None and BrokerAddress.parse(config.broker).password is None:
        password = os.environ.get(PASSWORD_VARIABLE)
    settings = MqttSettings(
        namespace=config.namespace,
        tls=TlsFiles(config.ca_file, config.cert_file, config.key_file),
        insecure=config.insecure,
    )
    return MqttTransport(config.broker, config.name, password=password, settings=settings)


def _overrides(options: argparse.Namespace) -> list[str]:
    """The options as assignments over the agent file; texts in quotes, as they stand."""
    given = {key: getattr(options, key, None) for key in _TEXT_KEYS}
    for key in _PATH_KEYS:
        if (path := getattr(options, key, None)) is not None:
            given[key] = str(path.absolute())
    for text in getattr(options, "dataset", ()):
        given |= _dataset(text)
    assignments = [
        f"{key}={msgspec.json.encode(value).decode()}"
        for key, value in given.items()
        if value is not None
    ]
    if options.insecure:
        assignments.append("insecure=true")
    if options.threads is not None:
        assignments.append(f"threads={options.threads}")
    if (text := getattr(options, "runs", None)) is not None:
        words = [word for word in text.split(",") if word]
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
