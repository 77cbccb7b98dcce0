"""What our MQTT client adds to paho: prompt delivery, cheap sends, a bounded queue, TLS."""

import contextlib
import queue
import shutil
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode

from edgetrain.errors import ConfigError, TransportError
from edgetrain.transport.flow import SendWindow
from edgetrain.transport.link import MqttSettings
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.transport.paho_client import Client
from edgetrain.transport.tls import TlsFiles
from edgetrain.wire.topics import Channel

WAIT_S = 20.0
OPENSSL = shutil.which("openssl")


def remaining_length(nbytes: int) -> bytes:
    """MQTT's own encoding of a packet's length."""
    encoded = bytearray()
    while True:
        nbytes, digit = divmod(nbytes, 128)
        encoded.append(digit | (128 if nbytes else 0))
        if not nbytes:
            return bytes(encoded)


def publish_packet(topic: str, payload: bytes) -> bytes:
    body = struct.pack(">H", len(topic)) + topic.encode() + payload
    return b"\x30" + remaining_length(len(body)) + body


class SlowSocket:
    """Gives and takes a few bytes a call, as TLS records and slow links do."""

    def __init__(self, incoming: list[bytes] = (), *, room_bytes: int = 0) -> None:
        self.incoming = list(incoming)
        self.room_bytes = room_bytes
        self.taken = bytearray()
        self.offers: list[object] = []

    def recv(self, nbytes: int) -> bytes:
        if not self.incoming:
            raise BlockingIOError
        data, rest = self.incoming[0][:nbytes], self.incoming[0][nbytes:]
        self.incoming[:1] = [rest] if rest else []
        return data

    def send(self, data: bytes) -> int:
        self.offers.append(data)
        self.taken += data[: self.room_bytes]
        return min(len(data), self.room_bytes)

    def close(self) -> None:
        self.incoming.clear()


def delivered_by(client: paho.Client, reads: int) -> list[bytes]:
    """Payloads delivered once the socket is empty; the body comes in `reads` reads."""
    packet = publish_packet("t", bytes(range(200)) * 2)
    head = 1 + len(remaining_length(403))
    body = packet[head:]
    size = len(body) // reads
    pieces = [body[i * size : (i + 1) * size] for i in range(reads - 1)]
    sock = SlowSocket([packet[:head], *pieces, body[(reads - 1) * size :]])
    got: list[bytes] = []
    client.on_message = lambda _client, _userdata, message: got.append(message.payload)
    client._sock = sock
    while sock.incoming:  # the selector wakes the loop only while there is something
        assert client.loop_read() == MQTTErrorCode.MQTT_ERR_SUCCESS
    client._sock = None
    return got


@pytest.mark.parametrize("reads", [1, 99, 100, 101, 199, 200, 201, 300])
def test_a_packet_is_delivered_with_its_last_byte(reads: int) -> None:
    client = Client("c", SendWindow(1000))
    assert delivered_by(client, reads) == [bytes(range(200)) * 2]


def test_without_our_client_the_hundredth_read_leaves_the_packet_waiting() -> None:
    """If this fails, paho has mended it and our override can go."""
    stock = paho.Client(CallbackAPIVersion.VERSION2, "c")
    assert delivered_by(stock, 100) == []


def test_partial_sends_keep_the_bytes_copy_nothing_and_leave_the_window() -> None:
    window = SendWindow(1 << 30)
    client = Client("c", window)
    sock = client._sock = SlowSocket(room_bytes=7)
    client._thread = threading.current_thread()  # as under loop_start: publish only queues
    payloads = [bytes([i]) * (20 + i) for i in range(5)]
    packets = b"".join(publish_packet("t", payload) for payload in payloads)
    for payload in payloads:
        client.publish("t", payload, qos=0)
    assert window.held_bytes == len(packets)
    assert sock.taken == b""
    while client.want_write():
        left = window.held_bytes
        client.loop_write()
        assert window.held_bytes < left
    assert sock.taken == packets
    assert window.held_bytes == 0
    assert all(isinstance(offer, memoryview) for offer in sock.offers)
    client._thread = client._sock = None


def test_tensors_leave_at_once_and_whole_whoever_writes_the_rest() -> None:
    """Two threads send more than the socket takes; a third empties the queue."""
    window = SendWindow(1 << 30)
    client = Client("c", window)
    client._sock, peer = socket.socketpair()
    client._sock.setblocking(False)
    client._thread = threading.current_thread()  # as under loop_start
    client.send("first", b"out before send returns")
    first = publish_packet("first", b"out before send returns")
    assert peer.recv(1000) == first
    assert window.held_bytes == 0
    counts, nbytes = {"a": 40, "b": 40}, 30_000

    def send(topic: str) -> None:
        for i in range(counts[topic]):
            client.send(topic, bytes([i]) * nbytes)

    senders = [threading.Thread(target=send, args=(topic,)) for topic in counts]
    for sender in senders:
        sender.start()
    size = len(publish_packet("a", bytes(nbytes)))
    arrived = bytearray()
    while len(arrived) < size * sum(counts.values()):
        client.loop_write()
        with contextlib.suppress(BlockingIOError):
            arrived += peer.recv(1 << 20, socket.MSG_DONTWAIT)
    for sender in senders:
        sender.join()
    packets = [bytes(arrived[i : i + size]) for i in range(0, len(arrived), size)]
    for topic, count in counts.items():
        mine = [p for p in packets if p == publish_packet(topic, p[-1:] * nbytes)]
        assert [p[-1] for p in mine] == list(range(count))
    assert window.held_bytes == 0
    client._sock.close()
    peer.close()
    client._thread = client._sock = None


def test_senders_fail_when_the_network_thread_has_died() -> None:
    window = SendWindow(1000)
    client = Client("c", window)
    client._sock, peer = socket.socketpair()
    peer.send(b"\x30\x01\x00")  # a PUBLISH too short to hold a topic
    with peer:
        client._thread_main()
    with pytest.raises(TransportError, match="has ended"):
        window.wait()


class ScriptedBroker:
    """The least of MQTT 3.1.1 that a client needs to open, and a tap on what it publishes.

    While `reading` is clear it takes nothing off its connections.
    """

    def __init__(
        self, wrap: Callable[[socket.socket], socket.socket] = lambda s: s
    ) -> None:
        self.reading = threading.Event()
        self.reading.set()
        self.published: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._wrap = wrap
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(WAIT_S)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                thread = threading.Thread(
                    target=self._serve, args=[connection], daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _serve(self, raw: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), raw, self._wrap(raw) as connection:
            while True:
                self.reading.wait(WAIT_S)
                command, body = self._packet(connection)
                match command & 0xF0:
                    case 0x10:  # CONNECT
                        connection.sendall(b"\x20\x02\x00\x00")
                    case 0x80:  # SUBSCRIBE, of one filter
                        connection.sendall(b"\x90\x03" + body[:2] + b"\x00")
                    case 0x30:  # PUBLISH
                        self.published.put(len(body))

    def _packet(self, connection: socket.socket) -> tuple[int, bytes]:
        command = self._exactly(connection, 1)[0]
        length, shift = 0, 0
        while True:
            digit = self._exactly(connection, 1)[0]
            length |= (digit & 127) << shift
            shift += 7
            if digit < 128:
                return command, self._exactly(connection, length)

    @staticmethod
    def _exactly(connection: socket.socket, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            piece = connection.recv(min(1 << 20, nbytes - len(data)))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)


@pytest.fixture
def scripted() -> Iterator[ScriptedBroker]:
    broker = ScriptedBroker()
    yield broker
    broker.stop()


def test_a_sender_waits_while_the_network_takes_nothing(scripted: ScriptedBroker) -> None:
    limit_bytes, nbytes, count = 1 << 20, 500_000, 100
    settings = MqttSettings(window_bytes=limit_bytes)
    transport = MqttTransport(f"mqtt://127.0.0.1:{scripted.port}", "a", settings=settings)
    transport.open(lambda _: None)
    window = transport._links[Channel.DATA].window
    scripted.reading.clear()
    held: list[int] = []

    def send() -> None:
        for _ in range(count):
            transport.send("b", Channel.DATA, bytes(nbytes))
            held.append(window.held_bytes)

    sender = threading.Thread(target=send)
    sender.start()
    while window.held_bytes < limit_bytes:  # 50 MB fill any socket's buffers
        threading.Event().wait(0.001)
    assert len(held) < count
    scripted.reading.set()
    sender.join(WAIT_S)
    assert max(held) <= limit_bytes + nbytes + 100
    bodies = [scripted.published.get(timeout=WAIT_S) for _ in range(count)]
    assert set(bodies) == {2 + len("edgetrain/dev/b/from/a/data") + nbytes}
    transport.close()


def test_closing_ends_though_the_network_takes_nothing(
    scripted: ScriptedBroker, monkeypatch
):
    monkeypatch.setattr("edgetrain.transport.link._END_TIMEOUT_S", 0.1)
    settings = MqttSettings(window_bytes=1 << 30)
    transport = MqttTransport(f"mqtt://127.0.0.1:{scripted.port}", "a", settings=settings)
    transport.open(lambda _: None)
    scripted.reading.clear()
    for _ in range(40):
        transport.send("b", Channel.DATA, bytes(1_000_000))
    threads = [link._client._thread for link in transport._links.values()]
    transport.close()
    assert not any(thread.is_alive() for thread in threads)
    scripted.reading.set()


@pytest.mark.skipif(OPENSSL is None, reason="no openssl on PATH")
def test_tls_needs_the_authority_that_signed(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    subject = "-subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(  # noqa: S603
        [OPENSSL, *request.split(), *subject.split(), "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    broker = ScriptedBroker(lambda raw: context.wrap_socket(raw, server_side=True))
    url = f"mqtts://127.0.0.1:{broker.port}"
    transport = MqttTransport(url, "a", settings=MqttSettings(tls=TlsFiles(certificate)))
    transport.open(lambda _: None)
    transport.send("b", Channel.DATA, bytes(900_000))
    assert broker.published.get(timeout=WAIT_S) > 900_000
    transport.close()
    with pytest.raises(TransportError, match="no TLS connection"):
        MqttTransport(url, "a").open(lambda _: None)
    missing = MqttSettings(tls=TlsFiles(tmp_path / "missing.pem"))
    with pytest.raises(ConfigError, match=r"certificate authorities from .*missing\.pem"):
        MqttTransport(url, "a", settings=missing).open(lambda _: None)
    broker.stop()
