"""The tokenizer inside a GGUF file as a `tokenizers` file: byte-level BPE with the pre-tokenizer that the GGUF names.

Knows nothing about weights, or where the files are written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

# ggml's kinds of vocabulary entries that text must match as a whole.
_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PRE_TOKENIZERS = ("gpt-2", "llama-bpe", "smollm")
"""Supported values of `tokenizer.ggml.pre`."""


class TokenizerFieldError(ValueError):
    """A field of the GGUF's tokenizer is missing or unsupported; `field` is its key."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field, self.problem = field, problem


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTokenizer:
    """The two tokenizer files of a Hugging Face directory."""

    tokenizer: Tokenizer
    config: Mapping[str, object]
    """Content of `tokenizer_config.json`."""
    bos_token_id: int | None
    eos_token_id: int | None


def read_tokenizer(fields: Mapping[str, object], context_length: int) -> GgufTokenizer:
    """Build the tokenizer from GGUF metadata; TokenizerFieldError when it is not a supported byte-level BPE."""
    if fields.get("tokenizer.ggml.model") != "gpt2":
        found = fields.get("tokenizer.ggml.model")
        raise TokenizerFieldError("tokenizer.ggml.model", f"is {found!r}; supported: gpt2 (byte-level BPE)")
    tokens = _strings(fields, "tokenizer.ggml.tokens")
    tokenizer = _build_bpe(tokens, _strings(fields, "tokenizer.ggml.merges"), _pre_name(fields))
    tokenizer.add_tokens(_added_tokens(tokens, fields.get("tokenizer.ggml.token_type")))
    special = {name: _token_id(fields, name, len(tokens)) for name in ("bos", "eos", "unknown", "padding")}
    bos = special["bos"]
    # llama.cpp adds the first token by itself only for Llama 3's vocabulary.
    adds_bos = bool(fields.get("tokenizer.ggml.add_bos_token", _pre_name(fields) == "llama-bpe"))
    if adds_bos and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], bos)]
        )
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    config: dict[str, object] = {names[name]: tokens[i] for name, i in special.items() if i is not None}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"model_max_length": context_length}
    template = fields.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return GgufTokenizer(tokenizer=tokenizer, config=config, bos_token_id=bos, eos_token_id=special["eos"])


def _pre_name(fields: Mapping[str, object]) -> str:
    name = fields.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise TokenizerFieldError("tokenizer.ggml.pre", f"is {name!r}; supported: {', '.join(PRE_TOKENIZERS)}")
    return name


def _build_bpe(tokens: Sequence[str], merges: Sequence[str], pre: str) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise TokenizerFieldError("tokenizer.ggml.tokens", "holds a token twice")
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocab.keys():
            raise TokenizerFieldError("tokenizer.ggml.merges", f"{merge!r} names a token that is not in the vocabulary")
        pairs.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre != "llama-bpe")
    match pre:
        case "smollm":
            steps = [pre_tokenizers.Digits(individual_digits=True), byte_level]
        case "llama-bpe":
            steps = [pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated"), byte_level]
        case _:
            steps = [byte_level]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _added_tokens(tokens: Sequence[str], kinds: object) -> list[AddedToken]:
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise TokenizerFieldError("tokenizer.ggml.token_type", f"must hold one kind for each of {len(tokens)} tokens")
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _strings(fields: Mapping[str, object], key: str) -> list[str]:
    value = fields.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise TokenizerFieldError(key, "is missing, or not a list of strings")
    return value


def _token_id(fields: Mapping[str, object], name: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = fields.get(key)
    if value is not None and (not isinstance(value, int) or not 0 <= value < num_tokens):
        raise TokenizerFieldError(key, f"is {value!r}, outside the vocabulary of {num_tokens}")
    return value
