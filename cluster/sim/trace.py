"""Requests to simulate: when they arrive, how long they are and which blocks of their prompts they share.

Read from a Mooncake trace (JSONL), an Azure trace (CSV) or a request log of our own (JSONL). Knows nothing about
clusters, nor about time that passes.

A request log is one JSON object per line, a header first. `blocks` names the blocks of the prompt in order, the partial
one at its end included; it may be left out, and is where `block_size` is null:

    {"schema_version": 1, "block_size": 512}
    {"arrival_s": 0.25, "num_prompt_tokens": 700, "num_output_tokens": 20, "blocks": [0, 1]}
"""

import codecs
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from core.errors import TraceError
from engine.step import IntArray, LongArray

MOONCAKE_BLOCK_SIZE = 512
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
LOG_SCHEMA_VERSION = 1
REQUESTS_MAX = 10_000_000
TOKENS_MAX = 1 << 24
"""Of one prompt, and of one answer."""
ARRIVAL_S_MAX = 1e9
LINE_BYTES_MAX = 1 << 24
FORMATS = (
    "Give a Mooncake trace (JSONL with timestamp, input_length, output_length and hash_ids), an Azure trace (CSV with "
    "TIMESTAMP, ContextTokens and GeneratedTokens) or a request log (JSONL whose first line has schema_version)"
)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SHARED, _OWN = range(2)
"""What a stream of token ids is for: blocks that the trace names, or a prompt of which nothing is known."""

DoubleArray = NDArray[np.float64]
HashArray = NDArray[np.uint64]

_Tokens = Annotated[int, msgspec.Meta(ge=1, le=TOKENS_MAX)]
_Block = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_T = TypeVar("_T")


class TracedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace."""

    arrival_s: float
    """From the trace's start."""
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks in order, a partial one at its end included; empty where the trace knows none. Two
    prompts are equal in their leading blocks of equal ids."""
    block_size: int | None = None
    """Tokens of a block; None where the trace has no blocks."""
    index: int = 0
    """Place in the trace."""


class RequestTable(Sequence[TracedRequest]):
    """Requests as columns, made into values when asked for: 200,000 with 24 blocks each take 43 MB, not 300."""

    def __init__(
        self,
        *,
        arrivals_s: DoubleArray,
        num_prompt_tokens: IntArray,
        num_output_tokens: IntArray,
        block_starts: LongArray,
        block_ids: LongArray,
        block_size: int | None,
    ) -> None:
        """Request i has block_ids[block_starts[i]:block_starts[i + 1]]; all others have an entry per request."""
        self.arrivals_s = arrivals_s
        self.num_prompt_tokens = num_prompt_tokens
        self.num_output_tokens = num_output_tokens
        self.block_starts = block_starts
        self.block_ids = block_ids
        self.block_size = block_size

    def __len__(self) -> int:
        return len(self.arrivals_s)

    @overload
    def __getitem__(self, index: int) -> TracedRequest: ...
    @overload
    def __getitem__(self, index: slice) -> "RequestTable": ...
    def __getitem__(self, index: int | slice) -> "TracedRequest | RequestTable":
        """A slice is a table of its own: its requests are counted from 0."""
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        index = range(len(self))[index]
        return TracedRequest(
            arrival_s=float(self.arrivals_s[index]),
            num_prompt_tokens=int(self.num_prompt_tokens[index]),
            num_output_tokens=int(self.num_output_tokens[index]),
            blocks=tuple(self.block_ids[self.block_starts[index] : self.block_starts[index + 1]].tolist()),
            block_size=self.block_size,
            index=index,
        )

    def take(self, order: LongArray) -> "RequestTable":
        """The requests at these places, in this order; a place may come again."""
        begins, counts = self.block_starts[order], np.diff(self.block_starts)[order]
        starts = np.concatenate([[0], np.cumsum(counts)])
        sources = np.repeat(begins - starts[:-1], counts) + np.arange(starts[-1])
        return RequestTable(
            arrivals_s=self.arrivals_s[order],
            num_prompt_tokens=self.num_prompt_tokens[order],
            num_output_tokens=self.num_output_tokens[order],
            block_starts=starts,
            block_ids=self.block_ids[sources],
            block_size=self.block_size,
        )


class TableBuilder:
    """Takes requests one at a time, in any order."""

    def __init__(self, block_size: int | None) -> None:
        self.block_size = block_size
        self._arrivals, self._prompts, self._outputs = array("d"), array("i"), array("i")
        self._starts, self._ids = array("q", [0]), array("q")

    def __len__(self) -> int:
        return len(self._arrivals)

    def add(self, arrival_s: float, num_prompt: int, num_output: int, blocks: Iterable[int]) -> None:
        self._arrivals.append(arrival_s)
        self._prompts.append(num_prompt)
        self._outputs.append(num_output)
        self._ids.extend(blocks)
        self._starts.append(len(self._ids))

    def table(self, *, is_from_first: bool) -> RequestTable:
        """In order of arrival, of equal ones the first added first; arrivals may be counted from the first one."""
        table = RequestTable(
            arrivals_s=np.array(self._arrivals),
            num_prompt_tokens=np.array(self._prompts),
            num_output_tokens=np.array(self._outputs),
            block_starts=np.array(self._starts),
            block_ids=np.array(self._ids),
            block_size=self.block_size,
        )
        if np.any(np.diff(table.arrivals_s) < 0):
            table = table.take(np.argsort(table.arrivals_s, kind="stable"))
        if is_from_first:
            table.arrivals_s -= table.arrivals_s[0]
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    block_size: int | None
    """Tokens of a block that requests name; None where nothing is known of their prompts."""
    requests: Sequence[TracedRequest]


def read_trace(path: Path) -> Trace:
    """Read a trace in the format that its first line shows. Raises TraceError."""
    number, line = next(_lines(path), (1, b""))
    if line.startswith(b"{"):
        keys = _decode(msgspec.json.Decoder(dict[str, Any]), path, number, line).keys()
        if "schema_version" in keys:
            return read_request_log(path)
        if keys & set(_MooncakeLine.__struct_fields__):
            return read_mooncake(path)
    elif set(_cells(line)) & set(AZURE_COLUMNS):
        return read_azure(path)
    raise TraceError(place=f"{path}:{number}", problem="begins like no trace that is known here", remedy=FORMATS)


def read_mooncake(path: Path) -> Trace:
    """Read a Mooncake trace: `timestamp` in ms, one of `hash_ids` per 512 tokens begun. Arrivals count from the first
    request. Raises TraceError.
    """
    builder, decoder = TableBuilder(MOONCAKE_BLOCK_SIZE), msgspec.json.Decoder(_MooncakeLine)
    for number, line in _lines(path):
        read = _decode(decoder, path, number, line)
        _check_blocks(path, number, read.input_length, len(read.hash_ids), MOONCAKE_BLOCK_SIZE)
        builder.add(read.timestamp / 1000, read.input_length, read.output_length, read.hash_ids)
    return _trace(path, builder, is_from_first=True)


def read_azure(path: Path) -> Trace:
    """Read an Azure LLM inference trace: no blocks. Arrivals, to the microsecond, count from the first request. Raises
    TraceError.
    """
    builder, lines, first = TableBuilder(None), _lines(path), None
    number, header = next(lines, (1, b""))
    names = _cells(header)
    if missing := [name for name in AZURE_COLUMNS if name not in names]:
        problem = f"the first line names no column {' and no column '.join(missing)}"
        raise TraceError(place=f"{path}:{number}", problem=problem, remedy=FORMATS)
    places = [names.index(name) for name in AZURE_COLUMNS]
    for number, line in lines:
        cells = _cells(line)
        if len(cells) != len(names):
            raise _malformed(path, number, f"has {len(cells)} cells, the first line {len(names)}")
        when, num_prompt, num_output = (cells[place] for place in places)
        try:
            moment = datetime.fromisoformat(when)
        except ValueError:
            raise _malformed(path, number, f"TIMESTAMP is '{when}', no date and time") from None
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        first = first or moment
        prompt = _whole(path, number, "ContextTokens", num_prompt)
        output = _whole(path, number, "GeneratedTokens", num_output)
        builder.add((moment - first).total_seconds(), prompt, output, ())
    return _trace(path, builder, is_from_first=True)


def read_request_log(path: Path) -> Trace:
    """Read a log of our own; arrivals are as written. Raises TraceError."""
    lines = _lines(path)
    number, line = next(lines, (1, b"{}"))
    header = _decode(msgspec.json.Decoder(_LogHeader), path, number, line)
    if header.schema_version != LOG_SCHEMA_VERSION:
        problem = f"has schema_version {header.schema_version}, and only {LOG_SCHEMA_VERSION} can be read"
        raise TraceError(place=f"{path}:{number}", problem=problem, remedy="Read it with the version that wrote it")
    builder, decoder = TableBuilder(header.block_size), msgspec.json.Decoder(_LogLine)
    for number, line in lines:
        read = _decode(decoder, path, number, line)
        if read.blocks:
            _check_blocks(path, number, read.num_prompt_tokens, len(read.blocks), header.block_size)
        builder.add(read.arrival_s, read.num_prompt_tokens, read.num_output_tokens, read.blocks)
    return _trace(path, builder, is_from_first=False)


def write_request_log(path: Path, trace: Trace) -> None:
    """Write a log that reads as the same trace, as a whole or not at all. Raises TraceError."""
    encoder, partial = msgspec.json.Encoder(), path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            header = _LogHeader(schema_version=LOG_SCHEMA_VERSION, block_size=trace.block_size)
            file.write(encoder.encode(header) + b"\n")
            for one in trace.requests:
                logged = _LogLine(one.arrival_s, one.num_prompt_tokens, one.num_output_tokens, one.blocks)
                file.write(encoder.encode(logged) + b"\n")
        partial.replace(path)
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
        raise TraceError(place=str(path), problem=problem, remedy="Choose a folder that can be written to") from error


def scaled(trace: Trace, *, rate: float = 1.0, num_requests: int | None = None, seed: int) -> Trace:
    """The trace's first `num_requests`, or its whole shape again and again; all arrivals `rate` times as fast.

    Repeats follow each other in time, each one gap after the one before it, a gap of the trace that the seed chooses.
    Blocks of a repeat are new ones, shared within it as in the trace. Raises TraceError.
    """
    count = len(trace.requests) if num_requests is None else num_requests
    if not (0 < rate < math.inf and 0 < count <= REQUESTS_MAX):
        problem = f"cannot be made {rate} times as fast with {count} requests"
        remedy = f"Give a positive factor and 1 to {REQUESTS_MAX} requests"
        raise TraceError(place=trace.name, problem=problem, remedy=remedy)
    table = _table_of(trace)
    repeats, places = np.divmod(np.arange(count), len(table))
    num_repeats = int(repeats[-1]) + 1
    gaps = np.diff(table.arrivals_s) if len(table) > 1 else np.zeros(1)
    pauses = np.random.default_rng(seed).choice(gaps, size=num_repeats - 1)
    span = table.arrivals_s[-1] - table.arrivals_s[0]
    offsets = np.concatenate([[0.0], np.cumsum(span + pauses)])
    chosen = table.take(places)
    # Sums are rounded: a repeat must not begin before the last one's end for that.
    chosen.arrivals_s = np.maximum.accumulate(chosen.arrivals_s + offsets[repeats]) / rate
    if num_repeats > 1 and len(chosen.block_ids):
        ids, stride = chosen.block_ids, int(chosen.block_ids.max()) + 1
        if stride * num_repeats > 2**63:  # ids that are hashes leave no room above them
            distinct, ids = np.unique(ids, return_inverse=True)
            stride = len(distinct)
        chosen.block_ids = ids + stride * np.repeat(repeats, np.diff(chosen.block_starts))
    return Trace(name=trace.name, block_size=trace.block_size, requests=chosen)


def prompt_tokens(request: TracedRequest, *, vocab_size: int, seed: int) -> tuple[int, ...]:
    """The ids, each in [0, vocab_size), of a prompt that has the blocks of the request: the same in every process.

    A block's tokens are a hash of (seed, block id, offset), so that prompts share the leading blocks of equal ids and,
    chance equality of a few tokens apart, nothing else; without blocks they are one of (seed, request's index, offset).
    """
    names: tuple[int, ...] = (request.index,)
    size, kind = request.num_prompt_tokens, _OWN
    if request.blocks:
        assert request.block_size is not None, "a request with blocks knows their size"
        names, size, kind = request.blocks, request.block_size, _SHARED
    key = _mix(_mix(np.array([seed % 2**64], dtype=np.uint64)) ^ np.uint64(kind))
    streams = _mix(key ^ np.array(names, dtype=np.uint64))
    hashes = _mix(streams[:, None] + _GOLDEN * np.arange(1, size + 1, dtype=np.uint64))
    tokens = (hashes >> np.uint64(32)) * np.uint64(vocab_size) >> np.uint64(32)
    return tuple(tokens.ravel()[: request.num_prompt_tokens].tolist())


def _mix(values: HashArray) -> HashArray:
    """The finalizer of SplitMix64, a bijection of 64-bit words."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


class _MooncakeLine(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=ARRIVAL_S_MAX * 1000)]
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: tuple[_Block, ...]


class _LogHeader(msgspec.Struct, forbid_unknown_fields=True):
    schema_version: int
    block_size: Annotated[int, msgspec.Meta(ge=1, le=TOKENS_MAX)] | None


class _LogLine(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    arrival_s: Annotated[float, msgspec.Meta(ge=0, le=ARRIVAL_S_MAX)]
    num_prompt_tokens: _Tokens
    num_output_tokens: _Tokens
    blocks: tuple[_Block, ...] = ()


def _table_of(trace: Trace) -> RequestTable:
    if isinstance(trace.requests, RequestTable):
        return trace.requests
    builder = TableBuilder(trace.block_size)
    for one in trace.requests:
        builder.add(one.arrival_s, one.num_prompt_tokens, one.num_output_tokens, one.blocks)
    return builder.table(is_from_first=False)


def _trace(path: Path, builder: TableBuilder, *, is_from_first: bool) -> Trace:
    if not len(builder):
        raise TraceError(place=str(path), problem="holds no request", remedy=FORMATS)
    requests = builder.table(is_from_first=is_from_first)
    return Trace(name=path.stem, block_size=builder.block_size, requests=requests)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number, from 1, and content of every line that is not blank. Raises TraceError."""
    try:
        with path.open("rb") as file:
            for number in range(1, REQUESTS_MAX + 2):
                line = file.readline(LINE_BYTES_MAX + 1)
                if len(line) > LINE_BYTES_MAX:
                    raise _malformed(path, number, f"is longer than {LINE_BYTES_MAX} bytes")
                if not line:
                    return
                if content := (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip():
                    yield number, content
            raise _malformed(path, REQUESTS_MAX + 1, f"is one line more than {REQUESTS_MAX}")
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise TraceError(place=str(path), problem=problem, remedy="Give a file that can be read") from error


def _cells(line: bytes) -> list[str]:
    return [cell.strip() for cell in line.decode("utf-8", "replace").split(",")]


def _decode(decoder: "msgspec.json.Decoder[_T]", path: Path, number: int, line: bytes) -> _T:
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(path, number, str(error)) from error


def _whole(path: Path, number: int, name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and 1 <= int(text) <= TOKENS_MAX):
        raise _malformed(path, number, f"{name} is '{text}', no whole number from 1 to {TOKENS_MAX}")
    return int(text)


def _check_blocks(path: Path, number: int, num_tokens: int, num_blocks: int, block_size: int | None) -> None:
    if block_size is None:
        raise _malformed(path, number, "names blocks, and the header no block_size")
    if num_blocks != (needed := -(-num_tokens // block_size)):
        problem = f"names {num_blocks} blocks, and {num_tokens} tokens are {needed} blocks of {block_size}"
        raise _malformed(path, number, problem)


def _malformed(path: Path, number: int, problem: str) -> TraceError:
    return TraceError(place=f"{path}:{number}", problem=problem, remedy="Correct the line or take it out")
