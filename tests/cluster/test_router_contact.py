"""The controller's link to one router, over the in-memory network: what is said, also after the link was lost."""

import asyncio

from cluster.router_contact import REDIAL_S, RouterContact
from cluster.runtime import Observed
from core.clock import ManualClock
from core.ids import Epoch, RouterId, WorkerId
from core.link import Link, MemoryNetwork
from core.messages import HEARTBEAT_TIMEOUT_S, AnyMessage, Hello, RouterStatus, WorkerAddress, WorkerSet

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
