"""The transfer thread: a `Puller` that has a thread of its own, which alone calls the transport and digests blocks.

Commands go in, results come out, and a bell rings; both directions are bounded by JOBS_MAX. The owner's step never
waits for a read. Knows nothing about sessions, leases or pools.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping

from core.clock import Clock
from core.errors import TransferFailedError
from core.request import AttemptKey
from kvtransfer.integrity import Digester
from kvtransfer.puller import READ_TIMEOUT_S, PeerResult, Puller, PullJob, PullResult, unstarted
from kvtransfer.transport.base import Peer, Transport

JOBS_MAX = 4096
"""Jobs under way in one `ThreadedPuller`; more are reported as bad at once."""
BUSY_POLL_S = 0.0005
"""Pause of the transfer thread while reads are under way or peers read from here."""
IDLE_POLL_S = 0.05
"""Pause otherwise: a command ends it early, only a peer's first connection waits for it."""
CLOSE_TIMEOUT_S = 10.0


class ThreadedPuller:
    """Owns the one transfer thread of a process, which makes every call of the transport after construction."""

    def __init__(
        self,
        transport: Transport,
        digester: Digester,
        *,
        clock: Clock,
        read_timeout_s: float = READ_TIMEOUT_S,
        on_result: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_result` is called on the transfer thread whenever `poll` has something to return."""
        self.on_result = on_result
        self._puller = Puller(transport, digester, clock=clock, read_timeout_s=read_timeout_s)
        self._lock = threading.Lock()
        self._bell = threading.Event()
        self._commands: deque[Callable[[], None]] = deque()
        self._results: list[PullResult | PeerResult] = []
        self._num_jobs = 0
        self._pending: Counter[AttemptKey] = Counter()
        """Kept on the caller's thread."""
        self._is_serving = False
        self._is_closing = False
        self._crash: Exception | None = None
        self._unclosed: TransferFailedError | None = None
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)
        self._thread.start()

    def submit(self, job: PullJob) -> None:
        self._num_jobs += 1
        self._pending[job.key] += len(job.indexes)
        if self._num_jobs > JOBS_MAX:
            self._report([unstarted(job, f"{JOBS_MAX} reads are under way already")])
        else:
            self._command(lambda: self._puller.submit(job))

    def abandon(self, key: AttemptKey) -> None:
        self._command(lambda: self._puller.abandon(key))

    def add_peer(self, peer: Peer, metadata: bytes, num_blocks: int, block_bytes: int) -> None:
        self._command(lambda: self._puller.add_peer(peer, metadata, num_blocks, block_bytes))

    def remove_peer(self, peer: Peer) -> None:
        self._command(lambda: self._puller.remove_peer(peer))

    def serve_hint(self, is_serving: bool) -> None:
        if is_serving and not self._is_serving:
            self._bell.set()
        self._is_serving = is_serving

    def poll(self) -> list[PullResult | PeerResult]:
        """What ended since the last call. Raises what the transfer thread died of."""
        if self._crash is not None:
            raise self._crash
        with self._lock:
            results, self._results = self._results, []
        for result in results:
            if isinstance(result, PullResult):
                self._num_jobs -= 1
                self._settle(result)
        return results

    def pending(self) -> Mapping[AttemptKey, int]:
        return self._pending

    def close(self) -> None:
        """Stop the thread, which closes the transport. Raises TransferFailedError when either takes too long."""
        self._is_closing = True
        self._bell.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise TransferFailedError(
                source="peers",
                target="this worker",
                reason=f"the transfer thread did not stop within {CLOSE_TIMEOUT_S} s",
            )
        if self._unclosed is not None:
            raise self._unclosed

    def _settle(self, result: PullResult) -> None:
        self._pending[result.key] -= len(result.verified) + len(result.bad)
        if not self._pending[result.key]:
            del self._pending[result.key]

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._bell.set()

    def _report(self, results: list[PullResult | PeerResult]) -> None:
        with self._lock:
            self._results += results
        self.on_result()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._bell.wait(BUSY_POLL_S if self._is_serving or self._puller.num_reads else IDLE_POLL_S)
                self._bell.clear()
                self._turn()
        except Exception as error:
            self._crash = error
            self.on_result()
        try:
            self._puller.close()
        except TransferFailedError as error:
            self._unclosed = error

    def _turn(self) -> None:
        while self._commands:
            self._commands.popleft()()
        results = self._puller.poll()
        if results:
            self._report(results)
