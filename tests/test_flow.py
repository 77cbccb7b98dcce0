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


def test_drain_returns_when_all_has_left_or_the_window_closed():
    window = SendWindow(100)
    window.drain(WAIT_S)  # nothing is inside
    window.add(150)
    done = threading.Event()

    def drain() -> None:
        window.drain(WAIT_S)
        done.set()

    for end in (lambda: window.remove(50), lambda: window.close("over")):
        done.clear()
        waiting = threading.Thread(target=drain)
        waiting.start()
        window.remove(50)
        assert not done.wait(0.01)
        window.remove(50)
        end()
        assert done.wait(WAIT_S)
        waiting.join()
        window.add(150)
