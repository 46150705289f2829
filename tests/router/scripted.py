"""Workers that follow a script over the real link and messages, a tiny model directory, and a router around them.

Time is a manual clock; `Stage.run_for` moves it in small steps and lets every task run in between.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from core.clock import ManualClock
from core.errors import LinkClosedError
from core.ids import BlockDigest, BlockId, Epoch, LeaseId, Role, RouterId, WeightIdentity, WorkerId
from core.layout import BlockLayout, GroupLayout, Handshake
from core.link import Link, MemoryNetwork
from core.messages import (
    HEARTBEAT_S,
    AnyMessage,
    Cancel,
    Connect,
    Credit,
    FromWorker,
    Hello,
    KvUsage,
    Offer,
    PeerReady,
    Prefill,
    PullDone,
    RequestMessage,
    Submit,
    TokenLogprobs,
    Tokens,
    TokenUpdate,
    Welcome,
    WorkerAddress,
    WorkerSet,
    WorkerStatus,
)
from core.request import FinishReason, Request
from router.service import Mode, RouterService
from router.text import TextProcessor

BLOCK_SIZE = 16
STEP_S = 0.05
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
IM_START = 256
IM_END = 257


def write_model(directory: Path, *, template: str | None = TEMPLATE) -> Path:
    """A byte-level tokenizer: id = position of the byte in the alphabet, then two special tokens and 'hello'."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer.add_tokens([AddedToken("hello", special=False)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"vocab_size": 300}))
    return directory


def handshake() -> Handshake:
    layout = BlockLayout(
        block_size=BLOCK_SIZE,
        groups=(GroupLayout(kind="full", num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32"),),
    )
    return Handshake(
        hash_scheme="h",
        digest_scheme="d",
        weight_identity=WeightIdentity("w"),
        layout=layout,
        numerics="exact",
        num_blocks=64,
        transport="memory",
        transport_metadata=b"",
    )


Script = Callable[[Request, int], tuple[Sequence[int], FinishReason]]
"""Tokens of one child and how it ends; `stop` says that the last token is the stop id."""


class ScriptedWorker:
    """A worker that answers as its fields say, and remembers what it was sent."""

    def __init__(self, role: Role, index: int, clock: ManualClock, script: Script, epoch: int = 1) -> None:
        self.worker = WorkerId(f"{role}-{index}")
        self.role = role
        self.epoch = Epoch(epoch)
        self.received: list[AnyMessage] = []
        self.script = script
        self.replies: Callable[[RequestMessage], list[FromWorker] | None] = lambda message: None
        """What to answer instead of the ordinary answer; None: the ordinary one."""
        self.is_silent = False
        """No heartbeats any more."""
        self.state: str = "ready"
        self.max_model_len = 512
        self.link: Link | None = None
        self._clock = clock
        self._submits: dict[str, Submit] = {}

    def address(self) -> WorkerAddress:
        return WorkerAddress(worker=self.worker, role=self.role, epoch=self.epoch, endpoint=self.worker, pid=7)

    def sent(self, kind: type[AnyMessage]) -> list[AnyMessage]:
        return [message for message in self.received if type(message) is kind]

    async def accept(self, link: Link) -> None:
        self.link = link
        beat = asyncio.ensure_future(self._beat(link))
        try:
            while True:
                for message in await link.receive():
                    self.received.append(message)
                    replies = self._answer(message)
                    if replies:
                        link.send(replies)
        finally:
            beat.cancel()

    async def _beat(self, link: Link) -> None:
        while True:
            await self._clock.sleep(HEARTBEAT_S)
            if not self.is_silent:
                try:
                    link.send([self.status()])
                except LinkClosedError:
                    return

    def status(self) -> WorkerStatus:
        return WorkerStatus(
            worker=self.worker,
            role=self.role,
            epoch=self.epoch,
            state=self.state,  # type: ignore[arg-type]
            num_waiting=1,
            num_running=2,
            num_leases=3,
            num_pins=4,
            kv=KvUsage(blocks_total=64, blocks_free=60, blocks_cached=3, blocks_used=1),
            counters={"pdcluster_steps_total": 5.0},
        )

    def _answer(self, message: AnyMessage) -> list[AnyMessage]:
        if isinstance(message, Hello):
            return [
                Welcome(
                    worker=self.worker,
                    role=self.role,
                    epoch=self.epoch,
                    pid=7,
                    handshake=handshake(),
                    model_name="tiny",
                    max_model_len=self.max_model_len,
                )
            ]
        if isinstance(message, Connect):
            return [PeerReady(worker=message.worker, epoch=message.epoch)]
        if not isinstance(message, RequestMessage):
            return []
        if isinstance(message, Submit):
            self._submits[message.request_id] = message
        replies = self.replies(message)
        return list(replies) if replies is not None else list(self.ordinary(message))

    def ordinary(self, message: RequestMessage) -> list[FromWorker]:
        """The answer of a worker to which nothing happens."""
        request_id, attempt = message.request_id, message.attempt
        if isinstance(message, Submit):
            demanded = (len(message.request.token_ids) - 1) // BLOCK_SIZE
            needs_prefill = message.prefill_worker is not None and demanded > 0
            held = 0 if needs_prefill else demanded
            credit = Credit(
                request_id=request_id, attempt=attempt, num_held_blocks=held, num_demanded_blocks=demanded, ttl_s=10.0
            )
            return [credit] if needs_prefill else [credit, *self.tokens(message)]
        if isinstance(message, Prefill):
            count = (len(message.request.token_ids) - 1) // BLOCK_SIZE
            return [
                Offer(
                    request_id=request_id,
                    attempt=attempt,
                    worker=self.worker,
                    epoch=self.epoch,
                    lease_id=LeaseId(9),
                    lease_ttl_s=30.0,
                    first_block_index=message.num_held_blocks,
                    block_ids=tuple(BlockId(i) for i in range(count)),
                    digests=tuple(BlockDigest(i) for i in range(count)),
                    is_final=True,
                    queue_s=0.5,
                    prefill_s=0.25,
                    num_cached_blocks=1,
                )
            ]
        if isinstance(message, Offer):
            done = PullDone(
                request_id=request_id,
                attempt=attempt,
                lease_id=message.lease_id,
                num_blocks=len(message.block_ids),
                num_bytes=1,
                transfer_s=0.125,
                read_s=1,
            )
            return [done, *self.tokens(self._submits[message.request_id])]
        return []

    def tokens(self, submit: Submit) -> list[FromWorker]:
        """All children's tokens, one message for each position."""
        messages: list[FromWorker] = []
        outputs = [self.script(submit.request, child) for child in range(submit.request.num_children)]
        for position in range(max(len(ids) for ids, _ in outputs)):
            updates = []
            for child, (ids, reason) in enumerate(outputs):
                if position < len(ids):
                    updates.append(_update(submit.request, child, position, ids, reason))
            messages.append(
                Tokens(
                    request_id=submit.request_id, attempt=submit.attempt, updates=tuple(updates), num_cached_tokens=16
                )
            )
        return messages


def _update(request: Request, child: int, position: int, ids: Sequence[int], reason: FinishReason) -> TokenUpdate:
    is_last = position == len(ids) - 1
    count = request.sampling.num_logprobs
    logprobs: tuple[TokenLogprobs, ...] = ()
    if count is not None:
        top_ids = tuple((ids[position] + i) % 256 for i in range(count))
        logprobs = (TokenLogprobs(logprob=-0.5, top_ids=top_ids, top_logprobs=tuple(-0.5 - i for i in range(count))),)
    return TokenUpdate(
        child=child,
        first_index=position,
        token_ids=(ids[position],),
        logprobs=logprobs,
        finish_reason=reason if is_last else None,
        stop_token_id=ids[position] if is_last and reason == "stop" else None,
    )


class Stage:
    """A router, scripted workers and time."""

    def __init__(self, directory: Path, *, mode: Mode = "disaggregated", **limits: float) -> None:
        self.clock = ManualClock()
        self.network = MemoryNetwork(self.clock)
        self.text = TextProcessor(directory)
        self.service = RouterService(
            router_id=RouterId("router-0"),
            epoch=Epoch(1),
            clock=self.clock,
            dialer=self.network,
            text=self.text,
            model_name="tiny",
            mode=mode,
            check_s=0.0,
            **limits,  # type: ignore[arg-type]
        )
        self.workers: dict[str, ScriptedWorker] = {}

    def reply(self, text: str, *, reason: FinishReason = "stop") -> Script:
        """A script that says `text`, then the end token if the reason is `stop`; max_tokens cuts it."""
        ids = self.text.encode(text, False) + ([IM_END] if reason == "stop" else [])

        def script(request: Request, child: int) -> tuple[Sequence[int], FinishReason]:
            limit = request.sampling.max_tokens
            return (ids[:limit], "length") if len(ids) > limit else (ids, reason)

        return script

    def add(self, role: Role, index: int = 0, *, text: str = "Hi there", epoch: int = 1) -> ScriptedWorker:
        worker = ScriptedWorker(role, index, self.clock, self.reply(text), epoch)
        self.workers[worker.worker] = worker
        self.network.listen(worker.worker, worker.accept)
        return worker

    def publish(self) -> None:
        """Tell the router the workers."""
        self.service.update_workers(WorkerSet(workers=tuple(w.address() for w in self.workers.values())))

    def kill(self, name: str) -> None:
        """As SIGKILL: the link breaks, nobody listens."""
        worker = self.workers.pop(name)
        self.network.stop_listening(name)
        for link in self.network.links:
            if link.peer == worker.worker:
                link.lose()

    async def run_for(self, seconds: float) -> None:
        for _ in range(max(1, round(seconds / STEP_S))):
            await settle()
            self.clock.advance(STEP_S)
        await settle()

    def cancels(self, name: str) -> list[AnyMessage]:
        return self.workers[name].sent(Cancel)


@asynccontextmanager
async def open_stage(
    directory: Path, *, num_prefill: int = 1, num_decode: int = 1, mode: Mode = "disaggregated", **limits: float
) -> AsyncIterator[Stage]:
    """A started stage whose workers are ready."""
    stage = Stage(directory, mode=mode, **limits)
    for index in range(num_prefill):
        stage.add("prefill", index)
    for index in range(num_decode):
        stage.add("decode", index)
    await stage.service.start()
    stage.publish()
    await stage.run_for(0.6)
    try:
        yield stage
    finally:
        await stage.service.close()
        await stage.network.close()


async def settle() -> None:
    """Let every task run until nothing more happens at this instant."""
    for _ in range(25):
        await asyncio.sleep(0)
