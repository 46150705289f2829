"""Counts of requests and waiting prompt tokens."""

import pytest

from core.errors import InvalidRequestError, OverloadedError
from router.admission import Admission


def make(max_requests: int = 4, max_tokens: int = 100) -> Admission:
    return Admission(max_requests=max_requests, max_queued_prompt_tokens=max_tokens)


def test_all_children_count_and_none_is_admitted_when_one_has_no_room() -> None:
    admission = make()
    admission.reserve(num_children=3, num_prompt_tokens=1)
    with pytest.raises(OverloadedError, match="3 of 4"):
        admission.reserve(num_children=2, num_prompt_tokens=1)
    assert admission.num_in_flight == 3 and admission.num_queued_prompt_tokens == 1
    admission.reserve(num_children=1, num_prompt_tokens=1)


def test_prompts_wait_for_room_unless_nothing_else_waits() -> None:
    admission = make()
    ticket = admission.reserve(num_children=1, num_prompt_tokens=500)
    with pytest.raises(OverloadedError, match="500 prompt tokens"):
        admission.reserve(num_children=1, num_prompt_tokens=1)
    ticket.release_prompt()
    admission.reserve(num_children=1, num_prompt_tokens=1)
    assert admission.num_in_flight == 2


def test_counts_are_released_once_when_release_is_repeated() -> None:
    admission = make()
    tickets = [admission.reserve(num_children=2, num_prompt_tokens=5) for _ in range(2)]
    for _ in range(3):
        tickets[0].release()
        tickets[0].release_prompt()
    assert (admission.num_in_flight, admission.num_queued_prompt_tokens) == (2, 5)


def test_request_is_invalid_when_it_can_never_be_admitted() -> None:
    with pytest.raises(InvalidRequestError):
        make().reserve(num_children=5, num_prompt_tokens=1)
