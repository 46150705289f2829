"""Text to token ids and back for one model: its tokenizer, its chat template, and the text stream of one child.

Reads tokenizer.json, tokenizer_config.json, chat_template.jinja and config.json of a Hugging Face directory. Templates
run in a sandbox and only the model's own is ever used. Knows nothing about requests, HTTP or workers.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer

from core.errors import InvalidRequestError, ModelLoadError
from router.detokenise import make_detokeniser
from router.stop import StopMatcher

BREAK = "\udfff"
"""Stands in a rendered conversation where a client's words would spell a control token: text on both sides of it is
tokenised apart. A lone surrogate, which no text of a client has."""
LONG_TEXT_CHARS = 8192
"""Longer texts are tokenised without Python's global lock, so that another thread may run meanwhile."""
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextCodec(Protocol):
    """What the router needs to know about a model's text; `TextProcessor` is the real one."""

    vocab_size: int
    """Token ids must be less than this."""
    token_bytes_max: int
    """No token stands for more bytes of text than this: a lower bound for the number of tokens of a text."""
    is_byte_level: bool

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def render(self, messages: Sequence[dict[str, str]]) -> str: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def spell(self, token_ids: Sequence[int]) -> str: ...

    def is_special(self, token_id: int) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def token_name(self, token_id: int) -> str: ...

    def token_text(self, token_id: int) -> tuple[str, bytes]: ...


class TextProcessor:
    """The tokenizer and chat template of one model directory."""

    def __init__(self, model_directory: Path) -> None:
        """Raises ModelLoadError naming the file and field at fault."""
        document = _read_json(model_directory, "tokenizer.json", required=True)
        config = _read_json(model_directory, "tokenizer_config.json", required=False)
        try:
            self._tokenizer = Tokenizer.from_buffer(json.dumps(document).encode())
        except ValueError as error:
            raise _load_error(model_directory, "tokenizer.json", "-", str(error)) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {token_id for token_id, token in added.items() if token.special}
        self._added_text = {token_id: token.content for token_id, token in added.items()}
        self._control = _ControlTokens([token.content for token in added.values() if token.special])
        self.is_byte_level = _is_byte_level(document.get("decoder"))
        names = self._tokenizer.get_vocab(with_added_tokens=True)
        self.token_bytes_max = max((len(name.encode()) for name in names), default=1)
        model_config = _read_json(model_directory, "config.json", required=False)
        vocab_size = model_config.get("vocab_size")
        self.vocab_size: int = vocab_size if isinstance(vocab_size, int) else max(names.values()) + 1
        self._special_names = {
            name: value for name in SPECIAL_TOKEN_NAMES if (value := _token_content(config.get(name))) is not None
        }
        self._template = _compile_template(model_directory, config)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, or of a rendered conversation. A lone surrogate in it is an InvalidRequestError.

        What spells a control token becomes that token, unless a BREAK is in it.
        """
        first, *others = text.split(BREAK)
        ids = self._encode(first, add_special_tokens)
        for piece in others:
            ids += self._encode(piece, False)
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            if len(text) > LONG_TEXT_CHARS:
                (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
            else:
                encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError(message=f"The text cannot be tokenised: {error}") from error
        ids: list[int] = encoding.ids
        return ids

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The conversation as the model expects it, ending where the assistant's answer begins.

        `messages`: each with `role` and `content`, and `name` if the client gave one. Where their words spell a control
        token, the result has a BREAK in it: a client's words never become a token that only the template may write.
        Raises InvalidRequestError when the template refuses them, or when the model has no template.
        """
        if self._template is None:
            text = "This model has no chat template. Use /v1/completions."
            raise InvalidRequestError(message=text, param="messages")
        defused = [{key: self._control.defuse(value) for key, value in message.items()} for message in messages]
        try:
            return self._template.render(
                messages=defused, tools=None, documents=None, add_generation_prompt=True, **self._special_names
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                message=f"The chat template refuses these messages: {error}", param="messages"
            ) from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of all ids at once, without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def spell(self, token_ids: Sequence[int]) -> str:
        """Text of all ids at once, special tokens spelled out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def token_name(self, token_id: int) -> str:
        name: str | None = self._tokenizer.id_to_token(token_id)
        return name or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one id of a byte-level tokenizer in an answer's text; empty for special and unknown ids."""
        return b"" if token_id in self._special_ids else self._raw_bytes(token_id)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """One id for people, special ones spelled out, and its bytes. Incomplete characters show as U+FFFD."""
        if token_id in self._added_text:
            text = self._added_text[token_id]
            return text, text.encode()
        raw = self._raw_bytes(token_id) if self.is_byte_level else self.decode([token_id]).encode()
        return raw.decode("utf-8", "replace"), raw

    def _raw_bytes(self, token_id: int) -> bytes:
        name = self.token_name(token_id)
        try:
            return bytes(_BYTE_OF_CHARACTER[character] for character in name)
        except KeyError:
            return name.encode()


class _ControlTokens:
    """Finds where a text spells a control token. One of a single character cannot be broken, and no model has any."""

    def __init__(self, contents: Sequence[str]) -> None:
        self._contents = frozenset(content for content in contents if len(content) > 1)
        self._lengths = sorted({len(content) for content in self._contents})
        beginnings = sorted({re.escape(content[:2]) for content in self._contents})
        self._begin = re.compile(f"(?=({'|'.join(beginnings)}))") if beginnings else None

    def defuse(self, text: str) -> str:
        """`text` with a BREAK after the first character of everything that spells a control token."""
        if self._begin is None:
            return text
        cuts = [found.start() + 1 for found in self._begin.finditer(text) if self._is_at(text, found.start())]
        borders = [0, *cuts, len(text)]
        return BREAK.join(text[start:end] for start, end in pairwise(borders))

    def _is_at(self, text: str, start: int) -> bool:
        return any(text[start : start + length] in self._contents for length in self._lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """New text of a child."""

    text: str
    num_tokens: int
    """Ids that were taken in; fewer than given when a stop string completed."""
    stop: str | None = None
    """The stop string that completed: the child has ended."""


class TextStream:
    """Text of one child: detokeniser and stop strings."""

    def __init__(self, codec: TextCodec, stops: Sequence[str]) -> None:
        self._detokeniser = make_detokeniser(codec)
        self._matcher = StopMatcher(stops)

    def push(self, token_ids: Sequence[int], *, is_last: bool, num_silent: int = 0) -> TextPiece:
        """Take ids in. `is_last`: no more will come. `num_silent`: so many ids at the end have no text (a stop id)."""
        parts: list[str] = []
        for index, token_id in enumerate(token_ids):
            if index >= len(token_ids) - num_silent:
                continue
            result = self._matcher.push(self._detokeniser.push(token_id))
            parts.append(result.text)
            if result.stop is not None:
                return TextPiece(text="".join(parts), num_tokens=index + 1, stop=result.stop)
        if is_last:
            result = self._matcher.push(self._detokeniser.finish())
            parts.append(result.text)
            if result.stop is not None:
                return TextPiece(text="".join(parts), num_tokens=len(token_ids), stop=result.stop)
            parts.append(self._matcher.finish())
        return TextPiece(text="".join(parts), num_tokens=len(token_ids))


def _byte_alphabet() -> dict[str, int]:
    """Byte-level tokenizers spell each byte as one printable character: itself where printable, else from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHARACTER = _byte_alphabet()


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return [step.get("type") for step in steps] == ["ByteLevel"]


def _token_content(value: object) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _compile_template(directory: Path, config: dict[str, Any]) -> jinja2.Template | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        name, source = file.name, file.read_text(encoding="utf-8")
    else:
        value = config.get("chat_template")
        if isinstance(value, list):
            value = {entry["name"]: entry["template"] for entry in value}.get("default")
        if value is None:
            return None
        name, source = "tokenizer_config.json", value
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise _load_error(directory, name, "chat_template", f"line {error.lineno}: {error}") from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only its contents."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _read_json(directory: Path, name: str, *, required: bool) -> dict[str, Any]:
    path = directory / name
    if not required and not path.is_file():
        return {}
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise _load_error(directory, name, "-", str(error.strerror)) from error
    except ValueError as error:
        raise _load_error(directory, name, "-", f"not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise _load_error(directory, name, "-", "not a JSON object")
    return document


def _load_error(directory: Path, file: str, field: str, problem: str) -> ModelLoadError:
    return ModelLoadError(path=directory, file=file, field=field, problem=problem)
