"""The planner on the stand-in runner: whatever the batch, chunks, pressure or order, each sequence gets its own
answer.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.hashing import group_hash, hash_blocks
from core.layout import FULL_ATTENTION, Windows, needed_blocks
from core.request import SamplingParams
from engine import scheduler as scheduler_module
from engine.kv import pool as pool_module
from engine.kv import table as table_module
from engine.kv.pool import BlockPool
from engine.kv.table import SequenceTable
from engine.scheduler import Progress, Scheduler, Sequence
from engine.standin import StandinRunner, expected_tokens

VOCAB = 97
BLOCK = 4


def _scheduler(
    num_blocks: int, *, rows: int = 8, budget: int = 16, max_len: int = 64, windows: Windows = FULL_ATTENTION
) -> tuple[Scheduler, StandinRunner]:
    pool = BlockPool(num_blocks)
    table = SequenceTable(num_rows=rows, max_model_len=max_len, block_size=BLOCK, windows=windows)
    runner = StandinRunner(num_blocks=num_blocks, block_size=BLOCK, vocab_size=VOCAB, windows=windows)
    return Scheduler(pool=pool, table=table, max_batched_tokens=budget), runner


def _sequence(prompt: list[int], max_tokens: int, *, seed: int = 0, temperature: float = 0.0) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    return Sequence(name=str(prompt[:2]), token_ids=list(prompt), prompt_length=len(prompt), sampling=sampling)


def _step(scheduler: Scheduler, runner: StandinRunner) -> list[Progress]:
    plan = scheduler.plan()
    progress = scheduler.take_admission_progress()
    if plan is not None:
        progress += scheduler.apply(plan, runner.execute(plan))
    scheduler.check()
    scheduler.pool.check_claims(scheduler.claims())
    return progress


def _run(scheduler: Scheduler, runner: StandinRunner, limit: int = 2000) -> None:
    for _ in range(limit):
        _step(scheduler, runner)
        if not scheduler.num_running and not scheduler.num_waiting:
            return
    pytest.fail(f"still {scheduler.num_running} running and {scheduler.num_waiting} waiting after {limit} steps")


def _expect(sequence: Sequence, windows: Windows = FULL_ATTENTION) -> list[int]:
    assert sequence.sampling is not None
    prompt = sequence.token_ids[: sequence.prompt_length]
    return expected_tokens(prompt, sequence.sampling, vocab_size=VOCAB, child=sequence.child, windows=windows)


@given(
    seed=st.integers(0, 2**16),
    num_blocks=st.integers(10, 24),
    budget=st.integers(1, 24),
    rows=st.integers(1, 6),
    windows=st.sampled_from([FULL_ATTENTION, FULL_ATTENTION, (None, 5, 5), (6,), (None, 200), (3, None), (1, 9)]),
)
@settings(max_examples=100, deadline=None)
def test_every_sequence_gets_its_own_answer_when_pool_budget_and_rows_are_short(
    seed: int, num_blocks: int, budget: int, rows: int, windows: Windows
) -> None:
    rng = random.Random(seed)
    scheduler, runner = _scheduler(num_blocks * len(windows), rows=rows, budget=budget, windows=windows)
    shared = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 16))]
    sequences = [
        _sequence(
            shared[: rng.randrange(1, len(shared) + 1)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(0, 8))],
            rng.randrange(1, 12),
            seed=rng.randrange(1000),
            temperature=float(rng.randrange(2)),
        )
        for _ in range(rng.randrange(1, 8))
    ]
    waiting = list(sequences)
    while waiting:
        scheduler.add(waiting.pop())
        for _ in range(rng.randrange(0, 4)):
            _step(scheduler, runner)
    _run(scheduler, runner)
    assert scheduler.pool.num_used == 0
    for sequence in sequences:
        assert sequence.token_ids[sequence.prompt_length :] == _expect(sequence, windows)


def test_preempted_sequence_is_recomputed_when_blocks_run_out() -> None:
    scheduler, runner = _scheduler(8)
    sequences = [_sequence([i] * 7, 12) for i in range(2)]
    for sequence in sequences:
        scheduler.add(sequence)
    _run(scheduler, runner)
    assert scheduler.num_preemptions > 0
    for sequence in sequences:
        assert sequence.token_ids[7:] == _expect(sequence)


def test_chunks_stay_within_the_token_budget() -> None:
    scheduler, runner = _scheduler(32, budget=5)
    scheduler.add(_sequence(list(range(23)), 1))
    sizes = []
    while scheduler.num_waiting or scheduler.num_running:
        plan = scheduler.plan()
        assert plan is not None
        sizes.append(plan.num_tokens)
        scheduler.apply(plan, runner.execute(plan))
    assert sizes == [5, 5, 5, 5, 3]


def test_prefix_is_not_computed_twice_and_the_last_token_always_is() -> None:
    scheduler, runner = _scheduler(32)
    prompt = list(range(3 * BLOCK))
    scheduler.add(_sequence(prompt, 1))
    _run(scheduler, runner)
    computed = runner.num_computed_tokens
    again = _sequence(prompt, 1)
    scheduler.add(again)
    _run(scheduler, runner)
    assert again.num_cached_tokens == 2 * BLOCK
    assert runner.num_computed_tokens - computed == BLOCK


def test_sequence_without_sampling_completes_and_keeps_its_blocks_until_removed() -> None:
    scheduler, runner = _scheduler(16, budget=6)
    sequence = Sequence(name="kv", token_ids=list(range(8)), prompt_length=10, sampling=None)
    scheduler.add(sequence)
    progress = [p for _ in range(3) for p in _step(scheduler, runner)]
    assert [(p.num_computed, p.is_complete) for p in progress] == [(6, False), (8, True)]
    assert scheduler.pool.num_used == 2
    scheduler.remove(sequence)
    assert scheduler.pool.num_used == 0
    warm = Sequence(name="kv2", token_ids=list(range(8)), prompt_length=10, sampling=None)
    scheduler.add(warm)
    assert scheduler.plan() is None
    assert [(p.num_computed, p.is_complete) for p in scheduler.take_admission_progress()] == [(8, True)]


def test_held_blocks_are_used_and_given_up_when_nothing_else_can_run() -> None:
    scheduler, runner = _scheduler(6)
    first, second = _sequence(list(range(9)), 8), _sequence(list(range(50, 67)), 2)
    blocks = scheduler.pool.allocate(4)
    assert blocks is not None
    second.held_blocks = blocks
    second.hashes = hash_blocks(second.token_ids, BLOCK)
    scheduler.add(first)
    scheduler.add(second)
    _run(scheduler, runner)
    assert first.token_ids[9:] == _expect(first)
    assert second.token_ids[17:] == _expect(second)


def test_first_in_line_is_admitted_when_very_many_behind_it_hold_blocks() -> None:
    scheduler, _runner = _scheduler(16, rows=1)
    scheduler.add(_sequence(list(range(60)), 4))
    blocks = scheduler.pool.allocate(2)
    assert blocks is not None
    for number in range(1200):
        if number:
            scheduler.pool.acquire(blocks)
        sequence = _sequence(list(range(70, 79)), 1)
        sequence.held_blocks, sequence.hashes = list(blocks), hash_blocks(sequence.token_ids, BLOCK)
        scheduler.add(sequence)
    plan = scheduler.plan()
    assert plan is not None and plan.num_tokens == 16


def test_planner_says_so_when_the_first_in_line_lacks_blocks() -> None:
    scheduler, runner = _scheduler(10)
    scheduler.add(_sequence(list(range(30)), 4))
    scheduler.add(_sequence(list(range(40, 60)), 1))
    _step(scheduler, runner)
    assert not scheduler.is_short_of_blocks  # the budget ended first
    _step(scheduler, runner)
    assert scheduler.is_short_of_blocks
    _run(scheduler, runner)
    assert not scheduler.is_short_of_blocks


def test_prefix_of_the_first_in_line_is_looked_for_only_when_blocks_came_back(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, runner = _scheduler(12)
    searches = 0
    find_prefix = scheduler.pool.find_prefix

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal searches
        searches += 1
        return find_prefix(*arguments, **named)

    monkeypatch.setattr(scheduler.pool, "find_prefix", counted)
    scheduler.add(_sequence(list(range(16)), 24))
    scheduler.add(_sequence(list(range(40, 76)), 1))
    for _ in range(20):
        _step(scheduler, runner)
    assert scheduler.is_short_of_blocks and scheduler.num_running == 1
    assert searches == 2
    _run(scheduler, runner)


def test_stop_token_ends_the_sequence_and_eos_can_be_ignored() -> None:
    prompt = [1, 2, 3]
    answer = expected_tokens(prompt, SamplingParams(max_tokens=6, temperature=0.0), vocab_size=VOCAB)
    scheduler, runner = _scheduler(16)
    stop = SamplingParams(max_tokens=6, temperature=0.0, stop_token_ids=(answer[2],))
    ignore = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    sequences = [
        Sequence(name="stop", token_ids=list(prompt), prompt_length=3, sampling=stop),
        Sequence(
            name="ignore",
            token_ids=list(prompt),
            prompt_length=3,
            sampling=ignore,
            eos_token_ids=frozenset({answer[1]}),
        ),
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    _run(scheduler, runner)
    assert sequences[0].token_ids[3:] == answer[:3]
    assert sequences[1].token_ids[3:] == answer


def test_planted_bug_shared_slot_is_seen_when_a_row_uses_a_foreign_block() -> None:
    """The stand-in must notice a wrong block: otherwise every test above proves nothing."""
    scheduler, runner = _scheduler(16)
    sequences = [_sequence([i, i + 1, i + 2, i + 3, i + 4], 4) for i in (1, 40)]
    for sequence in sequences:
        scheduler.add(sequence)
    _step(scheduler, runner)
    table = scheduler.table
    table.blocks[0, sequences[1].row, 0] = table.blocks[0, sequences[0].row, 0]
    for _ in range(3):
        plan = scheduler.plan()
        assert plan is not None
        output = runner.execute(plan)
        table.append_tokens(plan.rows, output.token_ids)
        table.num_computed[plan.rows] = plan.context_lengths
        scheduler._planned = []
    wrong = table.row_tokens(sequences[1].row or 0)[5:]
    assert wrong != _expect(sequences[1])[: len(wrong)]


def test_window_group_holds_no_more_than_its_window_reaches() -> None:
    windows: Windows = (None, 6)
    scheduler, runner = _scheduler(64, budget=5, windows=windows)
    sequence = _sequence(list(range(30)), 20)
    scheduler.add(sequence)
    while scheduler.num_waiting or scheduler.num_running:
        _step(scheduler, runner)
        if sequence.row is not None and sequence.prompt_length <= scheduler.table.num_computed[sequence.row]:
            computed = int(scheduler.table.num_computed[sequence.row])
            total = int(scheduler.table.num_blocks[sequence.row])
            passed = needed_blocks(6, computed, BLOCK).start
            assert len(scheduler.table.row_blocks(sequence.row)) == 2 * total - passed
    assert sequence.token_ids[30:] == _expect(sequence, windows)


def test_prefix_is_found_when_only_the_blocks_that_windows_reach_are_left() -> None:
    windows: Windows = (None, 6)
    scheduler, runner = _scheduler(64, windows=windows)
    prompt = list(range(25))
    first = _sequence(prompt, 1)
    scheduler.add(first)
    _run(scheduler, runner)
    pool = scheduler.pool
    lost = [group_hash(block_hash, 1) for block_hash in first.hashes[:4]]
    for key in lost:  # as if they had been evicted
        block = pool._by_hash[key]
        pool._forget(block)
        del pool._cached[block]
        pool._free.append(block)
    again = _sequence(prompt, 1)
    scheduler.add(again)
    _run(scheduler, runner)
    assert again.num_cached_tokens == 24
    assert again.token_ids[25:] == _expect(again, windows)


def _release_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def early(window: int | None, num_computed: int, block_size: int) -> range:
        blocks = needed_blocks(window, num_computed, block_size)
        return range(min(blocks.start + (window is not None), blocks.stop), blocks.stop)

    monkeypatch.setattr(table_module, "needed_blocks", early)


def _share_one_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "group_hash", lambda block_hash, group: block_hash)
    monkeypatch.setattr(pool_module, "group_hash", lambda block_hash, group: block_hash)


@pytest.mark.parametrize("plant", [_release_too_early, _share_one_hash])
def test_planted_bug_of_windows_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    windows: Windows = (None, 6)

    def course() -> None:
        scheduler, runner = _scheduler(40, budget=5, windows=windows)
        prompt = list(range(30))
        for _ in range(2):
            sequence = _sequence(prompt, 9)
            scheduler.add(sequence)
            _run(scheduler, runner)
            assert sequence.token_ids[30:] == _expect(sequence, windows)

    course()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        course()
