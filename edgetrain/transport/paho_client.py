"""The paho-mqtt client with what it lacks: prompt delivery, cheap sends, a bounded queue.

It overrides private methods of paho-mqtt 2.2; the packaging pins that version, and
`tests/test_paho_client.py` fails if another one stops calling them.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from typing import Final, cast

from paho.mqtt import client as paho
from paho.mqtt.client import PUBLISH
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode

from edgetrain.transport.flow import SendWindow

_QUICKACK: Final[int | None] = getattr(socket, "TCP_QUICKACK", None)  # Linux only
_INFLIGHT_MESSAGES: Final = 64
_RECONNECT_MIN_S: Final = 1
_RECONNECT_MAX_S: Final = 5


class Client(paho.Client):
    """An MQTT 3.1.1 client that tells `window` what is queued and what has left.

    Always run it by `loop_start`: without a network thread, `publish` writes from the
    calling thread, and two of them would interleave a large packet.
    """

    def __init__(self, client_id: str, window: SendWindow) -> None:
        super().__init__(
            CallbackAPIVersion.VERSION2,
            client_id,
            protocol=paho.MQTTv311,
            reconnect_on_failure=False,
        )
        self._window = window
        self._queueing = threading.RLock()
        self._writing = threading.RLock()
        self.on_socket_open = send_at_once
        self.max_inflight_messages_set(_INFLIGHT_MESSAGES)
        self.reconnect_delay_set(_RECONNECT_MIN_S, _RECONNECT_MAX_S)

    def persist(self, on: bool) -> None:
        """Whether to connect again when the connection breaks; not, until told so."""
        self._reconnect_on_failure = on

    def end(self, timeout_s: float) -> None:
        """Disconnect and end the network thread, even if the peer has stopped reading."""
        thread = self._thread
        self.disconnect()
        self._thread_terminate = True
        if thread is None:
            return
        thread.join(timeout_s)
        if thread.is_alive():
            _shut(self.socket())
            thread.join(timeout_s)
        self._close_wake_up()

    def kill(self, timeout_s: float) -> None:
        """Break the connection without a goodbye and stay away, as a crash would."""
        thread = self._thread
        self.persist(False)
        _shut(self.socket())
        if thread is not None:
            thread.join(timeout_s)
        self._close_wake_up()

    def _close_wake_up(self) -> None:
        """Close the socket pair that wakes the network thread, while no one writes to it.

        The base class leaves it to the garbage collector, which warns of it if it comes
        upon the sockets before the client.
        """
        with self._queueing:
            self._reset_sockets(sockpair_only=True)

    def _thread_main(self) -> None:
        """Run the network loop; senders must not wait for one that has ended."""
        try:
            super()._thread_main()
        finally:
            self._window.close("the MQTT client's network thread has ended")

    def _ssl_wrap_socket(self, tcp_sock: socket.socket) -> ssl.SSLSocket:
        """Shake hands; unlike the base method's, a socket on which that fails is closed.

        The context checks the certificate and the host name.
        """
        context = cast(ssl.SSLContext, self._ssl_context)
        return context.wrap_socket(tcp_sock, server_hostname=self._host)

    def _packet_read(self) -> MQTTErrorCode:
        """Read, and do not leave a whole packet waiting.

        The base method gives way after 100 reads even when the last of them completed the
        packet. Nothing would then wake the loop until the next byte arrives, which may be
        the answer to a keepalive.
        """
        code = super()._packet_read()
        if code == MQTTErrorCode.MQTT_ERR_AGAIN and self._holds_whole_packet():
            code = super()._packet_read()
        _acknowledge_at_once(self._sock)
        return code

    def _holds_whole_packet(self) -> bool:
        packet = self._in_packet
        return bool(packet["have_remaining"]) and packet["to_process"] == 0

    def _packet_queue(
        self,
        command: int,
        packet: bytes | bytearray,
        mid: int,
        qos: int,
        info: paho.MQTTMessageInfo | None = None,
    ) -> MQTTErrorCode:
        """Queue a view, so that a partial send does not copy all that remains."""
        self._window.add(len(packet))
        view = cast(bytes, memoryview(packet))
        with self._queueing:
            return super()._packet_queue(command, view, mid, qos, info)

    def send(self, topic: str, payload: bytes | bytearray) -> None:
        """Publish at QoS 0, on this thread, as far as the socket takes it.

        To wake the network thread for each message would cost two switches of threads, and
        `publish` a copy and a good deal of bookkeeping. TLS does not bear two threads at
        one connection, so there it is `publish`. Without a connection it is lost.
        """
        sock = self._sock
        if not isinstance(sock, socket.socket) or isinstance(sock, ssl.SSLSocket):
            self.publish(topic, payload, qos=0)
            return
        head = _publish_head(topic, len(payload))
        self._window.add(len(head) + len(payload))
        with self._writing:
            broken_meanwhile = self._sock is not sock
            if broken_meanwhile:
                return  # `resume` empties the window
            sent_bytes = 0
            if not self._out_packet:
                # the network thread meets an error of the socket too, and deals with it
                with contextlib.suppress(OSError):
                    sent_bytes = sock.sendmsg((head, payload))
                self._window.remove(sent_bytes)
            if sent_bytes == len(head) + len(payload):
                return
            rest = cast(bytes, memoryview(b"".join((head, payload)))[sent_bytes:])
            info = paho.MQTTMessageInfo(0)
            with self._queueing:
                super()._packet_queue(PUBLISH, rest, 0, 0, info)

    def reconnect(self) -> MQTTErrorCode:
        """Not while another thread writes: its rest would go to the new connection."""
        with self._writing:
            return super().reconnect()

    def _packet_write(self) -> MQTTErrorCode:
        """One thread at a time: a packet that left in part comes first again."""
        with self._writing:
            return super()._packet_write()

    def _sock_send(self, buf: bytes | bytearray) -> int:
        sent_bytes = super()._sock_send(buf)
        self._window.remove(sent_bytes)
        return sent_bytes


def _publish_head(topic: str, payload_bytes: int) -> bytes:
    """What stands before the payload in a PUBLISH packet of QoS 0.

    Source: MQTT 3.1.1, sections 2.2.3 and 3.3.
    """
    name = topic.encode()
    head = bytearray((PUBLISH,))
    left = 2 + len(name) + payload_bytes
    while True:
        left, digit = divmod(left, 128)
        head.append(digit | (128 if left else 0))
        if not left:
            break
    return bytes(head) + len(name).to_bytes(2, "big") + name


def send_at_once(_client: paho.Client, _userdata: object, sock: object) -> None:
    """Nagle's algorithm would hold small packets back for 40 ms."""
    if isinstance(sock, socket.socket):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _acknowledge_at_once(sock: object) -> None:
    """Ask for prompt TCP acknowledgements; Linux forgets the wish, so it is repeated.

    A broker without TCP_NODELAY otherwise waits for our delayed ones, 40 ms each.
    """
    if _QUICKACK is None or not isinstance(sock, socket.socket):
        return
    try:
        sock.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)
    except OSError:
        return  # closed meanwhile: there is nothing left to acknowledge


def _shut(sock: object) -> None:
    if not isinstance(sock, socket.socket):
        return
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the network thread closed it first
