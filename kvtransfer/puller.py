"""The puller: reads blocks over a transport, verifies them, and reports each job exactly once.

A result comes only when the job's targets can no longer be written, whatever became of it: a read that failed, ran out
of time or was abandoned stays silent until the transport reports its end. Verification reads the targets after that end
and before the report, so that nobody sees bytes that were not compared with the offer's digests (TX-1). `Puller` is
synchronous; `kvtransfer.puller_thread` runs one on a thread of its own. Knows nothing about sessions, leases or pools.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from core.clock import Clock
from core.errors import IncompatiblePeersError, TransferFailedError
from core.ids import BlockDigest, BlockId
from core.request import AttemptKey
from kvtransfer.integrity import Digester
from kvtransfer.transport.base import Peer, ReadId, ReadResult, ReadState, Transport

READ_TIMEOUT_S = 10.0
"""A read that takes longer is abandoned; its targets stay with it until the transport reports the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullJob:
    """Blocks of one session to read from one peer. The lists are pairwise."""

    key: AttemptKey
    peer: Peer
    indexes: list[int]
    """Of the session; opaque here."""
    sources: list[BlockId]
    targets: list[BlockId]
    digests: list[BlockDigest]


ReadFailure = Literal["mismatch", "lost", "timed_out", "abandoned", "not_started"]
"""Why blocks of a read are bad: other bytes than offered, an error of the transport, no end in time, nobody waits for
it any more, the transport did not take it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """The end of one job: its targets will not be written any more."""

    key: AttemptKey
    verified: list[int]
    """Indexes whose bytes have the offered digest."""
    bad: list[int]
    """All other indexes of the job."""
    reason: str
    """Why `bad` is not empty."""
    num_bytes: int
    """Bytes that were read, verified or not."""
    seconds: float
    """Duration of the read."""
    num_mismatches: int = 0
    """Blocks that arrived with another digest."""
    failure: ReadFailure | None = None
    """What `reason` says, as one of few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    """Answer to `add_peer`."""

    peer: Peer
    is_ready: bool
    reason: str = ""


class BlockPuller(Protocol):
    """What `Puller` and `ThreadedPuller` have in common. Called from one thread."""

    def submit(self, job: PullJob) -> None:
        """Start a job, or report it as bad at the next `poll` if it cannot be started."""
        ...

    def abandon(self, key: AttemptKey) -> None:
        """The results of this attempt's jobs are not wanted any more; each is still reported, all bad, at its end."""
        ...

    def add_peer(self, peer: Peer, metadata: bytes, num_blocks: int, block_bytes: int) -> None:
        """Make a peer readable; answered by one PeerResult."""
        ...

    def remove_peer(self, peer: Peer) -> None:
        """Forget a peer; its jobs fail when nothing can write their targets any more. Not answered."""
        ...

    def serve_hint(self, is_serving: bool) -> None:
        """Whether peers are likely to read from here soon."""
        ...

    def poll(self) -> list[PullResult | PeerResult]:
        """What ended since the last call; never blocks."""
        ...

    def pending(self) -> Mapping[AttemptKey, int]:
        """Blocks that were submitted and whose end `poll` has not reported yet, by attempt."""
        ...

    def close(self) -> None:
        """Give up everything; when it returns, nothing here writes to the region any more."""
        ...


@dataclass(eq=False, slots=True, kw_only=True)
class _Read:
    """One job under way."""

    job: PullJob
    deadline_s: float
    given_up: str = ""
    """Why the result will not be used; empty while it will."""
    failure: ReadFailure = "lost"
    """Of a read that ends without its blocks."""


class Puller:
    """Makes every call on the calling thread; `poll` serves peers that read from here, too."""

    def __init__(
        self, transport: Transport, digester: Digester, *, clock: Clock, read_timeout_s: float = READ_TIMEOUT_S
    ) -> None:
        self._transport = transport
        self._digester = digester
        self._clock = clock
        self._read_timeout_s = read_timeout_s
        self._reads: dict[ReadId, _Read] = {}
        self._results: list[PullResult | PeerResult] = []

    @property
    def num_reads(self) -> int:
        """Jobs under way."""
        return len(self._reads)

    def submit(self, job: PullJob) -> None:
        try:
            read_id = self._transport.start_read(job.peer, job.sources, job.targets)
        except (TransferFailedError, ValueError) as error:
            self._results.append(unstarted(job, str(error)))
            return
        self._reads[read_id] = _Read(job=job, deadline_s=self._clock.now() + self._read_timeout_s)

    def abandon(self, key: AttemptKey) -> None:
        self._give_up(lambda read: read.job.key == key, "abandoned", "abandoned")

    def add_peer(self, peer: Peer, metadata: bytes, num_blocks: int, block_bytes: int) -> None:
        try:
            self._transport.add_peer(peer, metadata, num_blocks, block_bytes)
        except (IncompatiblePeersError, TransferFailedError) as error:
            self._results.append(PeerResult(peer=peer, is_ready=False, reason=str(error)))
        else:
            self._results.append(PeerResult(peer=peer, is_ready=True))

    def remove_peer(self, peer: Peer) -> None:
        self._transport.remove_peer(peer)

    def serve_hint(self, is_serving: bool) -> None:
        """Changes nothing: whoever drives a synchronous puller polls it anyway."""

    def poll(self) -> list[PullResult | PeerResult]:
        now = self._clock.now()
        self._give_up(lambda read: read.deadline_s <= now, f"not read within {self._read_timeout_s} s", "timed_out")
        for ended in self._transport.poll():
            self._results.append(self._finish(self._reads.pop(ended.read_id), ended))
        results, self._results = self._results, []
        return results

    def pending(self) -> Mapping[AttemptKey, int]:
        blocks: Counter[AttemptKey] = Counter()
        for read in self._reads.values():
            blocks[read.job.key] += len(read.job.indexes)
        for result in self._results:
            if isinstance(result, PullResult):
                blocks[result.key] += len(result.verified) + len(result.bad)
        return blocks

    def close(self) -> None:
        self._transport.close()

    def _give_up(self, is_meant: Callable[[_Read], bool], reason: str, failure: ReadFailure) -> None:
        for read_id, read in self._reads.items():
            if not read.given_up and is_meant(read):
                read.given_up, read.failure = reason, failure
                self._transport.abandon(read_id)

    def _finish(self, read: _Read, ended: ReadResult) -> PullResult:
        job = read.job
        is_read = ended.state is ReadState.DONE
        num_bytes = len(job.targets) * self._digester.block_bytes if is_read else 0
        verified, bad = [], list(job.indexes)
        reason = read.given_up or ended.reason
        num_mismatches, failure = 0, read.failure
        if is_read and not read.given_up:
            digests = self._digester.digest(job.targets)
            rows = list(zip(job.indexes, job.digests, digests, strict=True))
            verified = [index for index, offered, found in rows if offered == found]
            bad = [index for index, offered, found in rows if offered != found]
            num_mismatches, failure = len(bad), "mismatch"
            reason = "the bytes that arrived do not have the offered digest" if num_mismatches else ""
        if bad:
            targets = dict(zip(job.indexes, job.targets, strict=True))
            self._digester.clear([targets[index] for index in bad])
        return PullResult(
            key=job.key,
            verified=verified,
            bad=bad,
            reason=reason,
            num_bytes=num_bytes,
            seconds=ended.seconds,
            num_mismatches=num_mismatches,
            failure=failure if bad else None,
        )


def unstarted(job: PullJob, reason: str) -> PullResult:
    """The result of a job that never reached the transport."""
    return PullResult(
        key=job.key,
        verified=[],
        bad=list(job.indexes),
        reason=reason,
        num_bytes=0,
        seconds=0.0,
        failure="not_started",
    )
