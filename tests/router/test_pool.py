"""Links and pairs over scripted workers: who is connected to whom, and what a change of the set does."""

import asyncio
from pathlib import Path

from msgspec.structs import replace

from core.errors import LinkClosedError
from core.ids import Epoch
from core.link import Link
from core.messages import Connect, Disconnect, Hello, PeerReady, PeerRefused, Reject
from router.pool import CONNECT_RETRY_S
from tests.router.scripted import open_stage


def test_every_decode_is_connected_to_every_prefill(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory, num_prefill=2, num_decode=3) as stage:
            assert stage.service.num_pairs() == 6
            for index in range(3):
                names = [m.worker for m in stage.workers[f"decode-{index}"].sent(Connect) if isinstance(m, Connect)]
                assert sorted(names) == ["prefill-0", "prefill-1"]

    asyncio.run(main())


def test_pair_is_not_used_and_asked_again_when_it_is_refused(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory, num_prefill=0) as stage:
            decode = stage.workers["decode-0"]
            answer, is_refused = decode._answer, True

            def refuse(message: object) -> object:
                if is_refused and isinstance(message, Connect):
                    return [PeerRefused(worker=message.worker, epoch=message.epoch, reason="layouts differ")]
                return answer(message)  # type: ignore[arg-type]

            decode._answer = refuse  # type: ignore[method-assign, assignment]
            stage.add("prefill")
            stage.publish()
            await stage.run_for(1.0)
            assert not stage.service.is_ready() and stage.service.pool.refusals() == ["layouts differ"]
            is_refused = False
            await stage.run_for(CONNECT_RETRY_S + 1)
            assert stage.service.is_ready() and stage.service.pool.refusals() == []

    asyncio.run(main())


def test_answer_of_another_epoch_connects_nothing(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory, num_prefill=0) as stage:
            decode = stage.workers["decode-0"]
            decode._answer = lambda message: []  # type: ignore[method-assign]
            prefill = stage.add("prefill", epoch=3)
            stage.publish()
            await stage.run_for(1.0)
            assert decode.link is not None
            decode.link.send([PeerReady(worker=prefill.worker, epoch=Epoch(2))])
            await stage.run_for(0.1)
            assert not stage.service.is_ready()

    asyncio.run(main())


def test_pair_must_be_confirmed_again_when_a_link_was_lost(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory) as stage:
            decode = stage.workers["decode-0"]
            decode._answer = lambda message: []  # type: ignore[method-assign]
            next(link for link in stage.network.links if link.peer == "prefill-0").lose()
            await stage.run_for(1.0)
            assert len(stage.network.links) == 3 and len(decode.sent(Connect)) == 2
            assert not stage.service.is_ready()

    asyncio.run(main())


def test_decode_is_told_when_a_prefill_worker_leaves_the_set(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory, num_prefill=2) as stage:
            del stage.workers["prefill-1"]
            stage.publish()
            await stage.run_for(0.1)
            gone = stage.workers["decode-0"].sent(Disconnect)
            assert [m.worker for m in gone if isinstance(m, Disconnect)] == ["prefill-1"]
            assert stage.service.num_pairs() == 1

    asyncio.run(main())


def test_set_is_followed_without_new_links_when_nothing_changed(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory) as stage:
            stage.publish()
            await stage.run_for(0.5)
            assert len(stage.network.links) == 2 and stage.service.is_ready()

    asyncio.run(main())


def test_worker_is_dialled_again_with_pauses_when_it_is_not_who_was_expected(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory, num_prefill=0, num_decode=0, mode="colocated") as stage:
            decode = stage.add("decode", epoch=2)
            address = replace(decode.address(), epoch=Epoch(1))
            decode.address = lambda: address  # type: ignore[method-assign]
            stage.publish()
            await stage.run_for(2.0)
            assert not stage.service.is_ready() and 3 <= len(stage.network.links) <= 6

    asyncio.run(main())


def test_worker_is_dialled_again_when_it_rejects(model_directory: Path) -> None:
    async def main() -> None:
        async with open_stage(model_directory, num_prefill=0, num_decode=0, mode="colocated") as stage:
            decode, hellos = stage.add("decode"), 0
            accept = decode.accept

            async def reject_once(link: Link) -> None:
                nonlocal hellos
                hellos += 1
                if hellos > 1:
                    await accept(link)
                    return
                assert isinstance((await link.receive())[0], Hello)
                link.send([Reject(reason="not yet")])
                try:
                    await link.receive()
                except LinkClosedError:
                    return

            stage.network.listen("decode-0", reject_once)
            stage.publish()
            await stage.run_for(1.0)
            assert stage.service.is_ready() and hellos == 2

    asyncio.run(main())
