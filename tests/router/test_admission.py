"""Counts of prompts, choices and waiting prompt tokens, and what a refused client is told."""

import pytest

from core.clock import ManualClock
from core.errors import InvalidRequestError, OverloadedError
from router.admission import RETRY_AFTER_S_MAX, Admission, Share


def make(
    clock: ManualClock | None = None, max_requests: int = 4, max_sequences: int = 4, max_tokens: int = 100
) -> Admission:
    return Admission(
        clock=clock or ManualClock(),
        max_requests=max_requests,
        max_running_sequences=max_sequences,
        max_queued_prompt_tokens=max_tokens,
    )


def shares(*sizes: tuple[int, int]) -> list[Share]:
    return [Share(num_children=children, num_prompt_tokens=tokens) for children, tokens in sizes]


def counts(admission: Admission) -> tuple[int, int, int]:
    admission.check()
    return admission.num_in_flight, admission.num_sequences, admission.num_queued_prompt_tokens


def test_all_children_count_and_none_is_admitted_when_one_has_no_room() -> None:
    admission = make()
    admission.reserve(num_children=3, num_prompt_tokens=1)
    with pytest.raises(OverloadedError, match="3 of at most 4 choices run"):
        admission.reserve(num_children=2, num_prompt_tokens=1)
    assert counts(admission) == (1, 3, 1)
    admission.reserve(num_children=1, num_prompt_tokens=1)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (shares((1, 1), (1, 1), (1, 1)), "2 of at most 4 requests"),
        (shares((1, 1), (2, 1)), "2 of at most 4 choices"),
        (shares((1, 40), (1, 41)), "20 of at most 100 prompt tokens"),
    ],
)
def test_no_prompt_is_admitted_when_all_together_have_no_room(asked: list[Share], reason: str) -> None:
    admission = make()
    admission.reserve_all(shares((1, 10), (1, 10)))
    with pytest.raises(OverloadedError, match=reason):
        admission.reserve_all(asked)
    assert counts(admission) == (2, 2, 20)


def test_prompts_wait_for_room_unless_nothing_else_waits() -> None:
    admission = make()
    ticket, other = admission.reserve_all(shares((1, 500), (1, 500)))
    with pytest.raises(OverloadedError, match="1000 of at most 100 prompt tokens"):
        admission.reserve(num_children=1, num_prompt_tokens=1)
    ticket.release_prompt()
    other.release_prompt()
    admission.reserve(num_children=1, num_prompt_tokens=1)
    assert counts(admission) == (3, 3, 1)


def test_counts_are_released_once_when_release_is_repeated() -> None:
    admission = make()
    tickets = admission.reserve_all(shares((2, 5), (2, 5)))
    for _ in range(3):
        tickets[0].release()
        tickets[0].release_prompt()
    assert counts(admission) == (1, 2, 5)


@pytest.mark.parametrize(("asked", "param"), [(shares(*[(1, 1)] * 5), "prompt"), (shares((3, 1), (2, 1)), "n")])
def test_request_is_invalid_when_it_can_never_be_admitted(asked: list[Share], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make(max_requests=4, max_sequences=4).reserve_all(asked)
    assert caught.value.param == param


def test_refused_client_is_told_to_wait_as_long_as_room_took_lately() -> None:
    clock = ManualClock()
    admission = make(clock, max_requests=3, max_sequences=100)
    waits: list[int] = []
    tickets = admission.reserve_all(shares((1, 0), (1, 0), (1, 0)))
    for _ in range(40):
        clock.advance(4.0)
        tickets.pop(0).release()
        tickets += admission.reserve_all(shares((1, 0)))
        with pytest.raises(OverloadedError) as caught:
            admission.reserve(num_children=1, num_prompt_tokens=0)
        waits.append(caught.value.retry_after_s)
    assert all(3 <= wait <= 5 for wait in waits[3:]), waits


def test_refused_client_waits_a_second_when_nothing_is_known_and_never_longer_than_the_limit() -> None:
    clock = ManualClock()
    admission = make(clock, max_requests=1)

    def wait_s() -> int:
        with pytest.raises(OverloadedError) as caught:
            admission.reserve(num_children=1, num_prompt_tokens=0)
        return caught.value.retry_after_s

    ticket = admission.reserve(num_children=1, num_prompt_tokens=0)
    clock.advance(1.0)
    assert wait_s() == 1
    ticket.release()
    admission.reserve(num_children=1, num_prompt_tokens=0)
    clock.advance(3600.0)
    assert wait_s() == RETRY_AFTER_S_MAX
