"""Planted bugs in the hand-off: each must make the scenario below fail, otherwise the scenario proves nothing.

The scenario is what `test_handoff` asserts in pieces: the right tokens, the right number of bytes, verified blocks
only, and a corrupted read that is noticed. The unmutated code passes it.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from core.messages import Offer
from decode.intake import Intake
from decode.reception import Reception
from kvtransfer.puller import Puller, PullJob, PullResult
from kvtransfer.session import PullSession
from kvtransfer.transport.memory import MemoryFaults, MemoryTransport

MakePair = Callable[..., Any]


def _scenario(make_pair: MakePair, faults: MemoryFaults | None = None) -> None:
    rng = random.Random(5)
    pair = make_pair(num_blocks=24, **{"prefill.max_batched_tokens": 8})
    if faults is not None:
        pair.fabric.faults = faults
    prompts = [[rng.randrange(90) for _ in range(length)] for length in (9, 37, 37, 41, 5, 30)]
    for i, prompt in enumerate(prompts):
        pair.submit(f"r{i}", prompt)
        for _ in range(rng.randrange(6)):
            pair.step()
    pair.run(steps_max=2000)
    refused = {r.request_id for r in pair.refusals}
    for i in range(len(prompts)):
        if f"r{i}" not in refused:
            assert pair.outputs.get(f"r{i}") == {0: pair.expected(f"r{i}")}, f"r{i} got wrong tokens"
    pulled = pair.count("decode", "pdcluster_pulled_blocks_total") * pair.model.layout.block_bytes()
    if faults is None:
        assert not refused
        assert pair.count("decode", "pdcluster_pulled_bytes_total") == pulled > 0
    pair.clock.advance(20.0)
    pair.run()
    pair.assert_nothing_held()


def test_scenario_passes_when_nothing_is_planted(make_pair: MakePair) -> None:
    _scenario(make_pair)


def test_scenario_passes_when_reads_are_lost_corrupt_or_stale(make_pair: MakePair) -> None:
    _scenario(make_pair, MemoryFaults(loss_rate=0.2, corruption_rate=0.3, stale_rate=0.3, delay_s=(0.0, 0.1)))


def test_mutant_that_skips_the_transfer_is_caught(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    def skip(self: Puller, job: PullJob) -> None:
        self._results.append(
            PullResult(key=job.key, verified=list(job.indexes), bad=[], reason="", num_bytes=0, seconds=0.0)
        )

    monkeypatch.setattr(Puller, "submit", skip)
    with pytest.raises(AssertionError):
        _scenario(make_pair)


class _Blind:
    """A digester that finds whatever was offered."""

    def __init__(self, digester: Any) -> None:
        self.block_bytes = digester.block_bytes

    def __eq__(self, other: object) -> bool:
        return True

    def digest(self, block_ids: list[int]) -> list[Any]:
        return [self] * len(block_ids)


def test_mutant_that_skips_the_digest_check_is_caught(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Puller.__init__

    def blind(self: Puller, transport: Any, digester: Any, **rest: Any) -> None:
        seeing_nothing: Any = _Blind(digester)
        build(self, transport, seeing_nothing, **rest)

    monkeypatch.setattr(Puller, "__init__", blind)
    with pytest.raises(AssertionError, match="wrong tokens"):
        _scenario(make_pair, MemoryFaults(corruption_rate=1.0))


def test_mutant_that_commits_before_verifying_is_caught(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = Intake._submit

    def hasty(self: Intake, reception: Reception, pulls: Any) -> None:
        submit(self, reception, pulls)
        session = reception.session
        assert isinstance(session, PullSession)
        session.on_verified([p.index for p in pulls])
        if session.is_complete:
            self._commit(reception, 0.0)

    monkeypatch.setattr(Intake, "_submit", hasty)
    with pytest.raises(AssertionError):
        _scenario(make_pair, MemoryFaults(delay_s=(0.2, 0.4)))


def test_mutant_that_transfers_a_stale_block_is_caught(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another block lies under the offered id: every attempt must end in a refusal, none in tokens."""
    start = MemoryTransport.start_read

    def stale(self: MemoryTransport, peer: Any, sources: Any, targets: Any) -> Any:
        return start(self, peer, [*sources[1:], sources[0]], targets)

    monkeypatch.setattr(MemoryTransport, "start_read", stale)
    with pytest.raises(AssertionError):
        _scenario(make_pair)


def test_mutant_that_frees_leased_blocks_is_caught(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV-4: without the lease's pin, the prefill worker's pool reuses blocks that are still being read."""
    pair = make_pair(num_blocks=64, prefill_blocks=10)
    monkeypatch.setattr(pair.prefill, "_lease", _lease_without_pin(pair.prefill))
    with pytest.raises(AssertionError):
        pair.fabric.faults = MemoryFaults(delay_s=(0.3, 0.6))
        rng = random.Random(3)
        for i in range(4):
            pair.submit(f"r{i}", [rng.randrange(90) for _ in range(37)])
        pair.run(steps_max=2000)
        assert not pair.refusals
        offers = [m for m in pair.messages if isinstance(m, Offer)]
        assert offers
        pair.assert_nothing_held()


def _lease_without_pin(prefill: Any) -> Callable[..., None]:
    def lease(handoff: Any, blocks: list[Any], now: float) -> None:
        if handoff.lease_id is None:
            handoff.lease_id = prefill._leases.grant(handoff.request_id, handoff.attempt, now).lease_id

    return lease
