"""Which workers serve a request: round robin over live, compatible pairs.

Pure: knows nothing about links, load or prompts.
"""

from collections.abc import Set
from dataclasses import dataclass

from core.ids import Epoch, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLife:
    """One worker in one epoch."""

    worker: WorkerId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Who serves one attempt."""

    decode: WorkerLife
    prefill: WorkerLife | None
    """None: the decode worker computes the prompt itself."""

    def workers(self) -> frozenset[WorkerId]:
        return frozenset({self.decode.worker} | ({self.prefill.worker} if self.prefill else set()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Workers that take requests now (live, not draining), in a stable order."""

    prefill: tuple[WorkerLife, ...]
    decode: tuple[WorkerLife, ...]
    connected: frozenset[tuple[WorkerLife, WorkerLife]]
    """(decode, prefill) that can exchange KV blocks."""
    is_colocated: bool

    def pairs_of(self, decode: WorkerLife) -> tuple[Pair, ...]:
        """Every pair this decode worker can be part of."""
        if self.is_colocated:
            return (Pair(decode=decode, prefill=None),)
        return tuple(Pair(decode=decode, prefill=p) for p in self.prefill if (decode, p) in self.connected)


class RoundRobin:
    """Takes decode workers in turn, and for each of them its prefill workers in turn, so that every pair is used."""

    def __init__(self) -> None:
        self._next_decode = 0
        self._next_prefill: dict[WorkerId, int] = {}

    def select(self, topology: Topology, avoid: Set[WorkerId] = frozenset()) -> Pair | None:
        """A pair, without the workers in `avoid` if there is one; None when no pair can serve."""
        candidates = [pairs for decode in topology.decode if (pairs := topology.pairs_of(decode))]
        preferred = [kept for pairs in candidates if (kept := tuple(p for p in pairs if not p.workers() & avoid))]
        candidates = preferred or candidates
        if not candidates:
            return None
        index = self._next_decode % len(candidates)
        self._next_decode = index + 1
        pairs = candidates[index]
        decode = pairs[0].decode.worker
        turn = self._next_prefill.get(decode, index) % len(pairs)
        self._next_prefill[decode] = turn + 1
        return pairs[turn]
