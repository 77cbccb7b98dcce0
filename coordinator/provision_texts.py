"""The texts that `edgetrain fleet` writes for people, mosquitto and agents to read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from edgetrain.wire.topics import COORDINATOR, Channel, inbox, presence, presence_filter

# Mosquitto refuses comments after a value. A queue of this many 256 KiB frames holds any
# burst that the schedules allow; zero would mean "none" to some versions.
_MOSQUITTO: Final = """\
# Written by `edgetrain fleet`. Reload with SIGHUP after `fleet add` and `fleet revoke`.
per_listener_settings false
allow_anonymous false
acl_file {folder}/acl
persistence false
log_dest stderr
log_type error
log_type warning
set_tcp_nodelay true
max_packet_size 1048576
max_inflight_messages 64
max_queued_messages 8192
max_keepalive 60

listener {port}
cafile {folder}/ca.crt
certfile {folder}/broker.crt
keyfile {folder}/broker.key
crlfile {folder}/revoked.crl
tls_version tlsv1.2
require_certificate true
use_identity_as_username true
"""

_AGENT: Final = """\
broker = "{url}"
name = "{name}"
namespace = "{namespace}"
ca_file = "ca.crt"
cert_file = "device.crt"
key_file = "device.key"
coordinator_key_file = "coordinator.pub"
"""

_COORDINATOR: Final = """\
[fleet]
broker = "{url}"
namespace = "{namespace}"
ca_file = "ca.crt"
cert_file = "coordinator.crt"
key_file = "coordinator.key"
signing_key_file = "signing.key"
"""

_BROKER_README: Final = """\
Copy this folder to the broker's machine, to {folder}.
It must belong to the user that runs mosquitto, and nobody else may read broker.key.
Start: mosquitto -c {folder}/mosquitto.conf
After `fleet add` or `revoke`, copy acl and revoked.crl again and send mosquitto a SIGHUP.
"""

_DEVICE_README: Final = """\
For {name}, and no other device. device.key is a secret: leave its mode at 600.
Start: edgetrain-agent run agent.toml     (needs pip install "edgetrain[secure]")
Lost or stolen: edgetrain fleet revoke DIR {name}
"""

_COORDINATOR_README: Final = """\
For whoever trains. coordinator.key and signing.key are secrets: devices obey them.
Who is there: edgetrain devices --fleet fleet.toml
Train: edgetrain train RUN.toml --fleet fleet.toml
"""


def mosquitto_conf(folder: Path, port: int) -> str:
    return _MOSQUITTO.format(folder=folder, port=port)


def access_list(namespace: str, devices: Iterable[str]) -> str:
    """Who may write and read what, device by device.

    Patterns would be shorter, but they would leave a revoked device its rights for as long
    as its connection lasts: this way it loses them when the broker reads the list again.
    """
    anyone = "+"
    blocks = [
        [
            f"user {COORDINATOR}",
            f"topic read {presence_filter(namespace)}",
            *(
                f"topic {access} {topic}"
                for channel in Channel
                for access, topic in (
                    ("write", inbox(namespace, anyone, COORDINATOR, channel)),
                    ("read", inbox(namespace, COORDINATOR, anyone, channel)),
                )
            ),
        ]
    ]
    for name in devices:
        lines = [f"user {name}", f"topic readwrite {presence(namespace, name)}"]
        for channel in Channel:
            lines.append(f"topic write {inbox(namespace, anyone, name, channel)}")
            lines.append(f"topic read {inbox(namespace, name, anyone, channel)}")
        blocks.append(lines)
    head = "# Written by `edgetrain fleet`; whoever is not named here may do nothing.\n\n"
    return head + "\n".join("\n".join(block) + "\n" for block in blocks)


def agent_toml(url: str, name: str, namespace: str) -> str:
    return _AGENT.format(url=url, name=name, namespace=namespace)


def coordinator_toml(url: str, namespace: str) -> str:
    return _COORDINATOR.format(url=url, namespace=namespace)


def broker_readme(folder: Path) -> str:
    return _BROKER_README.format(folder=folder)


def device_readme(name: str) -> str:
    return _DEVICE_README.format(name=name)


def coordinator_readme() -> str:
    return _COORDINATOR_README
