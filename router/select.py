"""Which workers serve a request: round robin over live, compatible pairs.

Pure: knows nothing about links, load or prompts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

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

    @property
    def num_pairs(self) -> int:
        """Pairs that could serve a request."""
        return sum(len(self.pairs_of(decode)) for decode in self.decode)

    def pairs_of(self, decode: WorkerLife) -> tuple[Pair, ...]:
        """Every pair this decode worker can be part of."""
        if self.is_colocated:
            return (Pair(decode=decode, prefill=None),)
        return tuple(Pair(decode=decode, prefill=p) for p in self.prefill if (decode, p) in self.connected)


NOBODY_FAILED: Mapping[WorkerId, int] = MappingProxyType({})


class RoundRobin:
    """Takes decode workers in turn, and for each of them its prefill workers in turn, so that every pair is used."""

    def __init__(self) -> None:
        self._next_decode = 0
        self._next_prefill: dict[WorkerId, int] = {}

    def select(self, topology: Topology, failed: Mapping[WorkerId, int] = NOBODY_FAILED) -> Pair | None:
        """A pair; None when no pair can serve.

        `failed`: workers that earlier attempts of the request failed on, with a number that grows from attempt to
        attempt. A pair without them is taken if there is one, else one whose failure is the longest ago.
        """
        everyone = [pairs for decode in topology.decode if (pairs := topology.pairs_of(decode))]
        if not everyone:
            return None

        def failure_of(pair: Pair) -> int:
            return max(failed.get(worker, 0) for worker in pair.workers())

        oldest = min(failure_of(pair) for pairs in everyone for pair in pairs)
        candidates = [kept for pairs in everyone if (kept := tuple(p for p in pairs if failure_of(p) == oldest))]
        index = self._next_decode % len(candidates)
        self._next_decode = index + 1
        pairs = candidates[index]
        decode = pairs[0].decode.worker
        turn = self._next_prefill.get(decode, index) % len(pairs)
        self._next_prefill[decode] = turn + 1
        return pairs[turn]
