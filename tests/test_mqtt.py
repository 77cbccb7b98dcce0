"""What only the transport over MQTT can do: refuse, break, come back."""

import socket
import threading
from collections.abc import Iterator

import pytest
from party import Party, mosquitto

from edgetrain.errors import ConfigError, TransportError
from edgetrain.transport.address import BrokerAddress
from edgetrain.transport.broker import Broker, embedded_broker
from edgetrain.transport.link import MqttSettings
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.wire.topics import Channel


@pytest.fixture(scope="module", params=[mosquitto, "iotcore"])
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    with embedded_broker(kind=request.param) as running:
        yield running


def test_a_wrong_password_is_said_and_not_printed(broker: Broker) -> None:
    wrong = "guessed-wrong"
    transport = MqttTransport(broker.url, "a", password=wrong)
    with pytest.raises(TransportError, match="user name and password") as caught:
        transport.open(lambda _: None, announce=b"hello")
    address = BrokerAddress.parse(broker.url)
    assert str(address) in str(caught.value)
    assert wrong not in str(caught.value)
    with pytest.raises(TransportError, match="not open"):
        transport.send("b", Channel.DATA, b"")
    transport.close()


def test_a_user_and_password_may_be_given_beside_the_url(broker: Broker) -> None:
    address = BrokerAddress.parse(broker.url)
    transport = MqttTransport(
        str(address), "a", username=address.username, password=address.password
    )
    transport.open(lambda _: None)
    transport.close()


def test_a_broken_connection_comes_back_with_subscriptions_and_presence(broker: Broker):
    watcher = Party(MqttTransport(broker.url, "coordinator")).open(watch=True)
    device = Party(MqttTransport(broker.url, "a")).open(b"hello")
    assert watcher.takes_presence() == ("a", b"hello")
    for link in device.transport._links.values():
        link._client.socket().shutdown(socket.SHUT_RDWR)
    assert watcher.takes_presence() == ("a", b"")
    while not device.transport._links[Channel.DATA].window._paused:
        threading.Event().wait(0.001)
    device.transport.send("coordinator", Channel.CONTROL, b"kept")
    device.transport.send("coordinator", Channel.DATA, b"waited")  # until it is back
    assert {watcher.take().payload for _ in range(2)} == {b"kept", b"waited"}
    assert watcher.takes_presence() == ("a", b"hello")
    for channel in Channel:
        watcher.transport.send("a", channel, b"welcome back")
        assert device.take().payload == b"welcome back"
    watcher.transport.close()
    device.transport.close()


def test_a_forged_source_is_dropped_with_a_warning(broker: Broker, caplog) -> None:
    a, b = (Party(MqttTransport(broker.url, name)).open(watch=True) for name in "ab")
    link = a.transport._links[Channel.CONTROL]
    link.publish("edgetrain/dev/b/from/not a name/control", b"?", qos=1)
    link.publish("edgetrain/up/not a name/presence", b"?", qos=1)
    a.transport.send("b", Channel.CONTROL, b"real")
    assert b.take().payload == b"real"
    assert caplog.text.count("dropped a message") >= 2
    for party in (a, b):
        party.transport.close()


def test_namespaces_do_not_meet(broker: Broker) -> None:
    parties = {
        namespace: Party(
            MqttTransport(broker.url, "a", settings=MqttSettings(namespace=namespace))
        ).open(b"hello", watch=True)
        for namespace in ("one", "two")
    }
    for namespace, party in parties.items():
        party.transport.send("a", Channel.DATA, namespace.encode())
    for namespace, party in parties.items():
        assert party.take().payload == namespace.encode()
        assert party.takes_presence() == ("a", b"hello")
        assert party.inbox.empty()
        assert party.seen.empty()
        party.transport.close()


def test_a_broker_that_stays_away_fails_the_senders() -> None:
    settings = MqttSettings(lost_after_s=0.0)
    with embedded_broker() as running:
        transport = MqttTransport(running.url, "a", settings=settings)
        transport.open(lambda _: None)

    def send_for_ever(channel: Channel) -> None:
        while not threading.Event().wait(0.01):
            transport.send("b", channel, b"?")

    for channel in Channel:
        with pytest.raises(TransportError, match=r"has been down .* Start the broker"):
            send_for_ever(channel)
    transport.close()


def test_no_broker_is_said_at_once() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"mqtt://me:secret@127.0.0.1:{bound.getsockname()[1]}"
        transport = MqttTransport(url, "a")
        with pytest.raises(
            TransportError, match=r"no broker at mqtt://127.0.0.1"
        ) as caught:
            transport.open(lambda _: None)
    assert "secret" not in str(caught.value)


def test_a_server_that_says_nothing_is_not_waited_for() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"mqtt://127.0.0.1:{silent.getsockname()[1]}"
        settings = MqttSettings(connect_timeout_s=0.1)
        transport = MqttTransport(url, "a", settings=settings)
        with pytest.raises(TransportError, match=r"did not answer within 0\.1 s"):
            transport.open(lambda _: None)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("mqtt://host", BrokerAddress("host", 1883, tls=False)),
        ("mqtts://host", BrokerAddress("host", 8883, tls=True)),
        ("mqtt://[::1]:7", BrokerAddress("::1", 7, tls=False)),
        ("mqtt://u:p%40%2F%3A@h:1/", BrokerAddress("h", 1, False, "u", "p@/:")),
        ("mqtt://u@h", BrokerAddress("h", 1883, False, "u")),
    ],
)
def test_urls_are_read_and_printed_without_login(url: str, expected: BrokerAddress) -> None:
    address = BrokerAddress.parse(url)
    assert address == expected
    assert BrokerAddress.parse(str(address)) == BrokerAddress(
        expected.host, expected.port, expected.tls
    )
    assert "p@" not in repr(address)


@pytest.mark.parametrize(
    "url",
    ["", "host:1883", "http://u:secret@host", "mqtt://", "mqtt://u:secret@h:x", "mqtt://h/topic",
     "mqtt://u:secret@h:99999", "mqtt://[u:secret@h"],
)  # fmt: skip
def test_other_urls_are_refused_without_printing_the_password(url: str) -> None:
    with pytest.raises(ConfigError, match="not a broker's URL") as caught:
        BrokerAddress.parse(url)
    assert "secret" not in str(caught.value)
