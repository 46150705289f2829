"""One stream, byte by byte: what counts as a token, and everything that makes an answer a failure."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench.record import EVENT_BYTES_MAX, FailureReason, RequestRecord, StreamReader, message_of
from tests.cluster.bench.fake_server import DONE, event, token_event, usage_event


def read(*pieces: bytes, has_token_ids: bool = False) -> StreamReader:
    """One piece per second, the first at second 1."""
    reader = StreamReader(has_token_ids)
    for index, piece in enumerate(pieces):
        reader.feed(piece, 1.0 + index)
    return reader


def chat_event(finish_reason: str | None = None, **delta: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})


GOOD = (token_event("a"), token_event("b"), token_event("c", "length"), usage_event(5, 3), DONE)


def test_stream_is_complete_when_tokens_usage_and_end_marker_came() -> None:
    reader = read(*GOOD)
    assert reader.failure(3) is None
    assert reader.token_times_s == [1.0, 2.0, 3.0]
    assert (reader.num_prompt_tokens, reader.num_output_tokens) == (5, 3)


@given(st.data())
def test_result_is_the_same_however_the_bytes_are_cut(data: st.DataObject) -> None:
    line_end = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    whole = b": ping\n\n".join(GOOD).replace(b"\n", line_end)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=40)))
    reader = StreamReader()
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        reader.feed(whole[begin:end], 1.0)
    assert reader.failure(3) is None
    assert len(reader.token_times_s) == reader.num_output_tokens == 3


def test_chunk_counts_once_when_it_holds_several_tokens() -> None:
    reader = read(token_event("a b c", token_ids=[1, 2, 3]), token_event("d", "length", token_ids=[4]),
                  usage_event(5, 4) + DONE, has_token_ids=True)  # fmt: skip
    assert reader.failure(4) is None
    assert reader.token_times_s == [1.0, 2.0]
    record = RequestRecord(started_s=0.5, num_prompt_tokens=5, num_output_tokens=4, token_times_s=reader.token_times_s)
    assert (record.ttft_s, record.e2el_s, record.itls_s) == (0.5, 1.5, [1.0])
    assert record.tpot_s == pytest.approx(1.0 / 3)


def test_role_alone_is_no_token_when_a_chat_opens() -> None:
    reader = read(chat_event(role="assistant", content=""), chat_event(content="Hi"), chat_event("stop"),
                  usage_event(9, 2) + DONE)  # fmt: skip
    assert reader.failure(None) is None
    assert reader.token_times_s == [2.0, 3.0], "the end of text is a token, too"


def test_role_counts_when_it_comes_with_text() -> None:
    assert read(chat_event(role="assistant", content="Hi")).token_times_s == [1.0]


def test_empty_text_is_a_token_unless_ids_say_otherwise() -> None:
    assert read(token_event("")).token_times_s == [1.0]
    assert read(token_event(""), has_token_ids=True).token_times_s == []
    assert read(token_event("", token_ids=[7]), has_token_ids=True).token_times_s == [1.0]


def test_request_with_one_token_has_no_tpot() -> None:
    record = RequestRecord(started_s=0.0, num_prompt_tokens=1, num_output_tokens=1, token_times_s=[0.25])
    assert (record.tpot_s, record.itls_s, record.ttft_s, record.e2el_s) == (None, [], 0.25, 0.25)


ERROR = event({"error": {"message": "worker lost", "code": 503}})


@pytest.mark.parametrize(
    ("pieces", "reason", "part"),
    [
        (GOOD[:-1], FailureReason.TRUNCATED, "no [DONE] after 3 chunks"),
        ((), FailureReason.TRUNCATED, "no [DONE] after 0 chunks"),
        ((*GOOD[:2], usage_event(5, 3), DONE), FailureReason.TRUNCATED, "no finish reason"),
        ((GOOD[0], ERROR, DONE), FailureReason.ERROR_EVENT, "worker lost"),
        ((*GOOD[:3], ERROR, GOOD[3], DONE), FailureReason.ERROR_EVENT, "worker lost"),
        ((GOOD[0], b"data: {broken\n\n", *GOOD[1:]), FailureReason.BAD_STREAM, "no JSON"),
        ((b"data: [1]\n\n", *GOOD), FailureReason.BAD_STREAM, "no object"),
        ((event({"choices": {"0": "x"}}), *GOOD), FailureReason.BAD_STREAM, "no list"),
        ((b"x" * (EVENT_BYTES_MAX + 1),), FailureReason.BAD_STREAM, "more than"),
        ((*GOOD[:3], DONE), FailureReason.NO_USAGE, "completion_tokens"),
        ((*GOOD[:3], event({"choices": [], "usage": {"completion_tokens": True}}), DONE), FailureReason.NO_USAGE, ""),
        ((*GOOD[:3], usage_event(5, 4), DONE), FailureReason.WRONG_COUNT, "4 tokens instead of 3"),
        ((*GOOD[:3], usage_event(5, 2), DONE), FailureReason.WRONG_COUNT, "3 chunks with text, usage says 2"),
        ((chat_event("stop", role="assistant"), usage_event(5, 0), DONE), FailureReason.WRONG_COUNT, "0 tokens"),
        ((chat_event(role="assistant"), usage_event(5, 0), DONE), FailureReason.TRUNCATED, "no finish"),
    ],
)  # fmt: skip
def test_answer_is_a_failure_when(pieces: tuple[bytes, ...], reason: FailureReason, part: str) -> None:
    failure = read(*pieces).failure(3)
    assert failure is not None
    assert failure[0] is reason
    assert part in failure[1]


def test_answer_is_a_failure_when_ids_and_usage_disagree() -> None:
    pieces = (token_event("a", token_ids=[1]), token_event("b", "length", token_ids=[2]), usage_event(5, 3), DONE)
    assert read(*pieces, has_token_ids=True).failure(3) == (
        FailureReason.WRONG_COUNT, "2 token ids arrived, usage says 3",
    )  # fmt: skip
    assert read(*pieces).failure(3) is None, "text alone cannot show it"


def test_answer_is_a_failure_when_ids_were_asked_for_and_never_came() -> None:
    failure = read(*GOOD, has_token_ids=True).failure(3)
    assert failure is not None and failure[0] is FailureReason.NO_TOKENS


def test_usage_counts_when_it_comes_with_the_last_token() -> None:
    last = {"choices": [{"text": "b", "finish_reason": "stop"}], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
    assert read(GOOD[0], event(last), DONE).failure(2) is None


def test_any_count_is_right_when_nothing_was_asked_for() -> None:
    assert read(*GOOD).failure(None) is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "busy"}}, "busy"),
        ({"error": "plain"}, "plain"),
        ({"detail": "x"}, "{'detail': 'x'}"),
        ("oops" * 100, ("oops" * 50)),
    ],
)
def test_message_is_what_a_person_needs(body: object, message: str) -> None:
    assert message_of(body) == message


def test_details_survive_json() -> None:
    assert json.loads(json.dumps({"reason": FailureReason.TIMEOUT})) == {"reason": "timeout"}
