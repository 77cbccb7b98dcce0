"""The largest packet a broker takes is asked for, and frames are cut to fit."""

import contextlib
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from party import Party

from coordinator.deploy import LEAST_CHUNK_BYTES, chunk_bytes_of
from edgetrain.config import FleetConfig
from edgetrain.errors import ConfigError, TransportError
from edgetrain.transport.base import DEFAULT_MAX_PAYLOAD_BYTES
from edgetrain.transport.broker import embedded_broker
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.transport.packet_limit import FRAME_OVERHEAD_BYTES
from edgetrain.wire.frame import DEFAULT_CHUNK_BYTES, HEADER_BYTES, Address, Kind, Parcel
from edgetrain.wire.ticket import NO_TICKET
from edgetrain.wire.topics import COORDINATOR, Channel

LIMIT_BYTES = 100_000


@contextlib.contextmanager
def limited(folder: Path) -> Iterator[str]:
    """A mosquitto that takes packets of so many bytes; gives its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = folder / "mosquitto.conf"
    config.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\nmax_packet_size {LIMIT_BYTES}\n"
    )
    process = subprocess.Popen(  # noqa: S603
        [shutil.which("mosquitto"), "-c", config], stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(200):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port)),
            ):
                break
            threading.Event().wait(0.02)
        yield f"mqtt://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@pytest.mark.skipif(not shutil.which("mosquitto"), reason="no mosquitto on PATH")
def test_frames_fit_what_the_broker_takes(tmp_path: Path) -> None:
    with limited(tmp_path) as url:
        a = Party(MqttTransport(url, COORDINATOR)).open(watch=True)
        b = Party(MqttTransport(url, "b" * 64)).open()
        limit_bytes = a.transport.payload_limit_bytes
        assert limit_bytes == LIMIT_BYTES - FRAME_OVERHEAD_BYTES
        chunk_bytes = chunk_bytes_of(limit_bytes, None)
        parcel = Parcel(Address(Kind.BUNDLE, 1, 0, 0), bytes(chunk_bytes), chunk_bytes)
        assert parcel.chunks == 1
        a.transport.send(b.transport.name, Channel.DATA, parcel.frame(0, NO_TICKET))
        assert len(b.take().payload) == chunk_bytes + HEADER_BYTES
        a.transport.close()
        b.transport.close()


def test_a_broker_that_does_not_say_is_taken_at_our_word() -> None:
    with embedded_broker(kind="iotcore") as broker:
        a = Party(MqttTransport(broker.url, COORDINATOR)).open(watch=True)
        assert a.transport.payload_limit_bytes == DEFAULT_MAX_PAYLOAD_BYTES
        a.transport.close()


def test_chunks_are_the_least_of_all_limits() -> None:
    assert chunk_bytes_of(DEFAULT_MAX_PAYLOAD_BYTES, None) == DEFAULT_CHUNK_BYTES
    cloud = chunk_bytes_of(DEFAULT_MAX_PAYLOAD_BYTES, 131_072)
    assert cloud == 131_072 - FRAME_OVERHEAD_BYTES
    assert chunk_bytes_of(50_000, 131_072) == 50_000 - HEADER_BYTES
    with pytest.raises(TransportError, match=r"17408 B.*max_packet_size.*max_payload_size"):
        chunk_bytes_of(LEAST_CHUNK_BYTES, None)
    with pytest.raises(ConfigError, match="max_packet_bytes = 1000: must be 32768 or more"):
        FleetConfig(max_packet_bytes=1000)
