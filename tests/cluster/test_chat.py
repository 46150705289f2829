"""The chat client against a canned server: what is sent, what is shown, and how each failure reads."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from cluster.chat import Answer, ChatOptions, fetch_model_name, open_client, render_timing, stream_answer
from core.errors import ClusterError

TIMING = {"queue_s": 0.01, "prefill_s": 0.2, "transfer_s": None, "ttft_s": 0.3, "tpot_s": 0.05, "total_s": 0.5}


def event(data: object) -> str:
    return f"data: {json.dumps(data)}\n\n"


def delta(text: str | None = None, finish_reason: str | None = None) -> str:
    return event(
        {"choices": [{"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish_reason}]}
    )


USAGE = event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}, "pdcluster_timing": TIMING})
DONE = "data: [DONE]\n\n"


def serve(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    return httpx.Client(base_url="http://127.0.0.1:8000", transport=httpx.MockTransport(answer))


def serve_text(text: str, status: int = 200) -> httpx.Client:
    return serve(lambda request: httpx.Response(status, text=text))


def ask(client: httpx.Client, options: ChatOptions | None = None) -> tuple[Answer, list[str]]:
    shown: list[str] = []
    messages = [{"role": "user", "content": "hi"}]
    with client:
        answer = stream_answer(client, "m", messages, options or ChatOptions(), shown.append)
    return answer, shown


def test_answer_is_shown_piece_by_piece_when_it_streams() -> None:
    stream = ": comment\n\n" + delta() + delta("Par") + delta("is ☕") + delta(finish_reason="stop") + USAGE + DONE
    answer, shown = ask(serve_text(stream))
    assert shown == ["Par", "is ☕"]
    assert (answer.text, answer.finish_reason) == ("Paris ☕", "stop")
    assert (answer.num_prompt_tokens, answer.num_output_tokens, answer.timing) == (9, 2, TIMING)


def test_answer_is_whole_when_it_has_other_ends_of_lines() -> None:
    """U+2028 and U+0085 end a line for Python, and not in a stream of events; JSON may hold them as they are."""
    text = "a\u2028b\u0085c"
    chunk = json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}, ensure_ascii=False)
    assert ask(serve_text(f"data: {chunk}\r\n\r\n{DONE}"))[1] == [text]


def test_url_is_refused_when_it_is_none() -> None:
    with pytest.raises(ClusterError, match=r"http://localhost:abc.*is no URL"):
        open_client("http://localhost:abc")


def test_only_given_options_are_sent_when_others_are_left_to_the_server() -> None:
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200, text=DONE)

    ask(serve(answer))
    ask(serve(answer), ChatOptions(max_tokens=5, temperature=0.0, seed=3, has_timing=True))
    bodies: list[dict[str, Any]] = [json.loads(request.content) for request in sent]
    assert sorted(bodies[0]) == ["messages", "model", "stream", "stream_options"]
    assert (bodies[1]["max_tokens"], bodies[1]["temperature"], bodies[1]["seed"]) == (5, 0.0, 3)
    assert [request.headers.get("x-pdcluster-timing") for request in sent] == [None, "true"]


@pytest.mark.parametrize(
    ("text", "status", "part"),
    [
        ('{"error": {"message": "The server is busy"}}', 503, "answered 503: The server is busy"),
        ("<html>proxy</html>", 502, "answered 502: <html>proxy</html>"),
        (delta("Par"), 200, "closed before the answer was complete"),
        (delta("Par") + event({"error": {"message": "worker lost"}}) + DONE, 200, "worker lost"),
        ("data: {]\n\n", 200, "could not be understood"),
    ],
)
def test_failure_says_what_happened_when_there_is_no_complete_answer(text: str, status: int, part: str) -> None:
    with pytest.raises(ClusterError, match=r"http://127\.0\.0\.1:8000") as caught:
        ask(serve_text(text, status))
    assert part in str(caught.value)


def test_failure_names_the_url_when_nothing_answers() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(ClusterError, match="nothing answers there"):
        ask(serve(refuse))


def test_failure_is_told_when_the_connection_breaks_in_the_middle() -> None:
    def break_off() -> Iterator[bytes]:
        yield delta("Par").encode()
        raise httpx.ReadError("reset")

    with pytest.raises(ClusterError, match="ReadError: reset"):
        ask(serve(lambda request: httpx.Response(200, content=break_off())))


def test_model_is_the_first_one_when_the_server_lists_it() -> None:
    with serve_text('{"data": [{"id": "smollm2"}]}') as client:
        assert fetch_model_name(client) == "smollm2"
    with serve_text('{"data": []}') as client, pytest.raises(ClusterError, match="could not be understood"):
        fetch_model_name(client)


def test_proxies_are_ignored_when_a_client_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with open_client("http://127.0.0.1:8000") as client:
        assert not client.trust_env


def test_timing_shows_a_dash_when_a_part_did_not_happen() -> None:
    answer = Answer(text="", finish_reason="stop", num_prompt_tokens=9, num_output_tokens=2, timing=TIMING)
    lines = render_timing(answer).splitlines()
    assert [line.split("  ")[1] for line in lines] == [
        "queue", "credit", "prefill", "", "transfer", "tail", "decode", "total", "first token", "per token", "tokens"
    ]  # fmt: skip
    assert lines[2].split() == ["prefill", "0.200", "s"]
    assert lines[4].split() == ["transfer", "-"]
    assert lines[-1].split() == ["tokens", "9", "in,", "2", "out"]
