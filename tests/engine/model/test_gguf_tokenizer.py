"""Tokenizers built from GGUF metadata: pre-tokenizers, special tokens, refusals."""

from typing import Any

import pytest
from tokenizers import pre_tokenizers

from engine.model.gguf_tokenizer import TokenizerFieldError, read_tokenizer

TOKENS = ["<s>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "123", "ab", "<tool>"]
FIELDS: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, *[1] * (len(TOKENS) - 3), 4],
    "tokenizer.ggml.merges": ["1 2", "12 3", "a b"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.chat_template": "{{ messages }}",
}


def split(text: str, **changes: Any) -> list[str]:
    fields = {**FIELDS, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    tokens: list[str] = read_tokenizer(fields, 128).tokenizer.encode(text).tokens
    return tokens


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [("smollm", ["ab", "1", "2", "3", "1"]), ("gpt-2", ["ab", "123", "1"]), ("llama-bpe", ["<s>", "ab", "123", "1"])],
)
def test_digits_are_split_as_the_pre_tokenizer_says(pre: str, tokens: list[str]) -> None:
    assert split("ab1231", pre=pre) == tokens


def test_first_token_is_added_only_when_the_file_says_so() -> None:
    assert split("ab", add_bos_token=True) == ["<s>", "ab"]
    assert split("ab", pre="llama-bpe", add_bos_token=False) == ["ab"]


def test_special_tokens_are_matched_whole_and_skipped_when_decoding() -> None:
    built = read_tokenizer(FIELDS, 128)
    ids = built.tokenizer.encode("<s>ab<tool>é<end>").ids
    assert [ids[0], ids[1], ids[2], ids[-1]] == [0, TOKENS.index("ab"), TOKENS.index("<tool>"), 1]
    assert built.tokenizer.decode(ids) == "ab<tool>é"
    assert built.tokenizer.decode(ids, skip_special_tokens=False) == "<s>ab<tool>é<end>"
    assert built.tokenizer.get_vocab_size() == len(TOKENS)


def test_config_names_the_special_tokens_and_the_template() -> None:
    built = read_tokenizer(FIELDS, 128)
    assert (built.bos_token_id, built.eos_token_id) == (0, 1)
    assert built.config["eos_token"] == "<end>"
    assert built.config["chat_template"] == "{{ messages }}"
    assert "unk_token" not in built.config


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("model", "llama", "is 'llama'; supported: gpt2"),
        ("pre", "deepseek-llm", "is 'deepseek-llm'; supported: gpt-2, llama-bpe, smollm"),
        ("pre", None, "is None"),
        ("tokens", [], "is missing, or not a list of strings"),
        ("tokens", [*TOKENS[:-1], "ab"], "holds a token twice"),
        ("merges", ["x y"], "'x y' names a token that is not in the vocabulary"),
        ("token_type", [1, 2], "must hold one kind for each"),
        ("eos_token_id", 10_000, "is 10000, outside the vocabulary"),
    ],
)
def test_field_is_named_when_the_tokenizer_is_not_supported(key: str, value: Any, problem: str) -> None:
    with pytest.raises(TokenizerFieldError) as caught:
        read_tokenizer({**FIELDS, f"tokenizer.ggml.{key}": value}, 128)
    assert caught.value.field == f"tokenizer.ggml.{key}"
    assert problem in caught.value.problem
