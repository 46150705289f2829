"""Traces in files: what is read is what plain readers see there, and what is wrong is named by its line."""

import csv
import json
from datetime import datetime
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.sim import trace as trace_module
from cluster.sim.trace import (
    RequestTable,
    Trace,
    read_azure,
    read_mooncake,
    read_request_log,
    read_trace,
    write_request_log,
)
from core.errors import TraceError
from tests.cluster.sim.traces import AZURE, MOONCAKE, fields_of, random_trace, trace_of

HEADER = '{"schema_version": 1, "block_size": 4}'
LOGGED = '{"arrival_s": 1, "num_prompt_tokens": 5, "num_output_tokens": 2, "blocks": [0, 1]}'
TRACED = '{"timestamp": 7, "input_length": 513, "output_length": 2, "hash_ids": [0, 1]}'
COLUMNS = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROW = "2023-11-16 18:15:46.6805900,374,44"

# ---- reading ---------------------------------------------------------------------------------------------------------


def test_mooncake_trace_is_what_its_lines_say() -> None:
    lines = [json.loads(line) for line in MOONCAKE.read_text().splitlines()]
    trace = read_mooncake(MOONCAKE)
    assert (trace.name, trace.block_size) == ("mooncake-conversation-head", 512)
    assert fields_of(trace) == [
        (line["timestamp"] / 1000, line["input_length"], line["output_length"], tuple(line["hash_ids"]))
        for line in lines
    ]
    assert [one.index for one in trace.requests] == list(range(200))
    assert {one.block_size for one in trace.requests} == {512}


def test_azure_trace_is_what_its_rows_say() -> None:
    with AZURE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    moments = [datetime.strptime(row["TIMESTAMP"][:-1], "%Y-%m-%d %H:%M:%S.%f") for row in rows]
    trace = read_azure(AZURE)
    assert trace.block_size is None
    assert fields_of(trace) == [
        ((moment - moments[0]).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]), ())
        for moment, row in zip(moments, rows, strict=True)
    ]
    assert len(trace.requests) == 199
    assert trace.requests[1].arrival_s == pytest.approx(50.9951690 - 46.6805900, abs=1e-6)


def test_azure_columns_are_found_by_name_when_others_stand_between_them(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text(
        "GeneratedTokens,Id,TIMESTAMP,ContextTokens\n"
        "3,a,2024-05-10 00:00:00.009930+00:00,7\n\n"
        "4,b,2024-05-10 02:00:01.009930+02:00,8\n"
        "5,c,2024-05-10 00:00:03.009930,9\n"
    )
    assert fields_of(read_azure(path)) == [(0.0, 7, 3, ()), (1.0, 8, 4, ()), (3.0, 9, 5, ())]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a"])
def test_format_is_seen_in_the_content_whatever_the_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write_request_log(path, trace_of((0.5, 5, 1, (3, 4))))
    assert read_trace(path).block_size == 4
    for source, block_size in ((MOONCAKE, 512), (AZURE, None)):
        path.write_bytes(b"\xef\xbb\xbf\r\n" + source.read_bytes())
        found = read_trace(path)
        assert (found.name, found.block_size) == ("a", block_size)
        assert fields_of(found) == fields_of(read_trace(source))


def test_requests_come_in_order_of_arrival_when_the_file_has_another(tmp_path: Path) -> None:
    lines = MOONCAKE.read_text().splitlines()
    order = np.random.default_rng(5).permutation(len(lines))
    path = tmp_path / "shuffled.jsonl"
    path.write_text("\n".join(lines[i] for i in order))
    read = [json.loads(lines[i]) for i in order]
    read.sort(key=lambda line: line["timestamp"])  # stable
    first = read[0]["timestamp"]
    found = read_trace(path)
    assert fields_of(found) == [
        ((line["timestamp"] - first) / 1000, line["input_length"], line["output_length"], tuple(line["hash_ids"]))
        for line in read
    ]
    assert [one.index for one in found.requests] == list(range(len(lines)))


def test_arrivals_count_from_the_first_request_when_a_trace_was_cut_out_of_a_longer_one(tmp_path: Path) -> None:
    path = tmp_path / "part.jsonl"
    path.write_text(TRACED.replace("7", "90500") + "\n" + TRACED.replace("7", "90000"))
    assert [one.arrival_s for one in read_trace(path).requests] == [0.0, 0.5]


# ---- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "number", "words"),
    [
        ([TRACED, TRACED.replace("513", "-1")], 2, "$.input_length"),
        ([TRACED, TRACED.replace("513", "0")], 2, "$.input_length"),
        ([TRACED, "", TRACED.replace("7", "NaN")], 3, "malformed"),
        ([TRACED, TRACED.replace("7", "1e999")], 2, ""),
        ([TRACED, TRACED.replace("7", "-7")], 2, "$.timestamp"),
        ([TRACED, TRACED.replace(": 2,", ": 2.5,")], 2, "$.output_length"),
        ([TRACED, TRACED.replace("input_length", "length")], 2, "missing required field `input_length`"),
        ([TRACED, TRACED.replace("[0, 1]", "[0]")], 2, "names 1 blocks, and 513 tokens are 2 blocks of 512"),
        ([TRACED, TRACED.replace("[0, 1]", "[0, -1]")], 2, "$.hash_ids[1]"),
        ([TRACED, TRACED.replace("513", "99999999999")], 2, "$.input_length"),
        ([TRACED, TRACED[:30]], 2, "truncated"),
        (['{"timestamp": 7}'], 1, "missing required field `input_length`"),
        ([COLUMNS, ROW, "2023-11-16 18:15:46.68,374"], 3, "has 2 cells, the first line 3"),
        ([COLUMNS, ROW, ROW.replace("374", "-374")], 3, "ContextTokens is '-374'"),
        ([COLUMNS, ROW, ROW.replace("44", "0")], 3, "GeneratedTokens is '0'"),
        ([COLUMNS, ROW, ROW.replace("44", "nan")], 3, "GeneratedTokens is 'nan'"),
        ([COLUMNS, ROW, ROW.replace("11-16", "13-16")], 3, "TIMESTAMP is '2023-13-16 18:15:46.6805900'"),
        ([COLUMNS.replace("Context", "Prompt"), ROW], 1, "no column ContextTokens"),
        ([HEADER, LOGGED, LOGGED.replace("5", "9")], 3, "names 2 blocks, and 9 tokens are 3 blocks of 4"),
        ([HEADER, LOGGED.replace("blocks", "block")], 2, "unknown field `block`"),
        ([HEADER, LOGGED.replace("1,", '"1",', 1)], 2, "$.arrival_s"),
        ([HEADER.replace("4", "null"), LOGGED], 2, "the header no block_size"),
        ([HEADER.replace("4", "0"), LOGGED], 1, "$.block_size"),
        ([HEADER.replace("1", "2"), LOGGED], 1, "has schema_version 2, and only 1"),
        (["time;prompt;output", "1;2;3"], 1, "no trace that is known"),
        (['{"prompt": "hello"}'], 1, "no trace that is known"),
        ([], 1, "no trace that is known"),
    ],
)
def test_malformed_line_is_named(lines: list[str], number: int, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad"
    path.write_text("\n".join(lines))
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    text = str(caught.value)
    assert text.startswith(f"{path}:{number}: ")
    assert words in text and len(text) > len(f"{path}:{number}: ") + 40


def test_bytes_that_are_no_text_are_named_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "bad"
    path.write_bytes(TRACED.encode() + b"\n" + TRACED.encode().replace(b"hash_ids", b"hash\xff_ids"))
    with pytest.raises(TraceError, match=r"bad:2: "):
        read_trace(path)


@pytest.mark.parametrize("text", [HEADER, COLUMNS])
def test_trace_without_requests_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bare"
    path.write_text(text)
    with pytest.raises(TraceError, match="holds no request"):
        read_trace(path)


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"gone\.csv: cannot be read: No such file"):
        read_trace(tmp_path / "gone.csv")


def test_line_without_end_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "LINE_BYTES_MAX", 200)
    path = tmp_path / "long"
    path.write_text(TRACED + "\n" + "1" * 201)
    with pytest.raises(TraceError, match=r"long:2: is longer than 200 bytes"):
        read_trace(path)


def test_trace_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "REQUESTS_MAX", 3)
    path = tmp_path / "long"
    path.write_text("\n".join([TRACED] * 3))
    assert len(read_trace(path).requests) == 3
    path.write_text("\n".join([TRACED] * 4))
    with pytest.raises(TraceError, match=r"long:4: "):
        read_trace(path)


# ---- request logs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [MOONCAKE, AZURE])
def test_log_reads_as_the_trace_that_was_written(source: Path, tmp_path: Path) -> None:
    trace, path = read_trace(source), tmp_path / "log.jsonl"
    write_request_log(path, trace)
    again = read_request_log(path)
    assert (fields_of(again), again.block_size) == (fields_of(trace), trace.block_size)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {"schema_version": 1, "block_size": trace.block_size}
    assert ("blocks" in lines[1]) == (trace.block_size is not None)


def test_arrivals_of_a_log_are_as_written_when_the_first_one_is_late(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_request_log(path, trace_of((0.1 + 0.2, 5, 1, ()), (1e-9, 5, 1, ())))
    assert [one.arrival_s for one in read_trace(path).requests] == [1e-9, 0.1 + 0.2]


def test_log_stays_as_it_was_when_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_request_log(path, trace_of((0.0, 5, 1, ())))
    before = path.read_bytes()
    (tmp_path / ".log.jsonl.partial").mkdir()
    with pytest.raises(TraceError, match=r"log\.jsonl: cannot be written"):
        write_request_log(path, random_trace(1))
    assert path.read_bytes() == before


# ---- the table -------------------------------------------------------------------------------------------------------


def table_of(trace: Trace) -> RequestTable:
    """Not by way of a file."""
    requests = list(trace.requests)
    starts = np.cumsum([0, *(len(one.blocks) for one in requests)])
    return RequestTable(
        arrivals_s=np.array([one.arrival_s for one in requests]),
        num_prompt_tokens=np.array([one.num_prompt_tokens for one in requests], dtype=np.int32),
        num_output_tokens=np.array([one.num_output_tokens for one in requests], dtype=np.int32),
        block_starts=starts,
        block_ids=np.array([block for one in requests for block in one.blocks], dtype=np.int64),
        block_size=trace.block_size,
    )


@given(seed=st.integers(0, 1000), places=st.lists(st.integers(0, 29)), cut=st.slices(30))
def test_table_is_the_list_of_its_requests(seed: int, places: list[int], cut: slice) -> None:
    """Goal: columns lose and mix up nothing. Method: the same operations on the list they were made of."""
    trace = random_trace(seed)
    requests, table = list(trace.requests), table_of(trace)
    assert list(table) == requests and table[-1] == requests[-1] and len(table) == 30
    renumbered = [msgspec.structs.replace(requests[place], index=i) for i, place in enumerate(places)]
    assert list(table.take(np.array(places, dtype=np.int64))) == renumbered
    assert list(table[cut]) == [msgspec.structs.replace(one, index=i) for i, one in enumerate(requests[cut])]


def test_table_ends(tmp_path: Path) -> None:
    table = table_of(random_trace(2))
    for index in (30, -31):
        with pytest.raises(IndexError):
            table[index]
