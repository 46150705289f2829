"""Result files: one JSON object each, with a `kind` that says which command wrote it.

Reads files of `vllm bench serve` as well, which have no kind. Knows nothing about what the numbers mean.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

from cluster.bench.summary import Numbers
from core.errors import BenchError

Kind = Literal["serve", "serve-rounds", "isolation", "engine", "served"]

RESULT_BYTES_MAX = 256 * 1024 * 1024
VLLM_KEYS = frozenset({"duration", "completed", "request_throughput", "median_ttft_ms"})
"""What a file of `vllm bench serve` is known by."""


def write_result(path: Path, result: Numbers) -> None:
    """Write a result. Raises BenchError: the folder cannot be written to."""
    write_text(path, json.dumps(result, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole or not at all. Raises BenchError."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise BenchError(subject=str(path), problem=f"cannot be written: {error.strerror}") from error


def read_result(path: Path) -> Numbers:
    """A result with its `kind`. Raises BenchError: not there, or not a result."""
    try:
        with path.open("rb") as file:
            raw = file.read(RESULT_BYTES_MAX + 1)
    except OSError as error:
        raise BenchError(subject=str(path), problem=f"cannot be read: {error.strerror}") from error
    if len(raw) > RESULT_BYTES_MAX:
        raise BenchError(subject=str(path), problem=f"is larger than {RESULT_BYTES_MAX} bytes")
    try:
        result = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BenchError(subject=str(path), problem=f"is no JSON: {error}") from error
    if isinstance(result, dict) and "kind" not in result and result.keys() >= VLLM_KEYS:
        return {**result, "kind": "serve", "base_url": "vllm bench serve"}
    if not isinstance(result, dict) or result.get("kind") not in get_args(Kind):
        problem = f"is no result of a bench: it has no `kind` of {', '.join(get_args(Kind))}"
        raise BenchError(subject=str(path), problem=problem)
    return result


def runs_of(result: Numbers) -> Iterator[Numbers]:
    """Every measured run of a result of `bench serve`, with the server's place in `server`."""
    if result["kind"] == "serve":
        yield {**result, "server": 0}
    for one in result["rounds"] if result["kind"] == "serve-rounds" else ():
        for place, run in enumerate(one["runs"]):
            yield {**run, "server": place}
