"""Fields of the OpenAI API (and of its common extensions) that this server knows but does not support yet.

A field here is refused with 400 unless its value changes nothing (then it is dropped), so that no client ever believes
that a field was honoured when it was not. Knows nothing about the fields that are supported.
"""

from core.errors import InvalidRequestError, UnsupportedFieldError
from router.protocol.base import FIELD_NAME_CHARS_MAX, HarmlessValues, nearest_name

NO_HARMLESS_VALUE: tuple[object, ...] = ()
"""No value of the field is harmless, except null."""

_BOTH: dict[str, tuple[object, ...]] = {
    "add_special_tokens": NO_HARMLESS_VALUE,
    "allowed_token_ids": NO_HARMLESS_VALUE,
    "bad_words": ([],),
    "cache_salt": NO_HARMLESS_VALUE,
    "ec_transfer_params": NO_HARMLESS_VALUE,
    "guided_choice": NO_HARMLESS_VALUE,
    "guided_grammar": NO_HARMLESS_VALUE,
    "guided_json": NO_HARMLESS_VALUE,
    "guided_regex": NO_HARMLESS_VALUE,
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": NO_HARMLESS_VALUE,
    "length_penalty": (1.0, 1),
    "logprob_token_ids": NO_HARMLESS_VALUE,
    "min_tokens": (0,),
    "priority": (0,),
    "prompt_cache_key": NO_HARMLESS_VALUE,
    "prompt_cache_retention": NO_HARMLESS_VALUE,
    "prompt_embeds": NO_HARMLESS_VALUE,
    "prompt_logprobs": NO_HARMLESS_VALUE,
    "repetition_detection": NO_HARMLESS_VALUE,
    "request_id": NO_HARMLESS_VALUE,
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "session_id": NO_HARMLESS_VALUE,
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "structured_outputs": NO_HARMLESS_VALUE,
    "thinking_token_budget": NO_HARMLESS_VALUE,
    "truncate_prompt_tokens": NO_HARMLESS_VALUE,
    "truncation_side": NO_HARMLESS_VALUE,
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
_COMPLETION: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": NO_HARMLESS_VALUE,
}
_CHAT: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "audio": NO_HARMLESS_VALUE,
    "chat_template": NO_HARMLESS_VALUE,
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include_reasoning": (True,),
    "metadata": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": NO_HARMLESS_VALUE,
    "parallel_tool_calls": (True, False),
    "prediction": NO_HARMLESS_VALUE,
    "reasoning_effort": NO_HARMLESS_VALUE,
    "safety_identifier": NO_HARMLESS_VALUE,
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": NO_HARMLESS_VALUE,
}
COMPLETION_UNSUPPORTED = _BOTH | _COMPLETION
"""Field -> values that change nothing, for /v1/completions."""
CHAT_UNSUPPORTED = _BOTH | _CHAT
"""Field -> values that change nothing, for /v1/chat/completions."""

TOKENIZE_UNSUPPORTED: HarmlessValues = {
    name: _CHAT[name]
    for name in ("add_generation_prompt", "chat_template", "chat_template_kwargs", "continue_final_message")
} | {"mm_processor_kwargs": ({},), "tools": ([],)}
"""Field -> values that change nothing, for /tokenize."""


def drop_harmless_fields(
    body: dict[str, object], supported: frozenset[str], unsupported: HarmlessValues
) -> dict[str, object]:
    """`body` without null fields and without unsupported fields whose value changes nothing.

    Raises UnsupportedFieldError for a known field that is not supported, InvalidRequestError for an unknown one.
    """
    kept: dict[str, object] = {}
    for name, value in body.items():
        if name in supported:
            kept[name] = value
        elif name not in unsupported:
            short = name[:FIELD_NAME_CHARS_MAX]
            near = nearest_name(short, supported)
            hint = f" Did you mean '{near}'?" if near else ""
            raise InvalidRequestError(message=f"Unknown field '{short}'.{hint}", param=short)
        elif value is not None and not any(type(value) is type(v) and value == v for v in unsupported[name]):
            raise UnsupportedFieldError(field=name)
    return {name: value for name, value in kept.items() if value is not None}
