"""Token ids to text, piece by piece; the same result as decoding all ids of a child at once without special tokens.

    ids that are text already   |  ids held back: their bytes are not whole characters yet
    [ ... emitted ...           )[ held                                                    )

Byte-level tokenizers (the usual kind) map each id to bytes, which an incremental UTF-8 decoder turns into text. For
others the ids since the last clean border are decoded again, with the ids before it as context. Knows nothing about
stop strings.
"""

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

HELD_TOKENS_MAX = 64
"""Ids held back by the window method; more than this is not the beginning of any character."""

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class Vocabulary(Protocol):
    """What a detokeniser needs of a tokenizer."""

    is_byte_level: bool

    def is_special(self, token_id: int) -> bool:
        """The id has no text in an answer."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one id; empty for special and unknown ids."""
        ...

    def token_name(self, token_id: int) -> str:
        """The tokenizer's own spelling of the id; empty for unknown ids."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of all ids at once, without special tokens."""
        ...


class Detokeniser(Protocol):
    """The text of one child."""

    def push(self, token_id: int) -> str:
        """Text that this id made certain."""
        ...

    def finish(self) -> str:
        """The ids ended: the rest of the text."""
        ...


class ByteDetokeniser:
    """For byte-level tokenizers."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._vocabulary.token_bytes(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokeniser:
    """For every other tokenizer: decodes a short window twice, without and with the new ids."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        if self._vocabulary.is_special(token_id):
            return ""
        self._held.append(token_id)
        text = self._new_text()
        is_open = text.endswith("\ufffd") or _BYTE_TOKEN.fullmatch(self._vocabulary.token_name(token_id)) is not None
        if (is_open or not text) and len(self._held) <= HELD_TOKENS_MAX:
            return ""
        self._context, self._held = self._held, []
        return text

    def finish(self) -> str:
        text = self._new_text()
        self._context, self._held = self._held, []
        return text

    def _new_text(self) -> str:
        known = self._vocabulary.decode(self._context)
        return self._vocabulary.decode(self._context + self._held)[len(known) :]


def make_detokeniser(vocabulary: Vocabulary) -> Detokeniser:
    return ByteDetokeniser(vocabulary) if vocabulary.is_byte_level else WindowDetokeniser(vocabulary)
