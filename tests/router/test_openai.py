"""OpenAI requests as prepared requests: lengths, defaults, seeds, vocabulary."""

from typing import Any

import pytest

from core.errors import InvalidRequestError, ModelNotFoundError
from router.openai import RequestPreparer
from router.protocol.generate import ChatCompletionRequest, ChatMessage, CompletionRequest
from router.text import TextProcessor


@pytest.fixture
def preparer(text: TextProcessor) -> RequestPreparer:
    return RequestPreparer(text, "tiny", make_seed=lambda: 77)


def completion(prompt: Any = "abc", **fields: Any) -> CompletionRequest:
    return CompletionRequest(prompt=prompt, **fields)


def chat(content: str = "abc", **fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=[ChatMessage(role="developer", content=content)], **fields)


def test_output_limit_has_its_default_when_the_client_gives_none(
    preparer: RequestPreparer, text: TextProcessor
) -> None:
    assert preparer.prepare_completion(completion(), 100)[0].sampling.max_tokens == 16
    assert preparer.prepare_completion(completion(), 10)[0].sampling.max_tokens == 7
    prepared = preparer.prepare_chat(chat(), 100)
    assert prepared.sampling.max_tokens == 100 - len(prepared.token_ids)
    assert "system" in text.decode(prepared.token_ids)


@pytest.mark.parametrize(("length", "limit", "is_refused"), [(9, 1, False), (10, 1, True), (5, 5, False), (5, 6, True)])
def test_request_is_refused_when_prompt_and_output_do_not_fit(
    preparer: RequestPreparer, length: int, limit: int, is_refused: bool
) -> None:
    request = completion([1] * length, max_tokens=limit)
    if not is_refused:
        assert preparer.prepare_completion(request, 10)[0].sampling.max_tokens == limit
        return
    with pytest.raises(InvalidRequestError) as caught:
        preparer.prepare_completion(request, 10)
    assert caught.value.param == ("prompt" if length >= 10 else "max_tokens")


def test_long_text_is_refused_before_it_is_tokenised(preparer: RequestPreparer) -> None:
    with pytest.raises(InvalidRequestError, match="characters"):
        preparer.prepare_completion(completion("x" * 1_000_000), 10)


def test_seed_is_fixed_and_unsigned(preparer: RequestPreparer) -> None:
    assert preparer.prepare_completion(completion(), 100)[0].sampling.seed == 77
    assert preparer.prepare_completion(completion(seed=-1), 100)[0].sampling.seed == 2**64 - 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [300]}, "prompt"),
        ({"logit_bias": {"300": 1.0}}, "logit_bias"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
    ],
)
def test_token_id_is_refused_when_the_model_has_none_such(
    preparer: RequestPreparer, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        preparer.prepare_completion(completion(**fields), 100)
    assert caught.value.param == param


def test_sampling_fields_arrive_and_extremes_are_normalised(preparer: RequestPreparer) -> None:
    request = completion(
        temperature=1e-9, top_k=-1, top_p=0.5, min_p=0.1, logit_bias={"5": -1.0}, stop=["a", "a", "b"], n=3, logprobs=0
    )
    prepared = preparer.prepare_completion(request, 100)[0]
    sampling = prepared.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, 0, 0.5, 0.1)
    assert (sampling.logit_bias, sampling.num_logprobs) == ({5: -1.0}, 0)
    assert (prepared.stop, prepared.num_children) == (("a", "b"), 3)


def test_empty_text_and_other_models_are_refused(preparer: RequestPreparer) -> None:
    with pytest.raises(InvalidRequestError, match="no tokens"):
        preparer.prepare_completion(completion(""), 100)
    with pytest.raises(ModelNotFoundError):
        preparer.prepare_completion(completion(model="other"), 100)
