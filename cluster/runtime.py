"""The seam between deciding what should run and running it: what a member starts from, and what is observed of it.

Real: Ray actors (`cluster.ray_runtime`). Stand-in: one process (`cluster.local_runtime`). Knows nothing about why
something starts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from core.config import ClusterConfig
from core.ids import Epoch, Role, RouterId, WorkerId

MemberRole = Role | Literal["router"]
"""What a process of the cluster is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One worker to start."""

    id: WorkerId
    role: Role
    epoch: Epoch
    config: ClusterConfig
    model_path: Path
    """Directory of the model in Hugging Face form, already resolved."""
    cpus: int
    """CPUs, and threads of the model."""
    gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """One router to start."""

    id: RouterId
    role: Literal["router"] = "router"
    epoch: Epoch
    config: ClusterConfig
    model_path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One process that the runtime knows of: still there, or ended and not reported before."""

    id: WorkerId | RouterId
    role: MemberRole
    epoch: Epoch
    alive: bool
    endpoint: str | None = None
    """host:port of its link server; None while it starts."""
    pid: int | None = None
    url: str | None = None
    """Of a router: base URL of its HTTP server."""
    problem: str | None = None
    """Why it is not alive, in words."""
    silent_s: float = 0.0
    """Seconds that nobody has heard it, although it runs. Known to the controller, not to the runtime."""


class Runtime(Protocol):
    """Starts and stops processes. Every call ends within seconds; starting goes on behind it and shows in `observe`.

    All calls are idempotent (CL-1): starting what runs, or stopping what does not, changes nothing.
    """

    async def start_worker(self, spec: WorkerSpec) -> None:
        """Begin to start a worker. Raises ClusterError when it cannot even begin."""
        ...

    async def start_router(self, spec: RouterSpec) -> None:
        """Begin to start a router. Raises ClusterError when it cannot even begin."""
        ...

    async def observe(self) -> list[Observed]:
        """Everything that runs. What ended is reported once, as not alive, or is simply absent."""
        ...

    async def stop(self, member_id: WorkerId | RouterId, epoch: Epoch) -> None:
        """End the process of exactly this epoch."""
        ...
