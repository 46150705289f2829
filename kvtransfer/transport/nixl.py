"""The NIXL transport: one-sided reads between processes over UCX (CMA, RDMA, TCP), host or CUDA memory.

One registered region, one descriptor per block (all layers together), prepared once for the local pool and once per
peer, so that a read names block indexes only. No progress thread: `poll` serves peers that read from here and must come
round often (half a millisecond while anyone reads). Over CMA the copy happens inside `start_read`, which then takes as
long.

A read ends only when NIXL says so. Releasing its handle, or removing the peer, does not stop a copy that is under way:
over TCP a late reply is written all the same. So an abandoned read, and a read from a removed peer, is left to end by
itself. Nor does removing a peer close its connection: the socket stays for the life of the agent (measured; one
descriptor a time). So a removed peer keeps its registration for when it is added again in the same life, and is dropped
after its last read when it can have no further use: a newer life is there, or a read of it has failed. Knows nothing
about what moves.
"""

import importlib
import logging
import os
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from core.clock import Clock, SystemClock
from core.errors import TransferFailedError
from core.ids import BlockId
from kvtransfer.transport.base import Peer, ReadId, ReadResult, ReadState, Region
from kvtransfer.transport.bounds import check_read, check_regions

NAME = "nixl"
BACKEND = "UCX"
CLOSE_TIMEOUT_S = 5.0
"""Longest that `close` waits for reads under way to end."""
CLOSE_POLL_S = 0.0005

_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
"""The meta package, or either of the two wheels that it would pull."""


class NixlMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer says of itself: MessagePack, so that nothing that is executed comes off the wire."""

    agent: bytes
    """NIXL's own description of agent, connection and registered memory."""
    address: int
    block_bytes: int
    num_blocks: int
    device: str


@dataclass(eq=False, slots=True, kw_only=True)
class _Remote:
    """A peer that can be read, or one that was removed and may come back."""

    agent_name: str
    num_blocks: int
    descriptors: Any
    num_reads: int = 0
    is_removed: bool = False
    is_useless: bool = False
    """Once it is removed, it is dropped and not taken again."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Read:
    peer: Peer
    handle: Any
    started_s: float
    end: ReadState | None = None
    """Set once the copy has ended; reported when the handle is released."""
    seconds: float = 0.0
    reason: str = ""
    is_abandoned: bool = False


class NixlTransport:
    """See the module. All calls after construction and `metadata` from one thread."""

    name = NAME

    def __init__(self, peer: Peer, region: Region, *, clock: Clock | None = None) -> None:
        """`peer`: who this is. Registers `region`, which must outlive the transport. Raises TransferFailedError."""
        self._self = peer
        self._region = region
        self._clock = clock or SystemClock()
        self._api, self._errors = _load()
        self._refusals: tuple[type[Exception], ...] = (*self._errors, ValueError, OverflowError)
        self._memory_type, self._device_id = _memory(region.device)
        config = self._api.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])
        try:
            # The epoch is part of the name: a worker's next life is another agent, beside whatever is left of this one.
            self._agent = self._api.nixl_agent(_agent_name(peer), config)
            self._registration = self._agent.register_memory(
                [(region.address, region.size_bytes, self._device_id, "")], self._memory_type, [BACKEND]
            )
            self._local = self._prepare("NIXL_INIT_AGENT", region.address, region.num_blocks, region.device)
        except self._errors as error:
            raise self._failure(peer, f"NIXL cannot register the pool: {error}") from error
        self._remotes: dict[Peer, _Remote] = {}
        self._reads: dict[ReadId, _Read] = {}
        self._next_id = 1
        self._is_closed = False

    def metadata(self) -> bytes:
        region = self._region
        return msgspec.msgpack.encode(
            NixlMetadata(
                agent=self._agent.get_agent_metadata(),
                address=region.address,
                block_bytes=region.block_bytes,
                num_blocks=region.num_blocks,
                device=region.device,
            )
        )

    def add_peer(self, peer: Peer, metadata: bytes, num_blocks: int, block_bytes: int) -> None:
        if peer in self._remotes and not self._remotes[peer].is_removed:
            return
        try:
            said = msgspec.msgpack.decode(metadata, type=NixlMetadata)
        except msgspec.DecodeError as error:
            raise self._failure(peer, f"its metadata cannot be read: {error}") from error
        check_regions(
            peer,
            self._self,
            (
                ("num_blocks", said.num_blocks, num_blocks),
                ("block_bytes", said.block_bytes, block_bytes),
                ("block_bytes", said.block_bytes, self._region.block_bytes),
            ),
        )
        remote = self._remotes.get(peer)
        if remote is not None and remote.is_useless:
            raise self._failure(peer, "reads from its earlier registration have not ended")
        if remote is not None:
            remote.is_removed = False
            return
        self._remotes[peer] = self._connect(peer, said)
        for older in [one for one in self._remotes if one.worker == peer.worker and one.epoch < peer.epoch]:
            self._remotes[older].is_useless = True
            self._drop_if_useless(older)

    def _connect(self, peer: Peer, said: NixlMetadata) -> _Remote:
        agent_name = ""
        try:
            agent_name = _text(self._agent.add_remote_agent(said.agent))
            if agent_name != _agent_name(peer):
                raise ValueError(f"it is that of {agent_name}")
            # NIXL refuses here what the agent has not registered, so that no later block id can reach beyond it.
            descriptors = self._prepare(agent_name, said.address, said.num_blocks, said.device)
            self._agent.make_connection(agent_name, [BACKEND])
        except self._refusals as error:
            if agent_name:
                self._agent.remove_remote_agent(agent_name)
            raise self._failure(peer, f"its registration is refused: {error}") from error
        return _Remote(agent_name=agent_name, num_blocks=said.num_blocks, descriptors=descriptors)

    def remove_peer(self, peer: Peer) -> None:
        remote = self._remotes.get(peer)
        if remote is not None:
            remote.is_removed = True
            self._drop_if_useless(peer)

    def start_read(self, peer: Peer, sources: list[BlockId], targets: list[BlockId]) -> ReadId:
        remote = self._remotes.get(peer)
        if remote is None or remote.is_removed:
            raise self._failure(peer, f"epoch {peer.epoch} is no peer")
        check_read(sources, targets, remote.num_blocks, self._region)
        started_s = self._clock.now()
        try:
            handle = self._agent.make_prepped_xfer(
                "READ",
                self._local,
                np.array(targets, dtype=np.int32),
                remote.descriptors,
                np.array(sources, dtype=np.int32),
                backends=[BACKEND],
            )
        except self._errors as error:
            raise self._failure(peer, f"NIXL refuses the read: {error}") from error
        read = _Read(peer=peer, handle=handle, started_s=started_s)
        read_id = ReadId(self._next_id)
        self._next_id += 1
        self._reads[read_id] = read
        remote.num_reads += 1
        self._look(read, self._agent.transfer)
        return read_id

    def abandon(self, read_id: ReadId) -> None:
        """See the module: nothing can be taken back, so the read is only reported as failed when it ends."""
        if read_id in self._reads:
            self._reads[read_id].is_abandoned = True

    def poll(self) -> list[ReadResult]:
        # Progresses connections and the reads of peers; the notifications themselves are not used.
        self._agent.get_new_notifs()
        results = []
        for read_id, read in list(self._reads.items()):
            if read.end is None:
                self._look(read, self._agent.check_xfer_state)
            if read.end is not None and self._release(read):
                results.append(self._report(read_id, read))
        return results

    def close(self) -> None:
        if self._is_closed:
            return
        deadline_s = self._clock.now() + CLOSE_TIMEOUT_S
        while self._reads:
            self.poll()
            if self._reads and self._clock.now() > deadline_s:
                reason = f"{len(self._reads)} reads have not ended within {CLOSE_TIMEOUT_S} s"
                raise TransferFailedError(source="peers", target=self._self.worker, reason=reason)
            time.sleep(CLOSE_POLL_S if self._reads else 0)
        for peer, remote in list(self._remotes.items()):
            remote.is_useless = True
            self.remove_peer(peer)
        self._local.release()
        self._agent.deregister_memory(self._registration, [BACKEND])
        self._is_closed = True

    def _prepare(self, agent_name: str, address: int, num_blocks: int, device: str) -> Any:
        memory_type, device_id = _memory(device)
        rows: NDArray[np.uint64] = np.empty((num_blocks, 3), dtype=np.uint64)
        block_bytes = self._region.block_bytes
        rows[:, 0] = np.uint64(address) + np.arange(num_blocks, dtype=np.uint64) * np.uint64(block_bytes)
        rows[:, 1] = block_bytes
        rows[:, 2] = device_id
        return self._agent.prep_xfer_dlist(agent_name, rows, memory_type, [BACKEND])

    def _look(self, read: _Read, ask: Any) -> None:
        """Let NIXL start or judge a read, and note the end if it is one."""
        try:
            status = ask(read.handle)
        except self._errors as error:
            status, read.reason = "ERR", str(error)
        if status == "PROC":
            return
        read.seconds = self._clock.now() - read.started_s
        is_good = status == "DONE" and not read.is_abandoned
        read.end = ReadState.DONE if is_good else ReadState.FAILED
        self._remotes[read.peer].is_useless |= status != "DONE"
        if not is_good:
            read.reason = "abandoned" if read.is_abandoned else f"NIXL: {read.reason or status}"

    def _release(self, read: _Read) -> bool:
        """False while NIXL still holds the request; asked again at the next poll."""
        try:
            read.handle.release()
        except self._errors:
            return False
        return True

    def _report(self, read_id: ReadId, read: _Read) -> ReadResult:
        assert read.end is not None
        del self._reads[read_id]
        self._remotes[read.peer].num_reads -= 1
        self._drop_if_useless(read.peer)
        return ReadResult(read_id=read_id, state=read.end, reason=read.reason, seconds=read.seconds)

    def _drop_if_useless(self, peer: Peer) -> None:
        remote = self._remotes[peer]
        if remote.num_reads or not (remote.is_removed and remote.is_useless):
            return
        del self._remotes[peer]
        remote.descriptors.release()
        self._agent.remove_remote_agent(remote.agent_name)

    def _failure(self, peer: Peer, reason: str) -> TransferFailedError:
        return TransferFailedError(source=peer.worker, target=self._self.worker, reason=reason)


def _agent_name(peer: Peer) -> str:
    return f"{peer.worker}#{peer.epoch}"


def _memory(device: str) -> tuple[str, int]:
    """NIXL's memory type and device id of `cpu` or `cuda:N`. Raises ValueError."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return "DRAM", 0
    if kind != "cuda":
        raise ValueError(f"device {device!r} is neither cpu nor cuda:N")
    return "VRAM", int(index or 0)


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _load() -> tuple[Any, tuple[type[Exception], ...]]:
    """NIXL's module and its exceptions, which share no base class. Raises TransferFailedError without NIXL."""
    for package in _PACKAGES:
        try:
            api = importlib.import_module(f"{package}._api")
            bindings = importlib.import_module(f"{package}._bindings")
        except ModuleNotFoundError:
            continue
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)
        errors = [kind for name, kind in vars(bindings).items() if name.startswith("nixl") and name.endswith("Error")]
        return api, tuple(errors)
    reason = f"none of the packages {', '.join(_PACKAGES)} is installed"
    raise TransferFailedError(source="this machine", target="any worker", reason=reason)
