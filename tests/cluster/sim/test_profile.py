"""Step profiles: measured cases come back, what lies between and beyond follows known formulas, nothing falls."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.sim.profile import Chunk, MeasuredProfile, StatedProfile, StepProfile
from core.errors import ProfileError
from core.layout import GroupLayout
from engine.probe import ProbeSequence, build_plan
from engine.step import StepPlan

ROWS, CONTEXTS, CHUNKS, STARTS = (1, 4, 16), (128, 512, 1024), (64, 256, 512), (0, 512, 1024)

FIXED_S, ROW_S, POSITION_S = 0.03, 0.002, 1e-6
FIGURES = {
    "weight_bytes": 16e9,
    "kv_bytes_per_token": 131_072,
    "flops_per_token": 16e9,
    "memory_gb_per_s": 2_000,
    "tflop_per_s": 400,
    "overhead_s": 0.001,
    "attention_flops_per_pair": 524_288,
}


def decode_s(rows: float, context: float) -> float:
    """Of a machine whose steps are bilinear: a fixed part, so much a row, so much for each position it attends to."""
    return FIXED_S + rows * (ROW_S + POSITION_S * context)


def prefill_s(tokens: float, start: float) -> float:
    """The same machine: a chunk of one token is a decode row."""
    return FIXED_S + tokens * (ROW_S + POSITION_S * (start + 1))


def result_of(decode: Callable[[float, float], float], prefill: Callable[[float, float], float]) -> dict[str, Any]:
    """What `bench engine` writes, as far as it matters, and some of the rest."""
    return {
        "kind": "engine",
        "processor": "made up",
        "decode": [
            {"rows": rows, "context": context, "seconds": decode(rows, context), "repeats": 9}
            for context in CONTEXTS
            for rows in ROWS
        ],
        "prefill": [
            {"tokens": tokens, "context": start, "seconds": prefill(tokens, start), "ratio": {"float32": 1.5}}
            for start in STARTS
            for tokens in CHUNKS
        ],
    }


def profile_of(path: Path, result: dict[str, Any]) -> StepProfile:
    path.write_text(json.dumps(result))
    return StepProfile.from_engine_result(path)


@pytest.fixture
def bilinear(tmp_path: Path) -> StepProfile:
    return profile_of(tmp_path / "engine.json", result_of(decode_s, prefill_s))


# ---- measured --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 4, 9, 16, 17, 64, 500])
@pytest.mark.parametrize("context", [1, 100, 128, 300, 1024, 1025, 20_000])
def test_decode_step_is_exact_within_and_beyond_the_grid_when_the_machine_is_bilinear(
    bilinear: StepProfile, rows: int, context: int
) -> None:
    assert bilinear.seconds(rows, rows * context, ()) == pytest.approx(decode_s(rows, context), rel=1e-9)


@pytest.mark.parametrize("tokens", [2, 5, 64, 100, 512, 513, 8192])
@pytest.mark.parametrize("start", [0, 1, 511, 512, 700, 1024, 50_000])
def test_chunk_is_exact_within_and_beyond_the_grid_when_the_machine_is_bilinear(
    bilinear: StepProfile, tokens: int, start: int
) -> None:
    assert bilinear.seconds(0, 0, [(tokens, start)]) == pytest.approx(prefill_s(tokens, start), rel=1e-9)


def test_parts_of_a_mixed_step_share_the_fixed_part(bilinear: StepProfile) -> None:
    chunks = [(100, 0), (3, 2000), (512, 512)]
    parts = [decode_s(7, 900), *(prefill_s(*chunk) for chunk in chunks)]
    assert bilinear.seconds(7, 6300, chunks) == pytest.approx(sum(parts) - 3 * FIXED_S, rel=1e-9)
    assert bilinear.seconds(0, 0, chunks) == pytest.approx(sum(parts[1:]) - 2 * FIXED_S, rel=1e-9)


def test_rows_of_different_contexts_take_what_their_mean_does(bilinear: StepProfile) -> None:
    contexts = [128, 2000, 700]
    each = sum(ROW_S + POSITION_S * context for context in contexts)
    assert bilinear.seconds(3, sum(contexts), ()) == pytest.approx(FIXED_S + each, rel=1e-9)


def test_step_of_nothing_takes_no_time(bilinear: StepProfile) -> None:
    assert bilinear.seconds(0, 0, ()) == StepProfile.stated(**FIGURES).seconds(0, 0, ()) == 0.0


def test_decode_between_cases_lies_on_the_lines_between_them(tmp_path: Path) -> None:
    """A machine that is not bilinear: known only at its cases."""

    def curved(rows: float, context: float) -> float:
        return 0.02 + 0.001 * math.pow(rows, 1.5) + 1e-8 * math.pow(context, 1.5) * rows

    profile = profile_of(tmp_path / "engine.json", result_of(curved, lambda t, s: 0.1 + 0.001 * t + 1e-6 * t * s))
    for rows in ROWS:
        for context in CONTEXTS:
            assert profile.seconds(rows, rows * context, ()) == pytest.approx(curved(rows, context), rel=1e-9)
    half = (curved(4, 128) + curved(16, 128) + curved(4, 512) + curved(16, 512)) / 4
    assert profile.seconds(10, 10 * 320, ()) == pytest.approx(half, rel=1e-9)
    beyond = curved(16, 512) + (32 - 16) / (16 - 4) * (curved(16, 512) - curved(4, 512))
    assert profile.seconds(32, 32 * 512, ()) == pytest.approx(beyond, rel=1e-9)


def measured(decode: list[list[float]], prefill: list[list[float]], starts: Chunk = (0, 1000)) -> MeasuredProfile:
    """Of two numbers of rows (1 and 2) in two contexts (100 and 200), two chunks (10 and 20) in two places."""
    return MeasuredProfile(
        {(rows, context): decode[rows - 1][j] for rows in (1, 2) for j, context in enumerate((100, 200))},
        {(tokens, start): prefill[tokens // 10 - 1][j] for tokens in (10, 20) for j, start in enumerate(starts)},
    )


def test_lines_beyond_the_grid_do_not_cross_when_noise_made_the_upper_one_flatter() -> None:
    """Two rows seem not to depend on the context, one row does: beyond, two take as much more of it as one."""
    profile = measured([[1.0, 2.0], [3.0, 3.0]], [[4.0, 4.0], [5.0, 5.0]])
    assert profile.seconds(1, 1000, ()) == pytest.approx(10.0)
    assert profile.seconds(2, 2 * 1000, ()) == pytest.approx(11.0)


def test_chunk_below_the_smallest_lies_between_a_decode_row_and_that_chunk() -> None:
    """The line through both chunks would go below nothing."""
    profile = measured([[1.0, 1.0], [1.5, 1.5]], [[4.0, 4.0], [16.0, 16.0]])
    for tokens in (2, 5, 9):
        assert profile.seconds(0, 0, [(tokens, 0)]) == pytest.approx(1.0 + 3.0 * (tokens - 1) / 9)


def test_chunk_before_the_first_place_takes_at_least_a_decode_row() -> None:
    """The line through both places would go below nothing."""
    profile = measured([[1.0, 1.0], [1.5, 1.5]], [[4.0, 400.0], [5.0, 500.0]], starts=(500, 1000))
    assert profile.fixed_s == pytest.approx(0.5)
    assert profile.seconds(0, 0, [(10, 0)]) == pytest.approx(1.0)
    assert profile.seconds(2, 200, [(10, 0), (20, 0)]) == pytest.approx(0.5 + 1.0 + 0.5 + 0.5)


def test_chunk_takes_at_least_the_fixed_part_when_chunks_of_one_token_were_measured() -> None:
    decode = {(rows, context): 0.5 + 0.5 * rows for rows in (1, 2) for context in (100, 200)}
    profile = MeasuredProfile(decode, {(1, 500): 4.0, (1, 1000): 400.0, (9, 500): 4.0, (9, 1000): 400.0})
    assert profile.seconds(0, 0, [(9, 0)]) == pytest.approx(0.5)
    assert profile.seconds(0, 0, [(9, 250)]) == pytest.approx(2.0)


def test_medians_count_when_a_case_was_measured_again(tmp_path: Path) -> None:
    result = result_of(decode_s, prefill_s)
    result["decode"] += [{"rows": 4, "context": 512, "seconds": decode_s(4, 512) + more} for more in (-1e-4, 5.0)]
    assert profile_of(tmp_path / "engine.json", result).seconds(4, 2048, ()) == pytest.approx(decode_s(4, 512))


grids = st.lists(st.floats(1e-4, 10.0), min_size=9, max_size=9)


@given(decode=grids, prefill=grids, data=st.data())
def test_seconds_neither_fall_nor_are_negative_whatever_was_measured(
    decode: list[float], prefill: list[float], data: st.DataObject
) -> None:
    """Goal: noise makes no larger step cheaper. Method: any positive grid, any step, and the same one with more of one
    thing."""
    profile = MeasuredProfile(
        {(rows, context): decode[3 * i + j] for i, rows in enumerate(ROWS) for j, context in enumerate(CONTEXTS)},
        {(tokens, start): prefill[3 * i + j] for i, tokens in enumerate(CHUNKS) for j, start in enumerate(STARTS)},
    )
    more = data.draw(st.sampled_from(["rows", "context", "tokens", "start"]))
    rows, mean = data.draw(st.integers(1, 100)), data.draw(st.integers(1, 5000))
    tokens, start = data.draw(st.integers(2, 3000)), data.draw(st.integers(0, 5000))
    step = data.draw(st.integers(1, 2000))
    before = profile.seconds(rows, rows * mean, [(tokens, start)])
    rows, mean = rows + step * (more == "rows"), mean + step * (more == "context")
    tokens, start = tokens + step * (more == "tokens"), start + step * (more == "start")
    after = profile.seconds(rows, rows * mean, [(tokens, start)])
    assert 0 <= before <= after * (1 + 1e-9)
    assert after <= (profile.seconds(rows, rows * mean, ()) + profile.seconds(0, 0, [(tokens, start)])) * (1 + 1e-9)
    assert after * (1 + 1e-9) >= max(profile.seconds(rows, rows * mean, ()), profile.seconds(0, 0, [(tokens, start)]))


# ---- stated ----------------------------------------------------------------------------------------------------------


def test_few_rows_wait_for_memory_and_many_tokens_for_arithmetic() -> None:
    """Each written out: 16 GB at 2 TB/s are 8 ms; a token's 16 GFLOP at 400 TFLOP/s 40 us."""
    profile = StepProfile.stated(**FIGURES)
    kv_s = 131_072 / 2e12
    pair_s = 524_288 / 400e12
    assert profile.seconds(8, 8000, ()) == pytest.approx(0.001 + 0.008 + (8000 + 8) * kv_s)
    pairs = sum(1000 + i for i in range(1, 2049))
    assert profile.seconds(0, 0, [(2048, 1000)]) == pytest.approx(0.001 + 2048 * 40e-6 + pairs * pair_s)


def test_chunk_hides_behind_the_weights_that_decode_rows_read_anyway() -> None:
    profile = StepProfile.stated(**FIGURES)
    alone, both = profile.seconds(8, 8000, ()), profile.seconds(8, 8000, [(100, 0)])
    assert both - alone == pytest.approx(200 * 131_072 / 2e12)
    assert profile.seconds(8, 8000, [(512, 0)]) == pytest.approx(
        0.001 + 520 * 40e-6 + (8000 + 512 * 513 / 2) * 524_288 / 400e12
    )


# ---- plans -----------------------------------------------------------------------------------------------------------


def plan_of(parts: list[Chunk]) -> StepPlan:
    """Each part computes [start, start + tokens) of a sequence."""
    group = GroupLayout(kind="full", num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", window=None)
    sequences = [
        ProbeSequence(
            token_ids=np.ones(start + tokens, dtype=np.int32),
            start=start,
            end=start + tokens,
            block_ids=np.zeros(-(-(start + tokens) // 16), dtype=np.int32),
        )
        for tokens, start in parts
    ]
    return build_plan(sequences, 16, (group,))


@pytest.mark.parametrize(
    ("parts", "rows", "context", "chunks"),
    [
        ([(1, 99), (1, 499)], 2, 600, []),
        ([(64, 0)], 0, 0, [(64, 0)]),
        ([(1, 99), (1, 499), (64, 128), (1, 7), (5, 1000)], 3, 608, [(64, 128), (5, 1000)]),
        ([(2, 50), (1, 9), (2, 0)], 1, 10, [(2, 50), (2, 0)]),
    ],
)
def test_plan_takes_what_its_rows_and_chunks_do(
    bilinear: StepProfile, parts: list[Chunk], rows: int, context: int, chunks: list[Chunk]
) -> None:
    for profile in (bilinear, StepProfile.stated(**FIGURES)):
        seconds = profile.of_plan(plan_of(parts))
        assert type(seconds) is float and seconds == profile.seconds(rows, context, chunks)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_kind_of_a_file_says_how_it_is_read(tmp_path: Path) -> None:
    engine, stated = tmp_path / "engine.json", tmp_path / "stated.json"
    engine.write_text(json.dumps(result_of(decode_s, prefill_s)))
    stated.write_text(json.dumps({"kind": "stated", **FIGURES}))
    assert StepProfile.read(engine).seconds(4, 2048, ()) == pytest.approx(decode_s(4, 512))
    assert StepProfile.read(stated).seconds(8, 8000, ()) == StepProfile.stated(**FIGURES).seconds(8, 8000, ())


def test_stated_profile_may_be_yaml(tmp_path: Path) -> None:
    path = tmp_path / "gpu.yaml"
    lines = ["kind: stated  # a comment", *(f"{key}: {value}" for key, value in FIGURES.items())]
    path.write_text("\n".join(lines).replace("16000000000.0", "16e9"))
    profile = StepProfile.read(path)
    assert "16e9" in path.read_text() and isinstance(profile, StatedProfile)
    assert profile.seconds(8, 8000, ()) == StepProfile.stated(**FIGURES).seconds(8, 8000, ())


def without(key: str, rule: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    result = result_of(decode_s, prefill_s)
    return {**result, key: [case for case in result[key] if not rule(case)]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (without("decode", lambda case: case["rows"] != 4), ["1 different values of rows", "--streams"]),
        (without("decode", lambda case: case["context"] != 512), ["1 different values of context", "--context"]),
        (without("prefill", lambda case: case["context"] > 0), ["1 different values of context", "--prefill-context"]),
        (without("prefill", lambda case: True), ["0 different values of tokens", "--chunks"]),
        (
            without("prefill", lambda case: (case["tokens"], case["context"]) == (256, 512)),
            ["no prefill case of 256 tokens and context 512"],
        ),
        ({"kind": "engine", "decode": []}, ["missing required field `prefill`"]),
        ({**result_of(decode_s, lambda t, s: 0.0)}, ["$.prefill[0].seconds"]),
        ({"kind": "served", "rounds": []}, ["its kind is 'served', neither 'engine' nor 'stated'"]),
        ({"rounds": []}, ["missing required field `kind`"]),
        ({"kind": "stated", **FIGURES, "tflop_per_s": 0}, ["$.tflop_per_s"]),
        ({"kind": "stated", **FIGURES, "gpus": 2}, ["unknown field `gpus`"]),
        ({"kind": "stated"}, ["missing required field `weight_bytes`"]),
    ],
)
def test_profile_that_cannot_be_used_says_what_is_missing_and_how_to_measure_it(
    content: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError) as caught:
        StepProfile.read(path)
    for word in [str(path), "pdcluster bench engine --streams", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["no.json", "no.yaml"])
@pytest.mark.parametrize("text", ["{", "[1", "\x00", "\xff: ["])
def test_file_that_is_no_profile_is_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(ProfileError, match=name):
        StepProfile.read(tmp_path / name)


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"gone\.json: it cannot be read: No such file"):
        StepProfile.read(tmp_path / "gone.json")


def test_seconds_are_finite_far_beyond_the_grid(bilinear: StepProfile) -> None:
    assert math.isfinite(bilinear.seconds(100_000, 10**12, [(10**6, 10**7)]))
