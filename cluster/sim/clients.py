"""The clients of a simulated cluster: each asks one router one thing, keeps what it gets, and may leave. A request is
served within its router's process, and its client's connection breaks when that dies.

Knows nothing about faults, or about which answers are right.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from cluster.sim.process import SimProcess
from cluster.sim.schedule import Asked
from cluster.sim.world import World
from core.errors import PdclusterError
from core.request import SamplingParams
from router.generation import ChildDelta, PreparedRequest
from router.service import RouterService

Ending = Literal["open", "done", "error", "left", "no router", "connection lost"]


@dataclass(eq=False, kw_only=True)
class Reply:
    """What became of one request, as its client sees it."""

    name: str
    asked: Asked
    got: list[list[int]] = field(default_factory=list)
    """Token ids by choice."""
    ending: Ending = "open"
    error: BaseException | None = None
    router: str = ""
    asked_s: float = 0.0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, ending: Ending, error: BaseException | None = None) -> None:
        """The first end counts."""
        if self.ending == "open":
            self.ending, self.error = ending, error
            self.ended.set()


class Clients:
    """All clients of one world, and their answers in the order of asking."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.answers: list[Reply] = []
        self.on_leave: Callable[[Reply], None] = lambda _answer: None
        """Called right before a client hangs up."""
        self.on_cancel: Callable[[Reply], None] = lambda _answer: None
        """Called right before a request is cancelled by somebody else."""
        self.on_error: Callable[[Reply], None] = lambda _answer: None
        """Called when a request has ended with an error."""
        world.on_kill = self._connections_break

    async def ask(self, asked: Asked) -> Reply:
        """Ask, and wait for the end or leave."""
        world = self._world
        answer = Reply(name=f"client-{len(self.answers)}", asked=asked, got=[[] for _ in range(asked.num_children)])
        answer.asked_s = world.clock.now()
        self.answers.append(answer)
        routers = sorted(world.runtime.routers)
        if not routers:
            answer.end("no router")
            return answer
        answer.router = routers[asked.router % len(routers)]
        service, process = world.runtime.routers[answer.router], world.process(answer.router)
        assert process is not None, "a router that listens has a process"
        serving = process.spawn(self._serve(service, answer))
        serving.add_done_callback(world.watch)
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(answer.ended.wait())]
        if asked.cancelled_after_s is not None:
            waits.append(asyncio.ensure_future(self._cancel(process, service, answer)))
        await asyncio.wait({waits[0]}, timeout=asked.leaves_after_s)
        if answer.ending == "open":
            self.on_leave(answer)
            answer.end("left")
            serving.cancel()
        for wait in waits:
            wait.cancel()
        error = "" if answer.error is None else f" {type(answer.error).__name__}: {answer.error}"
        world.journal.note(f"{answer.name} at {answer.router}: {answer.ending}{error} {answer.got}")
        return answer

    async def _cancel(self, process: SimProcess, service: RouterService, answer: Reply) -> None:
        assert answer.asked.cancelled_after_s is not None
        await self._world.clock.sleep(answer.asked.cancelled_after_s)

        async def abort() -> None:
            self.on_cancel(answer)
            service.abort(answer.name)

        await process.spawn(abort())

    async def _serve(self, service: RouterService, answer: Reply) -> None:
        asked = answer.asked
        prepared = PreparedRequest(
            token_ids=asked.prompt, sampling=sampling_of(asked), num_children=asked.num_children, stop=()
        )
        events = service.generate_all([prepared], answer.name)
        try:
            async for _prompt, event in events:
                if isinstance(event, ChildDelta):
                    answer.got[event.child] += event.token_ids
            answer.end("done")
        except PdclusterError as error:
            answer.end("error", error)
            self.on_error(answer)
        finally:
            await events.aclose()

    def _connections_break(self, member: str) -> None:
        for answer in self.answers:
            if answer.router == member and answer.ending == "open":
                answer.end("connection lost")


def sampling_of(asked: Asked) -> SamplingParams:
    """How the request samples."""
    return SamplingParams(
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        seed=asked.seed,
        stop_token_ids=(asked.stop_token,),
    )
