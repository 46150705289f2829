"""The stage under a real controller: it starts router and workers through the in-process runtime and watches them.

Knows nothing about faults.
"""

import asyncio
from pathlib import Path

from cluster.controller import Controller, RecordFile
from cluster.local_runtime import LocalRuntime
from cluster.reconcile import Target
from kvtransfer.tiers.files import OsFiles
from router.app import build_app
from tests.e2e.faults.freezing import FreezableClock, FreezableDialer, Freezer
from tests.e2e.faults.gated import GatedSelector
from tests.e2e.faults.stage import ROUTER, FaultStage
from tests.e2e.stage import LetterCodec


class ControlledStage(FaultStage):
    """See the module."""

    def __init__(self, directory: Path, *, num_pairs: int) -> None:
        super().__init__(num_pairs=num_pairs)
        self.record = RecordFile(OsFiles(directory), directory / "controller.json", "faults")
        self.target = Target(config=self.config, model_path=directory)
        self.runtime = LocalRuntime(self.cluster, clock=self.clock, network=self.network, text=LetterCodec())
        self.controller_freezer = Freezer()

    def start_controller(self) -> None:
        """A controller that knows no more than the record."""
        self.controller_freezer = Freezer()
        self.controller = Controller(
            target=self.target,
            runtime=self.runtime,
            clock=FreezableClock(self.clock, self.controller_freezer),
            dialer=FreezableDialer(self.network, self.controller_freezer),
            record=self.record,
        )
        self.loop = asyncio.ensure_future(self.controller.run())

    async def kill_controller(self) -> None:
        """Its tasks end without a word, its links break."""
        tasks = [self.loop, *(task for _contact, task in self.controller._contacts.values())]
        for link in self.network.links:
            if link.peer == ROUTER:
                link.lose()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def is_controlled(self) -> bool:
        """The controller finds everything as it should be."""
        return self.controller.status()["state"] == "ready" and self.is_whole()

    async def open(self) -> None:
        self.start_controller()
        await self.until(lambda: ROUTER in self.runtime.routers)
        self.service = self.runtime.routers[ROUTER]
        self.service._selector = GatedSelector(self.gates)
        self.app = build_app(self.service)
        await self.until(self.is_controlled)

    async def close(self) -> None:
        self.loop.cancel()
        await asyncio.gather(self.loop, return_exceptions=True)
        await self.controller.shutdown()
        await self.runtime.close()
