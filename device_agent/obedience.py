"""Makes an agent obey one coordinator only: the one whose public key it was given."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from device_agent.agent import Equipment
from edgetrain.errors import ConfigError
from edgetrain.wire.signature import Verifier


def obeying(equipment: Equipment, key_file: Path) -> Equipment:
    """The same equipment, for commands signed with that key.

    Raises:
        ConfigError: the key cannot be read, or `cryptography` is not installed.
    """
    hello = equipment.hello
    try:
        verifier = Verifier(key_file.read_bytes(), hello.device, hello.session)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"coordinator_key_file {key_file} cannot be read: {reason}"
        ) from error
    except ConfigError as error:
        raise ConfigError(f"coordinator_key_file {key_file}: {error}") from error
    hello = msgspec.structs.replace(hello, signed_by=verifier.fingerprint)
    return dataclasses.replace(equipment, hello=hello, open_command=verifier.open)
