"""Seconds of a step as a function of its plan: from what `pdcluster bench engine` measured here, or from figures stated
for a GPU.

    step = one pass over:   [ decode rows, one token each ][ chunk of a prompt ][ chunk of another ] ...

A row that computes one token is a decode row, whatever it is part of; all others are chunks of prompts. Knows nothing
about requests, clusters or clocks.

A stated profile is a JSON or YAML file (the keys of `StatedFigures`):

    {"kind": "stated", "weight_bytes": 16.1e9, "kv_bytes_per_token": 131072, "flops_per_token": 16.1e9,
     "attention_flops_per_pair": 524288, "memory_gb_per_s": 3350, "tflop_per_s": 989, "overhead_s": 0.0005}
"""

import statistics
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from core.errors import ProfileError
from engine.step import StepPlan

PROFILE_BYTES_MAX = 64 * 1024 * 1024
MEASURE_COMMAND = (
    "pdcluster bench engine --streams 1,4,16 --context 128,512,1024 --chunks 64,256,512 --prefill-context 0,512,1024 "
    "--result engine.json"
)
YAML_SUFFIXES = (".yaml", ".yml")

Chunk = tuple[int, int]
"""Tokens of a prompt that a step computes, at least 1, and positions of it that are computed before."""

Cases = dict[tuple[int, int], float]
"""Measured seconds by (rows, context) or by (tokens, context before)."""

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Position = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Amount = Annotated[float, msgspec.Meta(ge=0)]
_T = TypeVar("_T")


class StepProfile(ABC):
    """What a step takes on one worker."""

    @abstractmethod
    def seconds(self, decode_rows: int, decode_context: int, prefill: Sequence[Chunk]) -> float:
        """Of a step with so many decode rows, which attend to `decode_context` positions, their own included and all
        rows together, and these chunks. 0 for a step of nothing.
        """

    def of_plan(self, plan: StepPlan) -> float:
        """Seconds of a plan."""
        num_rows = plan.num_sequences
        if plan.num_tokens == num_rows:
            return self.seconds(num_rows, int(plan.context_lengths.sum()), ())
        counts = np.diff(plan.query_start)
        is_chunk = counts > 1
        tokens, lengths = counts[is_chunk].tolist(), plan.context_lengths[is_chunk].tolist()
        chunks = [(count, length - count) for count, length in zip(tokens, lengths, strict=True)]
        decode_context = int(plan.context_lengths.sum()) - sum(lengths)
        return self.seconds(num_rows - len(chunks), decode_context, chunks)

    @staticmethod
    def read(path: Path) -> "StepProfile":
        """Read a profile of either kind (`kind: engine` or `kind: stated`), JSON or, by its name, YAML. Raises
        ProfileError.
        """
        kind = _decode(path, _Kind).kind
        if kind == "engine":
            return StepProfile.from_engine_result(path)
        if kind == "stated":
            return StatedProfile(_decode(path, StatedFigures))
        problem = f"its kind is '{kind}', neither 'engine' nor 'stated'"
        raise ProfileError(file=path, problem=problem, remedy=f"Measure one: {MEASURE_COMMAND}")

    @staticmethod
    def from_engine_result(path: Path) -> "StepProfile":
        """A profile from a result of `pdcluster bench engine`. Raises ProfileError: no such result, or its grid is too
        small or has holes.
        """
        result = _decode(path, _EngineResult)
        decode = [((case.rows, case.context), case.seconds) for case in result.decode]
        prefill = [((case.tokens, case.context), case.seconds) for case in result.prefill]
        return MeasuredProfile(
            _full_grid(path, decode, "decode", ("rows", "--streams"), ("context", "--context")),
            _full_grid(path, prefill, "prefill", ("tokens", "--chunks"), ("context", "--prefill-context")),
        )

    @staticmethod
    def stated(
        *,
        weight_bytes: float,
        kv_bytes_per_token: float,
        flops_per_token: float,
        memory_gb_per_s: float,
        tflop_per_s: float,
        overhead_s: float = 0.0,
        attention_flops_per_pair: float = 0.0,
    ) -> "StepProfile":
        """A roofline; the arguments are those of `StatedFigures`."""
        return StatedProfile(
            StatedFigures(
                weight_bytes=weight_bytes,
                kv_bytes_per_token=kv_bytes_per_token,
                flops_per_token=flops_per_token,
                memory_gb_per_s=memory_gb_per_s,
                tflop_per_s=tflop_per_s,
                overhead_s=overhead_s,
                attention_flops_per_pair=attention_flops_per_pair,
            )
        )


class StatedFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one model on one kind of GPU."""

    weight_bytes: _Amount
    """Read once per step."""
    kv_bytes_per_token: _Amount
    """All layers, keys and values: read for every position attended to, written for every token."""
    flops_per_token: _Amount
    """Of the products with weights: twice the parameters, where every one multiplies every token."""
    memory_gb_per_s: _Positive
    """10^9 bytes per second."""
    tflop_per_s: _Positive
    """10^12 multiplications and additions per second."""
    overhead_s: _Amount = 0.0
    """Of any step, whatever it computes."""
    attention_flops_per_pair: _Amount = 0.0
    """For one token and one position that it attends to: 4 * query heads * head size * layers."""
    kind: str = "stated"


class StatedProfile(StepProfile):
    """A roofline: overhead + max(FLOPs / FLOP/s, bytes / bytes/s), each summed over the whole step, so that chunks hide
    behind the weights that decode rows read anyway.
    """

    def __init__(self, figures: StatedFigures) -> None:
        self.figures = figures
        byte_s, flop_s = 1e-9 / figures.memory_gb_per_s, 1e-12 / figures.tflop_per_s
        self._overhead_s = figures.overhead_s
        self._weights_s = figures.weight_bytes * byte_s
        self._kv_s = figures.kv_bytes_per_token * byte_s
        self._token_s = figures.flops_per_token * flop_s
        self._pair_s = figures.attention_flops_per_pair * flop_s

    def seconds(self, decode_rows: int, decode_context: int, prefill: Sequence[Chunk]) -> float:
        tokens, pairs, positions = decode_rows, float(decode_context), decode_context
        for count, context in prefill:
            tokens += count
            pairs += count * context + count * (count + 1) / 2
            positions += count + context
        if not tokens:
            return 0.0
        memory_s = self._weights_s + (positions + tokens) * self._kv_s
        return self._overhead_s + max(memory_s, tokens * self._token_s + pairs * self._pair_s)


class MeasuredProfile(StepProfile):
    """Interpolates a measured grid.

    A step of decode rows alone, all of one context, or of one chunk alone takes what was measured, bilinear between
    cases and linear beyond them; decode rows of different contexts take what as many of their mean context do. A step
    of both takes the fixed part once and what each of its parts takes more than that:

        fixed + (decode rows - fixed) + (chunk - fixed) + (chunk - fixed) ...

    The fixed part is a step without rows, extrapolated from the two least numbers of rows: what reading the weights and
    calling the layers costs whatever is computed. Below the smallest chunk a chunk approaches one decode row, which it
    is when it has one token. Seconds never fall with rows, tokens or context: where they were measured to, the larger
    case gets those of the smaller one.
    """

    def __init__(self, decode: Cases, prefill: Cases) -> None:
        """decode: seconds by (rows, context); prefill: seconds by (tokens, context before). Both are full grids, of two
        by two cases at least.
        """
        rows, contexts, table = _table(decode)
        steepest = (table[1] - table[0]) / (rows[1] - rows[0])
        intercepts = table[0] - rows[0] * steepest
        self.fixed_s = float(np.clip(intercepts.min(), 0.0, min(table.min(), *prefill.values())))
        no_rows = np.full((1, len(contexts)), self.fixed_s)
        self._decode = Surface([0.0, *rows], contexts, np.concatenate([no_rows, table]))
        chunks, starts, table = _table(prefill)
        if chunks[0] > 1:
            one_row = [self._decode.at(1.0, start + 1.0) for start in starts]
            one_token = np.minimum(np.array([one_row]), table[:1])
            chunks, table = [1.0, *chunks], np.concatenate([one_token, table])
        self._prefill = Surface(chunks, starts, table)

    def seconds(self, decode_rows: int, decode_context: int, prefill: Sequence[Chunk]) -> float:
        fixed_s = total = self.fixed_s
        if decode_rows:
            total += max(self._decode.at(decode_rows, decode_context / decode_rows) - fixed_s, 0.0)
        elif not prefill:
            return 0.0
        for tokens, context in prefill:
            total += max(self._prefill.at(tokens, context) - fixed_s, 0.0)
        return total


class Surface:
    """Values over a grid of x and y, bilinear in every cell and continued in a line beyond the last ones; never falls
    along x or y when `values` does not.

    y gets a node at 0, unless it has one, and both axes get one past their end. Slopes past the end never fall along
    the other axis either, else lines that noise made flatter would cross the others far out.
    """

    def __init__(self, xs: Sequence[float], ys: Sequence[float], values: NDArray[np.float64]) -> None:
        """values: [len(xs), len(ys)], not falling along either axis; xs and ys ascending, at least two of each."""
        if ys[0] > 0:
            below = values[:, 0] - ys[0] * (values[:, 1] - values[:, 0]) / (ys[1] - ys[0])
            first = np.maximum.accumulate(np.maximum(below, 0.0))
            ys, values = [0.0, *ys], np.concatenate([first[:, None], values], axis=1)
        rise_y = np.maximum.accumulate(values[:, -1] - values[:, -2])
        values = np.concatenate([values, (values[:, -1] + rise_y)[:, None]], axis=1)
        rise_x = np.maximum.accumulate(values[-1] - values[-2])
        values = np.concatenate([values, (values[-1] + rise_x)[None]])
        self._xs, self._ys = [*xs, 2 * xs[-1] - xs[-2]], [*ys, 2 * ys[-1] - ys[-2]]
        # Looked up millions of times: lists of floats are faster than arrays there.
        self._values: list[list[float]] = values.tolist()

    def at(self, x: float, y: float) -> float:
        """The value at x, not below the first of `xs`, and y, not below 0."""
        xs, ys = self._xs, self._ys
        i = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)
        j = min(max(bisect_right(ys, y) - 1, 0), len(ys) - 2)
        near, far = self._values[i], self._values[i + 1]
        along_x, along_y = (x - xs[i]) / (xs[i + 1] - xs[i]), (y - ys[j]) / (ys[j + 1] - ys[j])
        low = near[j] + along_y * (near[j + 1] - near[j])
        high = far[j] + along_y * (far[j + 1] - far[j])
        return low + along_x * (high - low)


class _Kind(msgspec.Struct):
    kind: str


class _DecodeCase(msgspec.Struct):
    rows: _Count
    context: _Count
    seconds: _Positive


class _PrefillCase(msgspec.Struct):
    tokens: _Count
    context: _Position
    seconds: _Positive


class _EngineResult(msgspec.Struct):
    decode: list[_DecodeCase]
    prefill: list[_PrefillCase]


def _decode(path: Path, kind: type[_T]) -> _T:
    """A file's content. Raises ProfileError."""
    try:
        with path.open("rb") as file:
            raw = file.read(PROFILE_BYTES_MAX + 1)
    except OSError as error:
        problem = f"it cannot be read: {error.strerror}"
        raise ProfileError(file=path, problem=problem, remedy="Give a file that can be read") from error
    if len(raw) > PROFILE_BYTES_MAX:
        problem = f"it is larger than {PROFILE_BYTES_MAX} bytes"
        raise ProfileError(file=path, problem=problem, remedy=f"Measure one: {MEASURE_COMMAND}")
    try:
        if path.suffix in YAML_SUFFIXES:
            # Not strict: YAML takes 16e9 for text.
            return msgspec.yaml.decode(raw, type=kind, strict=False)
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        remedy = f"Correct it, or measure one: {MEASURE_COMMAND}"
        raise ProfileError(file=path, problem=str(error), remedy=remedy) from error


def _full_grid(
    path: Path, cases: Iterable[tuple[tuple[int, int], float]], kind: str, x: tuple[str, str], y: tuple[str, str]
) -> Cases:
    """Medians of equal cases. x, y: each axis and the option that chooses its values. Raises ProfileError: an axis has
    one value, or a case of the grid is missing.
    """
    found: dict[tuple[int, int], list[float]] = {}
    for place, seconds in cases:
        found.setdefault(place, []).append(seconds)
    axes = [sorted({place[axis] for place in found}) for axis in (0, 1)]
    for (name, option), values in zip((x, y), axes, strict=True):
        if len(values) < 2:
            problem = f"its {kind} cases have {len(values)} different values of {name}, and it takes two to interpolate"
            raise ProfileError(file=path, problem=problem, remedy=f"Measure more of {option}: {MEASURE_COMMAND}")
    missing = [(one, other) for one in axes[0] for other in axes[1] if (one, other) not in found]
    if missing:
        problem = f"it has no {kind} case of {missing[0][0]} {x[0]} and {y[0]} {missing[0][1]}"
        raise ProfileError(file=path, problem=problem, remedy=f"Measure the whole grid: {MEASURE_COMMAND}")
    return {place: statistics.median(seconds) for place, seconds in found.items()}


def _table(cases: Cases) -> tuple[list[float], list[float], NDArray[np.float64]]:
    """Values of both axes, ascending, and seconds over them, made to fall along neither."""
    xs, ys = (sorted({place[axis] for place in cases}) for axis in (0, 1))
    values = np.array([[cases[x, y] for y in ys] for x in xs])
    rising = np.maximum.accumulate(np.maximum.accumulate(values, axis=0), axis=1)
    return [float(x) for x in xs], [float(y) for y in ys], rising
