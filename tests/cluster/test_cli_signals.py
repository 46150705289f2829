"""Signals that interrupt, and signals that wait."""

import signal
from collections.abc import Iterator

import pytest

from cluster.cli_signals import interruptible, uninterruptible

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers_are_restored() -> Iterator[None]:
    before = [signal.getsignal(number) for number in ALL]
    yield
    assert [signal.getsignal(number) for number in ALL] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_interrupts_when_it_asks_for_the_end(number: signal.Signals) -> None:
    previous = signal.signal(number, signal.SIG_DFL)  # whatever started the tests may ignore it
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(number)
    signal.signal(number, previous)


def test_hangup_is_ignored_when_the_command_was_started_with_nohup() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interruptible():
        signal.raise_signal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize("number", ALL)
def test_signal_waits_when_nothing_may_interrupt(number: signal.Signals) -> None:
    with interruptible(), uninterruptible():
        signal.raise_signal(number)
