"""A router in this process: HTTP in front, the controller's link behind, on loopback sockets."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster.router_process import RunningRouter, run_router
from cluster.runtime import RouterSpec
from core.config import ClusterConfig
from core.errors import ClusterError, LinkClosedError, ModelLoadError
from core.ids import Epoch, RouterId, WorkerId
from core.link import Link
from core.link_grpc import GrpcDialer, GrpcServer
from core.messages import AnyMessage, Drain, Hello, Reject, RouterStatus, WorkerAddress, WorkerSet
from tests.router.scripted import write_model

pytestmark = pytest.mark.process

TIMEOUT_S = 10.0


def spec(model_path: Path, *, port: int = 0, processes: int = 1) -> RouterSpec:
    router = {"port": port, "processes": processes}
    config = ClusterConfig.model_validate(
        {"schema_version": 1, "name": "t", "model": {"path": str(model_path)}, "router": router}
    )
    return RouterSpec(id=RouterId("router-0"), epoch=Epoch(5), config=config, model_path=model_path)


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    return write_model(tmp_path)


@pytest.fixture
def router(model_path: Path) -> Iterator[RunningRouter]:
    running = run_router(spec(model_path))
    yield running
    running.stop()


def hello(epoch: int, *, protocol: int = 1) -> Hello:
    return Hello(sender=RouterId("controller"), epoch=Epoch(epoch), protocol_min=protocol, protocol_max=protocol)


async def open_link(router: RunningRouter, *messages: AnyMessage) -> Link:
    link = await GrpcDialer().dial(router.endpoint, TIMEOUT_S)
    link.send(list(messages))
    return link


def get(router: RunningRouter, path: str) -> httpx.Response:
    return httpx.get(f"{router.url}{path}", timeout=TIMEOUT_S, trust_env=False)


def test_router_serves_http_and_heartbeats_when_started(router: RunningRouter) -> None:
    async def body() -> None:
        link = await open_link(router, hello(1), WorkerSet(workers=()))
        first, second = await link.receive(), await link.receive()
        for status in (*first, *second):
            assert isinstance(status, RouterStatus)
            assert (status.router, status.epoch, status.url, status.pid) == ("router-0", 5, router.url, router.pid)
        await link.close()

    asyncio.run(asyncio.wait_for(body(), TIMEOUT_S))
    assert get(router, "/health").status_code == 200
    assert get(router, "/ready").status_code == 503
    assert not router.wait(0)


def test_router_admits_nothing_more_when_told_to_drain(router: RunningRouter) -> None:
    async def body() -> None:
        link = await open_link(router, hello(1), WorkerSet(workers=()), Drain())
        await link.receive()
        await link.close()

    asyncio.run(asyncio.wait_for(body(), TIMEOUT_S))
    answer = httpx.post(f"{router.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, trust_env=False)
    assert answer.status_code == 503


def test_link_is_rejected_when_its_hello_is_no_good(router: RunningRouter) -> None:
    async def reject_of(*messages: AnyMessage) -> str:
        link = await open_link(router, *messages)
        (answer,) = await link.receive()
        assert isinstance(answer, Reject)
        with pytest.raises(LinkClosedError):
            await link.receive()
        return answer.reason

    async def body() -> None:
        assert "must be Hello" in await reject_of(Drain())
        assert "speaks protocol" in await reject_of(hello(1, protocol=99))
        newer = await open_link(router, hello(3))
        await newer.receive()
        assert "epoch 2 is old" in await reject_of(hello(2))
        newest = await open_link(router, hello(4))
        await newest.receive()
        with pytest.raises(LinkClosedError):
            while True:
                await newer.receive()
        await newest.close()

    asyncio.run(asyncio.wait_for(body(), TIMEOUT_S))


def test_start_fails_with_the_address_when_the_port_is_taken(router: RunningRouter, model_path: Path) -> None:
    port = int(router.url.rpartition(":")[2])
    with pytest.raises(ClusterError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
        run_router(spec(model_path, port=port))


def test_port_is_shared_when_routers_are_several(model_path: Path) -> None:
    first = run_router(spec(model_path))
    port = int(first.url.rpartition(":")[2])
    first.stop()
    routers = [run_router(spec(model_path, port=port, processes=2)) for _ in range(2)]
    assert {router.url for router in routers} == {f"http://127.0.0.1:{port}"}
    assert len({router.endpoint for router in routers}) == 2
    for router in routers:
        router.stop()


def test_start_fails_with_the_file_when_there_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        run_router(spec(tmp_path / "nothing"))


def test_nothing_listens_when_the_router_was_stopped(router: RunningRouter) -> None:
    router.stop()
    router.stop()
    assert router.wait(TIMEOUT_S) and router.failure is None
    with pytest.raises(httpx.ConnectError):
        get(router, "/health")


def test_unknown_worker_is_dialled_when_the_controller_names_it(router: RunningRouter) -> None:
    """The whole way of a WorkerSet: the router opens a link to the address that it was told."""

    async def body() -> None:
        dialled = asyncio.Event()

        async def accept(link: Link) -> None:
            for message in await link.receive():
                if isinstance(message, Hello) and message.sender == "router-0":
                    dialled.set()

        server = GrpcServer(accept)
        address = WorkerAddress(
            worker=WorkerId("decode-0"), role="decode", epoch=Epoch(1), endpoint=await server.start("127.0.0.1"), pid=1
        )
        link = await open_link(router, hello(1), WorkerSet(workers=(address,)))
        await dialled.wait()
        await link.close()
        await server.close()

    asyncio.run(asyncio.wait_for(body(), TIMEOUT_S))
