"""The bench against our own router behind a real socket, with workers that follow a script: both endpoints, errors."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from cluster.bench.client import Endpoint, RequestOptions
from cluster.bench.serve import ServeOptions, run_bench_serve
from cluster.bench.summary import Numbers
from cluster.bench.workload import Workload
from core.clock import SystemClock
from router.app import build_app
from tests.router.scripted import STEP_S, Stage, open_stage, write_model

pytestmark = pytest.mark.process

START_TIMEOUT_S = 30.0
TICK_S = 0.002
NUM_TOKENS = 4


@contextmanager
def routing(directory: Path, **limits: Any) -> Iterator[tuple[Stage, str]]:
    """A router that listens, in a thread whose scripted time runs faster than real time."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    ready: asyncio.Future[tuple[Stage, str]] = loop.create_future()
    ending = asyncio.Event()
    work = asyncio.run_coroutine_threadsafe(_route(directory, limits, ready, ending), loop)
    try:
        yield asyncio.run_coroutine_threadsafe(_wait(ready), loop).result(START_TIMEOUT_S)
    finally:
        loop.call_soon_threadsafe(ending.set)
        work.result(START_TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(START_TIMEOUT_S)
        loop.close()


async def _wait(ready: "asyncio.Future[tuple[Stage, str]]") -> tuple[Stage, str]:
    return await asyncio.wait_for(ready, START_TIMEOUT_S)


async def _route(
    directory: Path, limits: dict[str, Any], ready: "asyncio.Future[tuple[Stage, str]]", ending: asyncio.Event
) -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    async with open_stage(directory, **limits) as stage:
        app = build_app(stage.service)
        http = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
        serving = asyncio.ensure_future(http.serve(sockets=[listener]))
        ready.set_result((stage, "http://{}:{}".format(*listener.getsockname())))
        while not ending.is_set():
            await asyncio.sleep(TICK_S)
            stage.clock.advance(STEP_S)
        http.should_exit = True
        await serving
        assert stage.service.admission.num_in_flight == 0


def measure(url: str, endpoint: Endpoint, **more: Any) -> Numbers:
    is_chat = endpoint == "/v1/chat/completions"
    workload = Workload(
        num_prompts=6, input_len=20, output_len=NUM_TOKENS, token_id_min=10, token_id_max=200,
        form="text" if is_chat else "ids",
    )  # fmt: skip
    options = ServeOptions(
        base_urls=(url,), requests=RequestOptions(model="", endpoint=endpoint, **more), workload=workload,
        max_concurrency=3, num_warmups=1,
    )  # fmt: skip
    return run_bench_serve(options, SystemClock(), lambda line: None)


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("has_token_ids", [False, True])
def test_every_answer_of_our_router_is_complete_and_counted(
    tmp_path: Path, endpoint: Endpoint, has_token_ids: bool
) -> None:
    with routing(write_model(tmp_path)) as (_, url):
        result = measure(url, endpoint, has_token_ids=has_token_ids)
    assert (result["completed"], result["failed"], result["model_id"]) == (6, 0, "tiny"), result["failure_details"]
    assert result["total_output_tokens"] == 6 * NUM_TOKENS
    if endpoint == "/v1/completions":
        assert result["total_input_tokens"] == 6 * 20
    assert result["max_concurrent_requests"] >= 3


def test_refusals_of_our_router_are_failures(tmp_path: Path) -> None:
    with routing(write_model(tmp_path)) as (stage, url):
        stage.kill("decode-0")
        options = ServeOptions(
            base_urls=(url,), requests=RequestOptions(model="tiny"),
            workload=Workload(num_prompts=3, input_len=20, output_len=2, token_id_min=10, token_id_max=200),
        )  # fmt: skip
        result = run_bench_serve(options, SystemClock(), lambda line: None)
    assert (result["completed"], result["failed"]) == (0, 3)
    assert result["failures_by_reason"] == {"http_status": 3}
    assert result["failure_details"][0].startswith("http_status: 503: ")
