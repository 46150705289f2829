"""The controller's link to one router, over the in-memory network: what is said, also after the link was lost."""

import asyncio
from pathlib import Path

import pytest

from cluster import router_host
from cluster.router_contact import REDIAL_S, RouterContact
from cluster.router_host import ControllerDoorway, build_service
from cluster.runtime import Observed, RouterSpec
from core.clock import ManualClock
from core.config import parse_config
from core.errors import LinkClosedError
from core.ids import Epoch, RouterId, WorkerId
from core.link import Link, MemoryNetwork
from core.messages import HEARTBEAT_TIMEOUT_S, AnyMessage, Hello, RouterStatus, WorkerAddress, WorkerSet
from tests.e2e.stage import LetterCodec

CONFIG = parse_config("schema_version: 1\nname: t\nmodel: {path: standin}\n", file="t.yaml")
SPEC = RouterSpec(id=RouterId("router-0"), epoch=Epoch(1), config=CONFIG, model_path=Path("standin"))
ROUTER = Observed(id=RouterId("router-0"), role="router", epoch=Epoch(1), alive=True, endpoint="router")
STATUS = RouterStatus(
    router=RouterId("router-0"),
    epoch=Epoch(1),
    pid=1,
    url="u",
    num_in_flight=0,
    num_in_flight_max=1,
    num_workers_ready={},
)


def workers(epoch: int) -> WorkerSet:
    address = WorkerAddress(worker=WorkerId("decode-0"), role="decode", epoch=Epoch(epoch), endpoint="e", pid=1)
    return WorkerSet(workers=(address,))


class Router:
    """Collects what it hears and answers once."""

    def __init__(self) -> None:
        self.heard: list[AnyMessage] = []

    async def accept(self, link: Link) -> None:
        link.send([STATUS])
        while True:
            self.heard += await link.receive()


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def test_newest_workers_are_told_again_when_the_link_was_lost() -> None:
    async def body() -> None:
        clock = ManualClock()
        network, router = MemoryNetwork(clock), Router()
        contact = RouterContact(router=ROUTER, epoch=Epoch(7), dialer=network, clock=clock)
        task = asyncio.ensure_future(contact.run())
        await settle()  # nobody listens yet
        contact.tell(workers(1))
        network.listen("router", router.accept)
        clock.advance(REDIAL_S)
        await settle()
        hello = router.heard[0]
        assert isinstance(hello, Hello) and (hello.sender, hello.epoch) == ("controller", 7)
        assert router.heard[1:] == [workers(1)]
        contact.tell(workers(1))
        contact.tell(workers(2))
        await settle()
        assert router.heard[2:] == [workers(2)]
        network.links[-1].lose()
        await settle()
        contact.tell(workers(3))
        clock.advance(REDIAL_S)
        await settle()
        assert router.heard[3:] == [hello, workers(3)]
        task.cancel()
        await network.close()

    asyncio.run(body())


def test_heartbeat_is_not_believed_when_it_is_old() -> None:
    async def body() -> None:
        clock = ManualClock()
        network, router = MemoryNetwork(clock), Router()
        network.listen("router", router.accept)
        contact = RouterContact(router=ROUTER, epoch=Epoch(1), dialer=network, clock=clock)
        assert not contact.is_heard()
        task = asyncio.ensure_future(contact.run())
        await settle()
        assert contact.is_heard() and contact.status == STATUS
        clock.advance(HEARTBEAT_TIMEOUT_S)
        assert not contact.is_heard() and contact.silent_s() == HEARTBEAT_TIMEOUT_S
        task.cancel()
        await network.close()

    asyncio.run(body())


def test_router_closes_a_link_on_which_nobody_greets(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        clock = ManualClock()
        network = MemoryNetwork(clock)
        service = build_service(SPEC, clock=clock, dialer=network, text=LetterCodec())
        network.listen("router", ControllerDoorway(service, clock).accept)
        link = await network.dial("router", 1.0)
        with pytest.raises(LinkClosedError, match="no Hello came"):
            await link.receive()
        await network.close()

    monkeypatch.setattr(router_host, "HELLO_TIMEOUT_S", 0.0)
    asyncio.run(body())
