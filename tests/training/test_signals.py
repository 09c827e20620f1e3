"""The first signal is noted, a second one acts; afterwards all is as it was."""

import os
import signal
import threading

import pytest

from weft.training.signals import Interrupted, Signals


def send(number):
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def handlers():
    """Make a signal that is let through raise here, and put the handlers back after."""

    def raised(number, frame):
        raise KeyboardInterrupt(number)

    before = {number: signal.signal(number, raised) for number in (signal.SIGTERM, signal.SIGINT)}
    yield raised
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_is_noted_and_the_second_acts(number):
    with Signals() as signals:
        assert signals.received is None
        send(number)
        assert signals.received == number
        with pytest.raises(KeyboardInterrupt):
            send(number)


def test_outside_they_act_as_before(handlers):
    with Signals():
        assert signal.getsignal(signal.SIGTERM) != handlers
    assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGINT) == handlers
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM)


def test_handlers_are_put_back_after_an_error_too(handlers):
    def fails():
        with Signals():
            send(signal.SIGINT)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert signal.getsignal(signal.SIGINT) == handlers


def test_in_another_thread_nothing_is_touched(handlers):
    got = []

    def inside():
        with Signals() as signals:
            got.append(signal.getsignal(signal.SIGTERM) == handlers)
            got.append(signals.received)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert got == [True, None]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_exit_code_is_the_shells(number, code):
    stop = Interrupted(number)
    assert stop.exit_code == code
    assert str(stop) == f"stopped by {signal.Signals(number).name}; saved"
    assert not isinstance(stop, Exception), "what catches all errors must not catch it"
