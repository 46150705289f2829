"""What goes wrong in a simulated cluster, carried out: each fault of a schedule strikes, lasts, and is repaired.

Knows nothing about what it leads to.
"""

from collections.abc import Callable
from dataclasses import replace

from cluster.sim.schedule import Fault
from cluster.sim.world import World
from core.ids import WeightIdentity, WorkerId
from kvtransfer.transport.memory import MemoryFaults

DISK_BYTES = 2**30
COMES_BACK_S = 3.0
"""A worker that was killed has started again by then, if its controller runs."""


class Trouble:
    """All faults of one run. Faults of reads and disks are one state that the last one sets."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.on_strike: Callable[[Fault], None] = lambda _fault: None
        """Called right before a fault strikes."""

    async def strike(self, fault: Fault) -> None:
        """One fault, from its beginning to its end."""
        world = self._world
        self.on_strike(fault)
        world.journal.note(f"FAULT {fault.kind} {fault.target} {fault.other} {fault.seconds:g} s")
        match fault.kind:
            case "kill":
                world.kill(fault.target)
            case "stop":
                process = world.process(fault.target)
                world.stop(fault.target)
                await world.clock.sleep(fault.seconds)
                if process is not None and process is world.process(fault.target):
                    world.go_on(fault.target)
            case "stall":
                if (process := world.process(fault.target)) is not None:
                    process.get_stuck(fault.seconds)
            case "cut":
                for link in world.network.links_of(fault.target, fault.other):
                    link.lose()
            case "partition":
                world.network.partition(fault.target, fault.other)
                await world.clock.sleep(fault.seconds)
                world.network.heal(fault.target, fault.other)
            case "other-weights":
                await self._other_weights(fault)
            case "disk-full":
                world.disk.faults.capacity_bytes = 0
                await world.clock.sleep(fault.seconds)
                world.disk.faults.capacity_bytes = DISK_BYTES
            case "spoil" | "corrupt" | "delay" | "write-late":
                await self._spoil(fault)

    async def _spoil(self, fault: Fault) -> None:
        faults = self._world.fabric.faults
        match fault.kind:
            case "spoil":
                faults.loss_rate, faults.stale_rate = 0.5, 0.3
            case "corrupt":
                faults.corruption_rate = 1.0
            case "write-late":
                faults.delay_s, faults.late_write_rate = (0.0, 3.0), 1.0
            case _:
                faults.delay_s = (0.0, 2.0)
        await self._world.clock.sleep(fault.seconds)
        self._world.fabric.faults = MemoryFaults()

    async def _other_weights(self, fault: Fault) -> None:
        """The worker's next life has the weights of another model; then it is killed again."""
        world, worker = self._world, WorkerId(fault.target)
        world.cluster.models[worker] = replace(world.cluster.model, weight_identity=WeightIdentity("others"))
        world.kill(worker)
        await world.clock.sleep(fault.seconds + COMES_BACK_S)
        world.cluster.models.pop(worker, None)
        world.kill(worker)
