"""A prefill and a decode worker on stand-in runners, an in-memory transport and a manual clock, relayed as a router
would.
"""

from collections.abc import Callable
from typing import Any

import pytest

from cluster.assembly import ServedModel, WorkerIdentity, build_handshake, build_worker
from core.clock import ManualClock
from core.config import ClusterConfig, parse_config
from core.ids import Attempt, Epoch, RequestId, Role, RouterId, WeightIdentity, WorkerId
from core.layout import FULL_ATTENTION, Windows
from core.messages import (
    Cancel,
    Connect,
    Credit,
    FromWorker,
    Offer,
    Prefill,
    PullDone,
    Refused,
    Release,
    Renew,
    Submit,
    Tokens,
)
from core.request import Request, SamplingParams
from decode.worker import DecodeWorker
from engine.standin import StandinRunner, expected_tokens, standin_layout
from kvtransfer.integrity import BlockDigester
from kvtransfer.puller import Puller
from kvtransfer.transport.base import Peer, Region
from kvtransfer.transport.memory import MemoryFabric, MemoryTransport
from prefill.worker import PrefillWorker

ROUTER = RouterId("router-0")
VOCAB = 101
EOS = 100


def make_config(**overrides: Any) -> ClusterConfig:
    lines = ["schema_version: 1", "name: test", "model: {path: standin}", "kv: {block_size: 4, device_blocks: 64}"]
    return parse_config("\n".join(lines), file="test.yaml", overrides=[f"{k}={v}" for k, v in overrides.items()])


class Pair:
    """`pair.submit(...)` then `pair.run()`; outcomes are in `outputs`, `refusals` and `messages`."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        prefill_blocks: int | None = None,
        windows: Windows = FULL_ATTENTION,
        **overrides: Any,
    ) -> None:
        self.clock = ManualClock()
        self.fabric = MemoryFabric(self.clock)
        self.config = make_config(**overrides)
        self.model = ServedModel(
            name="standin",
            vocab_size=VOCAB,
            eos_token_ids=frozenset({EOS}),
            max_model_len=200,
            layout=standin_layout(self.config.kv.block_size, windows),
            weight_identity=WeightIdentity("standin"),
        )
        self.runners: dict[str, StandinRunner] = {}
        self.pullers: dict[str, Puller] = {}
        prefill = self._build("prefill", prefill_blocks or num_blocks)
        decode = self._build("decode", num_blocks)
        assert isinstance(prefill, PrefillWorker) and isinstance(decode, DecodeWorker)
        self.prefill, self.decode = prefill, decode
        self.requests: dict[RequestId, Request] = {}
        self.outputs: dict[RequestId, dict[int, list[int]]] = {}
        self.finished: dict[RequestId, dict[int, str]] = {}
        self.refusals: list[Refused] = []
        self.messages: list[FromWorker] = []
        self.drop: Callable[[FromWorker], bool] = lambda _message: False
        self.connect()

    def _build(self, role: Role, num_blocks: int) -> Any:
        name = WorkerId(f"{role}-0")
        block_size = self.config.kv.block_size
        runner = StandinRunner(
            num_blocks=num_blocks, block_size=block_size, vocab_size=VOCAB, windows=self.model.layout.windows
        )
        block_bytes = self.model.layout.block_bytes()
        region = Region(
            address=0, block_bytes=block_bytes, num_blocks=num_blocks, device="cpu", view=runner.byte_view()
        )
        transport = MemoryTransport(self.fabric, Peer(worker=name, epoch=Epoch(1)), region)
        digester = BlockDigester(runner.byte_view(), block_bytes)
        puller = Puller(transport, digester, clock=self.clock)
        self.runners[role], self.pullers[role] = runner, puller
        handshake = build_handshake(
            self.config,
            self.model,
            num_blocks=num_blocks,
            transport=transport.name,
            transport_metadata=transport.metadata(),
        )
        identity = WorkerIdentity(worker_id=name, role=role, epoch=Epoch(1))
        return build_worker(
            identity, self.config, self.model, runner=runner, handshake=handshake, digester=digester, transfer=puller
        )

    def connect(self) -> None:
        connect = Connect(worker=self.prefill.worker_id, epoch=self.prefill.epoch, handshake=self.prefill.handshake())
        self.decode.handle(ROUTER, connect, self.clock.now())
        self.step()

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        *,
        attempt: int = 0,
        local: bool = False,
        num_children: int = 1,
        **sampling: Any,
    ) -> None:
        params = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, **sampling})
        request = Request(
            request_id=RequestId(request_id), token_ids=tuple(prompt), sampling=params, num_children=num_children
        )
        self.requests[request.request_id] = request
        worker = None if local else self.prefill.worker_id
        message = Submit(
            request_id=request.request_id, attempt=Attempt(attempt), request=request, prefill_worker=worker
        )
        self.decode.handle(ROUTER, message, self.clock.now())

    def step(self) -> bool:
        """Both workers once, and every message relayed; the invariants hold after it."""
        now = self.clock.now()
        busy = False
        for worker in (self.decode, self.prefill):
            busy |= worker.advance(now)
            for _router, message in worker.take_outbound():
                busy = True
                self.messages.append(message)
                if not self.drop(message):
                    self._relay(message, now)
            worker.check()
        return busy

    def _relay(self, message: FromWorker, now: float) -> None:
        if isinstance(message, Credit) and message.num_held_blocks < message.num_demanded_blocks:
            prefill = Prefill(
                request_id=message.request_id,
                attempt=message.attempt,
                request=self.requests[message.request_id],
                decode_worker=self.decode.worker_id,
                num_held_blocks=message.num_held_blocks,
            )
            self.prefill.handle(ROUTER, prefill, now)
        elif isinstance(message, Offer):
            self.decode.handle(ROUTER, message, now)
        elif isinstance(message, PullDone):
            release = Release(request_id=message.request_id, attempt=message.attempt, lease_id=message.lease_id)
            self.prefill.handle(ROUTER, release, now)
        elif isinstance(message, Renew):
            self.prefill.handle(ROUTER, message, now)
        elif isinstance(message, Refused):
            self.refusals.append(message)
            cancel = Cancel(request_id=message.request_id, attempt=message.attempt)
            self.prefill.handle(ROUTER, cancel, now)
            self.decode.handle(ROUTER, cancel, now)
        elif isinstance(message, Tokens):
            self._collect(message)

    def _collect(self, message: Tokens) -> None:
        children = self.outputs.setdefault(message.request_id, {})
        for update in message.updates:
            tokens = children.setdefault(update.child, [])
            assert update.first_index == len(tokens), "RQ-1: gap or duplicate"
            tokens += update.token_ids
            if update.finish_reason is not None:
                self.finished.setdefault(message.request_id, {})[update.child] = update.finish_reason

    def run(self, *, steps_max: int = 500, tick_s: float = 0.01) -> None:
        """Until nothing happens any more."""
        for _ in range(steps_max):
            if not self.step() and not self.pullers["decode"].num_reads:
                return
            self.clock.advance(tick_s)
        pytest.fail(f"not idle after {steps_max} steps")

    def expected(self, request_id: str, child: int = 0) -> list[int]:
        request = self.requests[RequestId(request_id)]
        return expected_tokens(
            request.token_ids,
            request.sampling,
            vocab_size=VOCAB,
            child=child,
            eos_token_ids=frozenset({EOS}),
            windows=self.model.layout.windows,
        )

    def count(self, role: str, counter: str) -> float:
        """A counter of a worker; over all values of its label, if it has one."""
        worker = self.decode if role == "decode" else self.prefill
        found = [v for key, v in worker.status().counters.items() if key.partition("{")[0] == counter]
        assert found, f"{worker.worker_id} counts no {counter}"
        return sum(found)

    def assert_nothing_held(self) -> None:
        for worker in (self.decode, self.prefill):
            worker.check()
            status = worker.status()
            held = {name: count for name, count in worker.books().items() if count}
            assert not held, f"{worker.worker_id} holds {held}"
            assert status.kv.blocks_used == 0
            assert (status.num_leases, status.num_pins, status.num_running, status.num_waiting) == (0, 0, 0, 0)


@pytest.fixture
def make_pair() -> Callable[..., Pair]:
    return Pair
