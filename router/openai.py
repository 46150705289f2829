"""OpenAI requests as prepared requests: the checks that need the model, the one length check, the seed.

Knows nothing about HTTP, answers or workers.
"""

import random
from collections.abc import Callable, Sequence
from typing import cast

from core.errors import InvalidRequestError, ModelNotFoundError
from core.request import SamplingParams
from router.generation import PreparedRequest
from router.protocol.generate import ChatCompletionRequest, ChatMessage, CompletionRequest, GenerateRequest
from router.text import TextCodec

COMPLETION_TOKENS_DEFAULT = 16
"""max_tokens of /v1/completions when the client gives none; a chat answer may fill what is left of the length."""
TEMPERATURE_GREEDY_BELOW = 1e-5
"""Smaller temperatures are greedy: dividing logits by them would overflow."""
TEXT_SHRINK_MAX = 4
"""Normalisation of a tokenizer shortens a text by no more than this factor."""

PROBE_CHARS_PER_TOKEN = 16
"""A text of more characters per token of the limit is tokenised in part first."""
PROBE_EXCESS = 2
"""A beginning of a text with so many times the tokens of the limit cannot become short by what follows."""

MakeSeed = Callable[[], int]


def random_seed() -> int:
    """A seed for a request whose client gave none."""
    return random.SystemRandom().getrandbits(63)


class RequestPreparer:
    """Prepares requests for one model."""

    def __init__(self, text: TextCodec, model_name: str, make_seed: MakeSeed = random_seed) -> None:
        self._text = text
        self._model_name = model_name
        self._make_seed = make_seed

    def prepare_chat(self, request: ChatCompletionRequest, max_model_len: int) -> PreparedRequest:
        """Raises InvalidRequestError or ModelNotFoundError."""
        self.check_model(request.model)
        token_ids = self.encode_chat(request.messages, max_model_len)
        limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        max_tokens = _output_limit(len(token_ids), limit, None, max_model_len, param="messages", limit_param=name)
        num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
        return self._prepared(request, token_ids, max_tokens, num_logprobs)

    def prepare_completion(self, request: CompletionRequest, max_model_len: int) -> list[PreparedRequest]:
        """One for each prompt. Raises InvalidRequestError or ModelNotFoundError."""
        self.check_model(request.model)
        prepared: list[PreparedRequest] = []
        for prompt in _prompts(request):
            token_ids = self._token_ids(prompt, max_model_len)
            max_tokens = _output_limit(
                len(token_ids), request.max_tokens, COMPLETION_TOKENS_DEFAULT, max_model_len, "prompt", "max_tokens"
            )
            prepared.append(self._prepared(request, token_ids, max_tokens, request.logprobs))
        return prepared

    def check_model(self, model: str | None) -> None:
        """Raises ModelNotFoundError for another model than the served one."""
        if model is not None and model != self._model_name:
            raise ModelNotFoundError(model=model, served=self._model_name)

    def encode_chat(
        self, messages: Sequence[ChatMessage], max_model_len: int, add_special_tokens: bool = False
    ) -> list[int]:
        """Token ids of a conversation, rendered; it may be longer than the model takes, but not by much."""
        plain = [
            {
                "role": "system" if message.role == "developer" else message.role,
                "content": message.text(),
                **({"name": message.name} if message.name is not None else {}),
            }
            for message in messages
        ]
        self._refuse_long("\n".join(message["content"] for message in plain), max_model_len, "messages")
        return self._text.encode(self._text.render(plain), add_special_tokens)

    def encode_text(self, text: str, max_model_len: int, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt; it may be longer than the model takes, but not by much."""
        self._refuse_long(text, max_model_len, "prompt")
        return self._text.encode(text, add_special_tokens)

    def check_ids(self, token_ids: list[int], param: str) -> None:
        """Raises InvalidRequestError for ids that the model does not have."""
        too_large = next((token_id for token_id in token_ids if token_id >= self._text.vocab_size), None)
        if too_large is not None:
            text = f"'{param}' has token id {too_large}; this model's are less than {self._text.vocab_size}."
            raise InvalidRequestError(message=text, param=param)

    def _token_ids(self, prompt: str | list[int], max_model_len: int) -> list[int]:
        if isinstance(prompt, list):
            self.check_ids(prompt, "prompt")
            return prompt
        token_ids = self.encode_text(prompt, max_model_len)
        if not token_ids:
            raise InvalidRequestError(message="The prompt has no tokens.", param="prompt")
        return token_ids

    def _refuse_long(self, text: str, max_model_len: int, param: str) -> None:
        """Refuses a text that is certainly too long for a fraction of what tokenising it would cost."""
        if len(text) > max_model_len * self._text.token_bytes_max * TEXT_SHRINK_MAX:
            message = f"The prompt has {len(text)} characters, far more than {max_model_len} tokens can hold."
            raise InvalidRequestError(message=message, param=param)
        size = PROBE_CHARS_PER_TOKEN * max_model_len
        while size < len(text):
            num_tokens = len(self._text.encode(text[:size], False))
            if num_tokens > PROBE_EXCESS * max_model_len:
                message = (
                    f"The first {size} of the prompt's {len(text)} characters are {num_tokens} tokens; this model "
                    f"takes {max_model_len} of prompt and output together."
                )
                raise InvalidRequestError(message=message, param=param)
            size *= 4

    def _prepared(
        self, request: GenerateRequest, token_ids: list[int], max_tokens: int, num_logprobs: int | None
    ) -> PreparedRequest:
        bias = {int(token_id): float(value) for token_id, value in (request.logit_bias or {}).items()}
        self.check_ids(list(bias), "logit_bias")
        stop_token_ids = request.stop_token_ids or []
        self.check_ids(stop_token_ids, "stop_token_ids")
        sampling = SamplingParams(
            logit_bias=bias,
            repetition_penalty=request.repetition_penalty,
            frequency_penalty=request.frequency_penalty,
            presence_penalty=request.presence_penalty,
            temperature=request.temperature if request.temperature >= TEMPERATURE_GREEDY_BELOW else 0.0,
            top_k=max(0, request.top_k),
            top_p=request.top_p,
            min_p=request.min_p,
            seed=self._make_seed() if request.seed is None else request.seed % 2**64,
            num_logprobs=num_logprobs,
            max_tokens=max_tokens,
            stop_token_ids=tuple(stop_token_ids),
            ignore_eos=request.ignore_eos,
        )
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        return PreparedRequest(
            token_ids=tuple(token_ids), sampling=sampling, num_children=request.n, stop=tuple(dict.fromkeys(stop))
        )


def _prompts(request: CompletionRequest) -> list[str | list[int]]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return list(cast("list[str | list[int]]", prompt))


def _output_limit(
    num_prompt: int, limit: int | None, default: int | None, max_model_len: int, param: str, limit_param: str
) -> int:
    """max_tokens such that prompt and output fit. `default`: when the client gave no limit; None: what is left."""
    left = max_model_len - num_prompt
    if left < 1:
        text = f"The prompt has {num_prompt} tokens; this model takes {max_model_len} of prompt and output together."
        raise InvalidRequestError(message=text, param=param)
    if limit is None:
        return left if default is None else min(default, left)
    if limit > left:
        text = f"The prompt has {num_prompt} tokens and '{limit_param}' is {limit}; together at most {max_model_len}."
        raise InvalidRequestError(message=text, param=limit_param)
    return limit
