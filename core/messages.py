"""Every message on a link, as tagged MessagePack structs, and the frame that carries them.

A frame is one MessagePack array of messages: everything a process has to say to a peer after one step. Unknown fields
are ignored within a protocol version; an unknown tag is an error. Directions: `ToWorker` (router or controller to
worker), `FromWorker`, `ToRouter` (controller to router), `FromRouter`.

    router                decode worker               prefill worker
      | Submit ------------->|                             |
      |<------------- Credit |                             |
      | Prefill ------------------------------------------>|
      |<--------------------------------------------- Offer|  (cumulative, one per chunk; relayed)
      | Offer -------------->|========= KV reads =========>|
      |<----------- PullDone |                             |
      | Release ------------------------------------------>|
      |<------------- Tokens |  (one or more, until every child has a finish reason)

Knows nothing about transports or about what the receivers do.
"""

from typing import Literal

import msgspec

from core.ids import Attempt, BlockDigest, BlockId, Epoch, LeaseId, RequestId, Role, RouterId, WorkerId
from core.layout import Handshake
from core.process import ProcessUsage
from core.request import FinishReason, Request

FRAME_BYTES_MAX = 64 * 1024 * 1024


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of all messages."""


class RequestMessage(Message, frozen=True, kw_only=True):
    """Base of all messages about one try at one request. A receiver ignores an attempt older than the one it knows
    (TX-2).
    """

    request_id: RequestId
    attempt: Attempt


# ---- opening a link ------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """First message of whoever dials."""

    sender: RouterId
    """Name of the router, or `controller`."""
    epoch: Epoch
    protocol_min: int
    protocol_max: int


class Welcome(Message, frozen=True, kw_only=True):
    """A worker's answer to Hello."""

    worker: WorkerId
    role: Role
    epoch: Epoch
    pid: int
    handshake: Handshake
    model_name: str
    max_model_len: int
    """Tokens of prompt plus output at most."""


class Reject(Message, frozen=True, kw_only=True):
    """Answer to a Hello that cannot be served; the link closes after it."""

    reason: str


# ---- router to worker ----------------------------------------------------------------------------------------------


class Connect(Message, frozen=True, kw_only=True):
    """Names to a decode worker a prefill worker it may read from. Answered by PeerReady or PeerRefused. Idempotent."""

    worker: WorkerId
    epoch: Epoch
    handshake: Handshake


class Disconnect(Message, frozen=True, kw_only=True):
    """The prefill worker of this epoch is gone: reads from it fail at once."""

    worker: WorkerId
    epoch: Epoch


class Submit(RequestMessage, frozen=True, kw_only=True):
    """Asks a decode worker to serve a request. Answered by Credit or Refused."""

    request: Request
    prefill_worker: WorkerId | None = None
    """Who will compute the prompt; None: the decode worker computes all of it."""


class Prefill(RequestMessage, frozen=True, kw_only=True):
    """Asks a prefill worker to compute the full blocks in front of a prompt's tail, and to offer the entries of its
    demand (`kvtransfer.plan`) from num_held_blocks on.
    """

    request: Request
    decode_worker: WorkerId
    num_held_blocks: int
    """Leading entries of the demand that the decode worker holds already."""


class Release(RequestMessage, frozen=True, kw_only=True):
    """The reader needs the lease no longer. Idempotent; an unknown lease changes nothing."""

    lease_id: LeaseId


class Renew(RequestMessage, frozen=True, kw_only=True):
    """Extends a lease by its time to live from reception. From the decode worker through the router to the prefill
    worker.
    """

    lease_id: LeaseId


class Cancel(RequestMessage, frozen=True, kw_only=True):
    """Stop working on a request and free what it holds. Idempotent; not answered."""


class Drain(Message, frozen=True, kw_only=True):
    """Admit nothing more; finish what runs."""


class Alive(Message, frozen=True, kw_only=True):
    """A router's heartbeat, sent every HEARTBEAT_S to each worker: who does not hear it gives its requests up."""


class Audit(Message, frozen=True, kw_only=True):
    """Asks a member to check its invariants and to show its books. A worker answers Audited, a router AuditReport."""

    number: int
    """Echoed in the answer."""


# ---- worker to router ----------------------------------------------------------------------------------------------


class PeerReady(Message, frozen=True, kw_only=True):
    """The decode worker can read from this prefill worker."""

    worker: WorkerId
    epoch: Epoch


class PeerRefused(Message, frozen=True, kw_only=True):
    """The two cannot exchange KV; the reason names both sides and the field."""

    worker: WorkerId
    epoch: Epoch
    reason: str


class Credit(RequestMessage, frozen=True, kw_only=True):
    """The decode worker takes the request and will find room for its blocks."""

    num_held_blocks: int
    """Leading entries of the demand already here (pinned for this request)."""
    num_demanded_blocks: int
    """Entries of the demand, held ones included. Equal to num_held_blocks: no prefill is needed."""
    ttl_s: float
    """The credit lapses when no offer came by then."""


class Refused(RequestMessage, frozen=True, kw_only=True):
    """The worker does not take, or gives up, this attempt; it holds nothing for it any more."""

    kind: Literal["overloaded", "too_long", "transfer_failed", "credit_lapsed", "unknown_peer", "invalid", "draining"]
    reason: str
    retry_after_s: int = 1


class Offer(RequestMessage, frozen=True, kw_only=True):
    """Blocks that a decode worker may read. Cumulative: each offer repeats all earlier ones of its attempt."""

    worker: WorkerId
    epoch: Epoch
    lease_id: LeaseId
    lease_ttl_s: float
    """From reception. The reader stops before its own, rebased view of the end."""
    first_block_index: int
    """Index within the demand of the first offered entry (= num_held_blocks of the Prefill message)."""
    block_ids: tuple[BlockId, ...]
    """Where the blocks of entries first_block_index, first_block_index + 1, ... lie at the sender."""
    digests: tuple[BlockDigest, ...]
    """Digest of each offered block, same length as block_ids."""
    is_final: bool
    """All demanded blocks are offered."""
    queue_s: float = 0.0
    """Time the prompt waited before its first chunk."""
    prefill_s: float = 0.0
    """Time from the first chunk to this offer."""
    num_cached_blocks: int = 0
    """Blocks that the prefill worker did not compute because it had them cached."""


class PullDone(RequestMessage, frozen=True, kw_only=True):
    """Every demanded block was read, verified and committed; the lease may be released."""

    lease_id: LeaseId
    num_blocks: int
    """Blocks of tokens of which anything was read, however many groups of layers have one."""
    num_bytes: int
    transfer_s: float
    """Time from the final offer's arrival to the commit: what the transfer added to the time to first token."""
    read_s: float
    """Time spent in reads, most of it while the prompt was still being computed."""


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Log-probabilities at one output position, natural log, of the raw distribution."""

    logprob: float
    """Of the chosen token."""
    top_ids: tuple[int, ...]
    """Most likely first; as many as asked for."""
    top_logprobs: tuple[float, ...]


class TokenUpdate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one child."""

    child: int
    first_index: int
    """Output index of the first token here; dense per child: no gap, no duplicate (RQ-1)."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The id that ended the child, when finish_reason is stop."""


class Tokens(RequestMessage, frozen=True, kw_only=True):
    """What one step produced for one request."""

    updates: tuple[TokenUpdate, ...]
    num_cached_tokens: int = 0
    """Prompt tokens this decode worker had cached or pulled, that is, did not compute (first message only)."""
    num_computed_tokens: int = 0
    """Prompt tokens this decode worker computed itself (first message only)."""
    queue_s: float = 0.0
    """Time from when the decode worker had all it needed (credit when nothing is prefilled, else the last block) to its
    first step for the request (first message only)."""


class Audited(Message, frozen=True, kw_only=True):
    """What a member found when it checked itself, on the thread that owns its state."""

    number: int
    member: WorkerId | RouterId
    epoch: Epoch
    problems: tuple[str, ...]
    """Broken invariants, each beginning with its number; empty when all hold."""
    books: dict[str, int]
    """Counts of what is held for requests, by name, all 0 when there is none; and facts about the process."""


class KvUsage(msgspec.Struct, frozen=True, kw_only=True):
    """KV-1: free + cached + used = total."""

    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_used: int


class WorkerStatus(Message, frozen=True, kw_only=True):
    """A worker's heartbeat, sent every HEARTBEAT_S to every peer."""

    worker: WorkerId
    role: Role
    epoch: Epoch
    state: Literal["ready", "draining"]
    num_waiting: int
    num_running: int
    num_leases: int
    num_pins: int
    kv: KvUsage
    counters: dict[str, float]
    """Monotonic counters by key (see `core.metrics`)."""
    num_waiting_credit: int = 0
    """Of num_waiting: those that wait for credit."""
    process: ProcessUsage | None = None
    """Of the worker's process."""


HEARTBEAT_S = 0.5
HEARTBEAT_TIMEOUT_S = 5.0
"""A peer that was silent for so long is dead."""


# ---- controller and router -----------------------------------------------------------------------------------------


class WorkerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker listens."""

    worker: WorkerId
    role: Role
    epoch: Epoch
    endpoint: str
    """host:port of its link server."""
    pid: int


class WorkerSet(Message, frozen=True, kw_only=True):
    """All workers that a router should hold links to; replaces the earlier set."""

    workers: tuple[WorkerAddress, ...]


class RouterStatus(Message, frozen=True, kw_only=True):
    """A router's heartbeat to the controller."""

    router: RouterId
    epoch: Epoch
    pid: int
    url: str
    num_in_flight: int
    num_in_flight_max: int
    num_workers_ready: dict[str, int]
    """Live workers by role."""
    workers: tuple[WorkerStatus, ...] = ()
    """The last heartbeat of each live worker."""


class AuditReport(Message, frozen=True, kw_only=True):
    """A router's answer to Audit: itself, and every worker it knows."""

    number: int
    members: tuple[Audited, ...]
    silent: tuple[WorkerId, ...] = ()
    """Workers that did not answer in time."""


ToWorker = Hello | Connect | Disconnect | Submit | Prefill | Offer | Release | Renew | Cancel | Drain | Alive | Audit
FromWorker = (
    Welcome
    | Reject
    | PeerReady
    | PeerRefused
    | Credit
    | Refused
    | Offer
    | PullDone
    | Renew
    | Tokens
    | WorkerStatus
    | Audited
)
ToRouter = Hello | WorkerSet | Drain | Audit
FromRouter = RouterStatus | Reject | AuditReport
AnyMessage = (
    Hello | Welcome | Reject | Connect | Disconnect | Submit | Prefill | Release | Renew | Cancel | Drain
    | PeerReady | PeerRefused | Credit | Refused | Offer | PullDone | Tokens | WorkerStatus | WorkerSet | RouterStatus
    | Alive | Audit | Audited | AuditReport
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[AnyMessage])


def encode_frame(messages: list[AnyMessage]) -> bytes:
    """One frame. Raises ValueError above FRAME_BYTES_MAX."""
    frame = _encoder.encode(messages)
    if len(frame) > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {len(frame)} bytes exceeds the limit of {FRAME_BYTES_MAX} bytes")
    return frame


def decode_frame(frame: bytes) -> list[AnyMessage]:
    """The messages of a frame. Raises msgspec.ValidationError or msgspec.DecodeError naming the field that is wrong."""
    return _decoder.decode(frame)
