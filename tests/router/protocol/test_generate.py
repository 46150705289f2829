"""What a body may say: every field's range, what is refused by name, what is dropped because it changes nothing."""

import json
import subprocess
import sys
from typing import Any

import pytest

from core.errors import InvalidRequestError, UnsupportedFieldError
from router.protocol.fields import CHAT_UNSUPPORTED, COMPLETION_UNSUPPORTED
from router.protocol.generate import ChatCompletionRequest, CompletionRequest
from router.protocol.parse import parse_request

USER = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse_request(ChatCompletionRequest, json.dumps({"messages": USER, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse_request(CompletionRequest, json.dumps({"prompt": "hi", **fields}).encode())


@pytest.mark.parametrize("name", sorted(CHAT_UNSUPPORTED))
def test_chat_field_is_refused_by_name_unless_it_changes_nothing(name: str) -> None:
    chat(**{name: None})
    for value in CHAT_UNSUPPORTED[name]:
        chat(**{name: value})
    with pytest.raises(UnsupportedFieldError) as caught:
        chat(**{name: {"anything": "else"}})
    assert caught.value.param == name


@pytest.mark.parametrize("name", sorted(COMPLETION_UNSUPPORTED))
def test_completion_field_is_refused_by_name_unless_it_changes_nothing(name: str) -> None:
    for value in COMPLETION_UNSUPPORTED[name]:
        completion(**{name: value})
    with pytest.raises(UnsupportedFieldError) as caught:
        completion(**{name: ["x"]})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 1.5, 2], [-0.1, 2.1, "1", True]),
        ("top_p", [0.1, 1], [0, 1.1]),
        ("top_k", [-1, 0, 50], [-2, 1.5]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("repetition_penalty", [0.5, 1], [0, -1, 1e9]),
        ("max_tokens", [1], [0, -1, 1.5]),
        ("n", [1, 128], [0, 129, True]),
        ("seed", [-(2**63), 2**63 - 1], [2**63, 1.5]),
        ("stop", ["a", ["a", "b"], []], ["", [""], ["a"] * 17, 3, "x" * 257]),
        ("stop_token_ids", [[1, 2]], [[-1], 1, ["a"]]),
        ("logit_bias", [{"1": 2}, {}], [{"a": 1}, {"-1": 1}, {"1": 101}, {"1": "x"}, []]),
        ("logprobs", [True, False], [1, "yes"]),
        ("stream", [True], [1, "true"]),
        ("model", ["m"], ["", 1]),
        ("messages", [USER], [[], "hi", [{"role": "user"}], [{"role": "boss", "content": "x"}], [1]]),
    ],
)
def test_value_is_refused_by_name_when_out_of_range(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        chat(**{name: value})
    for value in bad:
        with pytest.raises(InvalidRequestError) as caught:
            chat(**{name: value})
        assert (caught.value.param or "").partition(".")[0] == name


@pytest.mark.parametrize("prompt", ["", "x", [1, 2], ["a", "b"], [[1], [2, 3]]])
def test_prompt_may_be_text_or_ids_or_several_of_one_kind(prompt: Any) -> None:
    assert completion(prompt=prompt).prompt == prompt


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], [-1], 5, None, {"a": 1}, ["a"] * 129])
def test_prompt_is_refused_when_it_is_something_else(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(prompt=prompt)
    assert (caught.value.param or "").startswith("prompt")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_token": 1}, "max_token", "Did you mean 'max_tokens'"),
        ({"zzz": 1}, "zzz", "Unknown field"),
        ({"x" * 1000: 1}, "x" * 64, "Unknown field"),
        ({"stream": True, "stream_options": {"include_usag": True}}, "stream_options.include_usag", "'include_usage'"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs 'stream'"),
        ({"top_logprobs": 2}, "top_logprobs", "needs 'logprobs'"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "differ"),
        ({"messages": [{"role": "user", "contents": "x"}]}, "messages.0.contents", "Did you mean 'content'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "not supported"),
        ({"messages": [{"role": ["a"], "content": "x"}]}, "messages.0.role", "'messages.0.role'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type",
            "image_url",
        ),
    ],
)
def test_error_names_the_field_and_the_way_out(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        chat(**fields)
    assert caught.value.param == param


def test_parts_are_joined_and_a_message_of_ours_may_come_back() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    earlier = {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None, "audio": None}
    messages = chat(messages=[{"role": "user", "content": parts}, earlier]).messages
    assert [message.text() for message in messages] == ["a\nb", "yes"]


def test_body_is_refused_when_it_is_nested_deeper_than_the_limit() -> None:
    value: Any = []
    for _ in range(40):
        value = [value]
    with pytest.raises(InvalidRequestError, match="levels deep"):
        chat(messages=value)


@pytest.mark.process
def test_protocol_layers_import_no_http_and_no_torch() -> None:
    code = (
        "import sys, router.protocol.generate, router.protocol.answer;"
        "bad = {'fastapi', 'starlette', 'torch', 'ray', 'tokenizers'} & set(sys.modules); assert not bad, bad"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
