"""The prefill workers that a decode worker may read from: handshakes, who asked, and restarts.

Knows nothing about requests; reads are `decode.intake`'s.
"""

from collections.abc import Mapping

from core.errors import IncompatiblePeersError
from core.ids import Epoch, RouterId, WorkerId
from core.layout import Handshake
from core.messages import Connect, FromWorker, PeerReady, PeerRefused
from kvtransfer.handshake import check_peers
from kvtransfer.puller import BlockPuller, PeerResult
from kvtransfer.transport.base import Peer


class PeerTable:
    """Peers by life, with the routers that wait for, or got, an answer about them."""

    def __init__(self, worker_id: WorkerId, handshake: Handshake, puller: BlockPuller) -> None:
        self._worker_id = worker_id
        self._handshake = handshake
        self._puller = puller
        self._askers: dict[Peer, set[RouterId]] = {}

    def connect(self, source: RouterId, message: Connect) -> tuple[list[Peer], list[tuple[RouterId, FromWorker]]]:
        """Begin to make a peer readable. Returns older lives that end by this, and answers known already."""
        peer = Peer(worker=message.worker, epoch=message.epoch)
        try:
            check_peers(message.handshake, self._handshake, message.worker, self._worker_id)
        except IncompatiblePeersError as error:
            return [], [(source, _refused(peer, str(error)))]
        older = [p for p in self._askers if p.worker == peer.worker and p.epoch < peer.epoch]
        newest = max((p.epoch for p in self._askers if p.worker == peer.worker), default=peer.epoch)
        if newest > peer.epoch:  # TX-2
            return [], [(source, _refused(peer, f"epoch {newest} of {peer.worker} is known at {self._worker_id}"))]
        self._askers.setdefault(peer, set()).add(source)
        layout = message.handshake.layout
        self._puller.add_peer(
            peer, message.handshake.transport_metadata, message.handshake.num_blocks, layout.block_bytes()
        )
        return older, []

    def disconnect(self, source: RouterId, peer: Peer) -> bool:
        """One router has lost a peer. True if no other router counts on it, so that it can be removed."""
        askers = self._askers.get(peer)
        if askers is None:
            return False
        askers.discard(source)
        return not askers

    def forget_router(self, source: RouterId) -> None:
        """A router is gone; the peers that it named stay readable."""
        for askers in self._askers.values():
            askers.discard(source)

    def knows(self, peer: Peer) -> bool:
        """The peer was named and has not been removed since."""
        return peer in self._askers

    def answer(self, result: PeerResult) -> list[tuple[RouterId, FromWorker]]:
        """What to tell whoever asked about a peer."""
        askers = self._askers.get(result.peer, set())
        if result.is_ready:
            ready = PeerReady(worker=result.peer.worker, epoch=result.peer.epoch)
            return [(router, ready) for router in sorted(askers)]
        return [(router, _refused(result.peer, result.reason)) for router in sorted(askers)]

    def check(self, served: Mapping[WorkerId, Epoch]) -> None:
        """TX-2: one life of each worker is known; RQ-2: whom requests are pulled from (`served`) was not removed."""
        workers = [peer.worker for peer in self._askers]
        assert len(set(workers)) == len(workers), f"TX-2: two lives of one worker are peers: {sorted(workers)}"
        gone = [Peer(worker=worker, epoch=epoch) for worker, epoch in served.items()]
        gone = [peer for peer in gone if peer not in self._askers]
        assert not gone, f"RQ-2: requests are pulled from {gone}, which were removed"

    def remove(self, peer: Peer) -> None:
        """Forget one life of a peer."""
        self._askers.pop(peer, None)
        self._puller.remove_peer(peer)


def _refused(peer: Peer, reason: str) -> PeerRefused:
    return PeerRefused(worker=peer.worker, epoch=peer.epoch, reason=reason)
