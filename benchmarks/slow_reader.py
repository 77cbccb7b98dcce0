"""What a reader that is slower than its sender costs, with a broker's default limits.

    python benchmarks/slow_reader.py [--megabytes 1000] [--message-kb 256] [--take-ms 20]
        [--json FILE]

One party sends tensors as fast as it may, another takes one every so many milliseconds,
over a mosquitto whose queues are as they come. Every tensor is compared with what was sent.
Beside it, the same bytes go by bare paho at QoS 0 and 1, whose receiver sleeps as long in
its callback. The broker's memory is read from /proc, so Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from edgetrain.runtime.inbox import Inbox
from edgetrain.runtime.outbox import Outbox
from edgetrain.transport.base import Inbound
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.wire.frame import DEFAULT_CHUNK_BYTES, Address, Kind
from edgetrain.wire.reassembly import Message

QUIET_S = 5.0  # bare paho has lost what does not come for so long


@dataclass(frozen=True, slots=True)
class Row:
    """One way of sending.

    Attributes:
        arrived: tensors of `sent`, all of them intact.
        broker_peak_bytes: its largest resident memory.
    """

    how: str
    sent: int
    arrived: int
    seconds: float
    broker_peak_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--message-kb", type=int, default=256)
    parser.add_argument("--take-ms", type=float, default=20.0)
    parser.add_argument("--ways", default="edgetrain,qos0,qos1")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    count = options.megabytes * 1000 // options.message_kb
    load = Load(count, options.message_kb * 1000, options.take_ms / 1e3)
    rows = []
    for way in options.ways.split(","):
        with mosquitto() as (port, pid):
            row = (
                ours(load, port, pid) if way == "edgetrain" else bare(load, port, pid, way)
            )
        print(line(row), flush=True)
        rows.append(row)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


@dataclass(frozen=True, slots=True)
class Load:
    count: int
    message_bytes: int
    take_s: float

    def tensor(self, number: int) -> np.ndarray:
        random = np.random.Generator(np.random.PCG64(number % 16))
        values = random.integers(0, 255, self.message_bytes, dtype=np.uint8)
        values[:8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
        return values


def ours(load: Load, port: int, pid: int) -> Row:
    arrived: queue.SimpleQueue[Message] = queue.SimpleQueue()
    url = f"mqtt://127.0.0.1:{port}"
    sender, receiver = MqttTransport(url, "sender"), MqttTransport(url, "receiver")
    inboxes = [Inbox(lambda *_: True) for _ in range(2)]

    def receive(inbound: Inbound) -> None:
        message = inboxes[1].receive(inbound)
        if message is not None:
            arrived.put(message)

    def lost(*what: object) -> None:
        raise SystemExit(f"not delivered: {what}")

    out = Outbox(sender, inboxes[0], arrived.put, lost)
    back = Outbox(receiver, inboxes[1], arrived.put, lost)
    sender.open(lambda inbound: inboxes[0].receive(inbound) and None)
    receiver.open(receive)

    def send() -> None:
        for number in range(load.count):
            while not out.room:
                time.sleep(0.005)
            address = Address(Kind.ACTIVATION, 1, 0, 1, number)
            out.put(
                "receiver", address, load.tensor(number), chunk_bytes=DEFAULT_CHUNK_BYTES
            )

    start_s = time.perf_counter()
    threading.Thread(target=send, daemon=True).start()
    good = 0
    for number in range(load.count):
        message = arrived.get(timeout=60)
        good += np.array_equal(message.array((load.message_bytes,)), load.tensor(number))
        time.sleep(load.take_s)
        message.taken()
    seconds = time.perf_counter() - start_s
    peak_bytes = peak(pid)
    for end in (out, back, sender, receiver):
        end.close()
    return Row("edgetrain", load.count, good, seconds, peak_bytes)


def bare(load: Load, port: int, pid: int, how: str) -> Row:
    """As most would write it: publish, and work in the callback."""
    qos = int(how[-1])
    good, last_s = [0], [time.perf_counter()]
    ready = threading.Event()

    def on_message(_client: object, _userdata: object, message: paho.MQTTMessage) -> None:
        body = np.frombuffer(message.payload, np.uint8)
        number = int.from_bytes(message.payload[:8], "little")
        good[0] += np.array_equal(body, load.tensor(number))
        time.sleep(load.take_s)
        last_s[0] = time.perf_counter()

    reader = paho.Client(CallbackAPIVersion.VERSION2)
    reader.on_message = on_message
    reader.on_subscribe = lambda *_: ready.set()
    writer = paho.Client(CallbackAPIVersion.VERSION2)
    for client in (reader, writer):
        client.connect("127.0.0.1", port)
        client.loop_start()
    reader.subscribe("t", qos)
    ready.wait(10)
    start_s = time.perf_counter()
    for number in range(load.count):
        info = writer.publish("t", load.tensor(number).tobytes(), qos=qos)
        if number % 16 == 0:
            info.wait_for_publish()
    info.wait_for_publish()
    while good[0] < load.count and time.perf_counter() - last_s[0] < QUIET_S:
        time.sleep(0.1)
    peak_bytes = peak(pid)
    for client in (writer, reader):
        client.disconnect()
        client.loop_stop()
    return Row(how, load.count, good[0], last_s[0] - start_s, peak_bytes)


@contextlib.contextmanager
def mosquitto() -> Iterator[tuple[int, int]]:
    """One with nothing set but its port; gives that and its process id."""
    program = shutil.which("mosquitto")
    if program is None:
        raise SystemExit("mosquitto is not on PATH")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "mosquitto.conf"
        config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\n")
        process = subprocess.Popen(  # noqa: S603
            [program, "-c", str(config)], stderr=subprocess.DEVNULL
        )
        try:
            time.sleep(1.0)
            yield port, process.pid
        finally:
            process.terminate()
            process.wait()


def peak(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (kib,) = [row.split()[1] for row in status.splitlines() if row.startswith("VmHWM")]
    return int(kib) * 1024


def line(row: Row) -> str:
    rate = row.arrived / row.seconds
    return (
        f"{row.how:10} {row.arrived} of {row.sent} arrived intact, {rate:.0f} a second;"
        f" broker at most {row.broker_peak_bytes / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
