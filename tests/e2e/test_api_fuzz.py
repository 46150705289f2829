"""Every operation of the API under generated requests, good and bad, against its own OpenAPI document.

Goal: no 500, no status, header, media type or body that the document does not have, nothing held when it is over.
Method: schemathesis makes the requests, derandomised and from a printed seed; a router with the real HTTP server and a
cluster of stand-in runners answers them over a loopback socket.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from cluster.assembly import ServedModel, WorkerIdentity
from cluster.local import LocalCluster
from cluster.router_process import listen
from core.clock import SystemClock
from core.config import ClusterConfig, parse_config
from core.ids import Epoch, RouterId, WeightIdentity
from core.link import MemoryNetwork
from engine.standin import StandinRunner, standin_layout
from kvtransfer.transport.memory import MemoryFabric
from router.app import build_app
from router.connections import build_server
from router.protocol.base import AnswerModel
from router.protocol.operations import OPERATIONS
from router.service import RouterService
from router.text import TextProcessor
from tests.router.scripted import write_model

pytestmark = pytest.mark.process

VOCAB = 300
MAX_MODEL_LEN = 96
BLOCKS = 256
SEED = 20261201
CONFIG = """
schema_version: 1
name: fuzz
model: {path: standin}
kv: {block_size: 4, device_blocks: 256}
router: {port: 0}
transfer: {transport: memory}
"""
MODEL = ServedModel(
    name="tiny",
    vocab_size=VOCAB,
    eos_token_ids=frozenset(),
    max_model_len=MAX_MODEL_LEN,
    layout=standin_layout(4),
    weight_identity=WeightIdentity("standin"),
)
CHECKS: list[Any] = [
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
]
CHUNKS = {f"{operation.method} {operation.path}": operation.chunk for operation in OPERATIONS if operation.chunk}
TIMEOUT_S = 30.0


class ServedCluster:
    """A 1P1D cluster and its router on a loop of their own."""

    def __init__(self, directory: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="served", daemon=True)
        self._thread.start()
        self.url = self.call(self._start(directory))

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    def close(self) -> None:
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()

    async def _start(self, directory: Path) -> str:
        config = parse_config(CONFIG, file="fuzz.yaml")
        clock = SystemClock()
        network = MemoryNetwork(clock)
        self.cluster = _cluster(config, clock, network)
        self.service = RouterService(
            router_id=RouterId("router-0"),
            epoch=Epoch(1),
            clock=clock,
            dialer=network,
            text=TextProcessor(write_model(directory)),
            model_name="tiny",
            max_running_sequences=8,
            check_s=0.0,
        )
        await self.service.start()
        self.service.update_workers(self.cluster.start())
        listener = listen(config.name, config.router)
        self._server = build_server(build_app(self.service), max_connections=64)
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        while not (self._server.started and self.service.is_ready()):
            await asyncio.sleep(0.01)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def _stop(self) -> None:
        await self.service.close()
        self._server.should_exit = True
        await self._serving
        await self.cluster.close()

    async def held(self) -> dict[str, int]:
        """What anybody holds for requests once the last ones had a moment to end."""
        held: Counter[str] = Counter()
        self.service.check()
        for _ in range(200):
            held = Counter(self.service.books())
            for worker in self.cluster.workers.values():
                status = worker.status()
                held.update({"used": status.kv.blocks_used, "leases": status.num_leases, "pins": status.num_pins})
            if not any(held.values()):
                break
            await asyncio.sleep(0.05)
        return {name: count for name, count in held.items() if count}


def _cluster(config: ClusterConfig, clock: SystemClock, network: MemoryNetwork) -> LocalCluster:
    def make_runner(_identity: WorkerIdentity) -> tuple[StandinRunner, memoryview]:
        runner = StandinRunner(num_blocks=BLOCKS, block_size=4, vocab_size=VOCAB)
        return runner, runner.byte_view()

    return LocalCluster(
        config, MODEL, make_runner, clock=clock, network=network, fabric=MemoryFabric(clock), is_checked=True
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    cluster = ServedCluster(tmp_path_factory.mktemp("model"))
    yield cluster
    cluster.close()


def _operations(url: str) -> dict[str, Any]:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    results = list(schema.get_all_operations())
    assert all(isinstance(result, Ok) for result in results), results
    return {result.ok().label: result.ok() for result in results if isinstance(result, Ok)}


def _requests(operation: Any) -> st.SearchStrategy[Any]:
    """Good and bad ones; an operation without parameters has good ones only."""
    return st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in GenerationMode))


def _fuzz(operation: Any, max_examples: int, see: Callable[[Any, Any], None]) -> None:
    @seed(SEED)
    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=_requests(operation))
    def run(case: Any) -> None:
        response = case.call(timeout=TIMEOUT_S)
        see(case, response)
        case.validate_response(response, checks=CHECKS)

    run()


def _check_stream(response: Any, chunk: type[AnswerModel]) -> None:
    """Every event is a chunk as documented: a field too many or too few is an error of the model. After 20 events the
    client has read enough and hangs up.
    """
    *events, done, rest = response.text.split("\n\n")
    if not response.stream_cut_short:
        assert (done, rest) == ("data: [DONE]", "") and events
    for event in events:
        chunk.model_validate_json(event.removeprefix("data: "))


def _run(served: ServedCluster, num_cases: int) -> Counter[tuple[str, int]]:
    """`num_cases` at least, most of them for operations that take a body."""
    operations = _operations(served.url)
    with_body = [label for label, operation in operations.items() if label.startswith("POST")]
    seen: Counter[tuple[str, int]] = Counter()
    for label, operation in operations.items():

        def see(_case: Any, response: Any, label: str = label) -> None:
            seen[(label, response.status_code)] += 1
            assert response.status_code < 500, f"{label}: {response.status_code} {response.text}"
            if response.headers["content-type"][0].startswith("text/event-stream"):
                _check_stream(response, CHUNKS[label])

        share = num_cases // len(with_body) if label in with_body else 5
        _fuzz(operation, share, see)
    print(f"seed {SEED}: {sum(seen.values())} cases: {dict(sorted(seen.items()))}")
    return seen


def test_api_keeps_to_its_document_under_generated_requests(served: ServedCluster) -> None:
    seen = _run(served, 300)
    assert sum(seen.values()) >= 300
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/abort_requests"):
        assert seen[(f"POST {path}", 200)] and seen[(f"POST {path}", 400)], path
    assert served.call(served.held()) == {}


@pytest.mark.slow
def test_api_keeps_to_its_document_under_2000_generated_requests(served: ServedCluster) -> None:
    assert sum(_run(served, 2000).values()) >= 2000
    assert served.call(served.held()) == {}
