"""The send window: who may pass, who waits, who fails."""

import queue
import threading

import pytest

from edgetrain.errors import TransportError
from edgetrain.transport.flow import SendWindow

WAIT_S = 20.0


def test_a_paused_window_holds_senders_until_it_resumes_or_closes() -> None:
    window = SendWindow(100)
    window.add(500)
    window.resume()
    window.wait()
    window.pause()
    results: queue.SimpleQueue[str] = queue.SimpleQueue()

    def send() -> None:
        try:
            window.wait()
        except TransportError as error:
            results.put(str(error))
        else:
            results.put("sent")

    for release, result in (
        (window.resume, "sent"),
        (lambda: window.close("over"), "over"),
    ):
        sender = threading.Thread(target=send)
        sender.start()
        assert results.empty()
        release()
        assert results.get(timeout=WAIT_S) == result
        sender.join(WAIT_S)
        window.pause()
    window.close("later")
    with pytest.raises(TransportError, match="over"):
        window.wait()


def test_draining_bytes_let_one_message_past_the_limit() -> None:
    window = SendWindow(100)
    window.add(99)
    window.wait()
    window.add(50)
    passed = threading.Event()

    def send() -> None:
        window.wait()
        passed.set()

    sender = threading.Thread(target=send)
    sender.start()
    window.remove(49)
    assert (window.held_bytes, passed.is_set()) == (100, False)
    window.remove(1)
    assert passed.wait(WAIT_S)
    sender.join(WAIT_S)
    window.remove(1000)
    assert window.held_bytes == 0
