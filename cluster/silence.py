"""How long each running member has not been heard: what tells a stopped or wedged process from a live one.

A router is heard by the controller itself; a worker, by any router that the controller hears. Only such evidence
counts: while no router is heard, or after the controller itself did not look for a while (it was stopped), every clock
starts again. Pure: knows nothing about links or processes.
"""

from collections.abc import Iterable, Mapping

from cluster.reconcile import MemberId
from core.ids import Epoch
from core.messages import RouterStatus

LOOK_GAP_S = 3.0
"""A controller that did not look for so long cannot say who was silent meanwhile."""

Life = tuple[MemberId, Epoch]


class SilenceWatch:
    """Since when each life of a member has been silent. Asked once per round of the control loop."""

    def __init__(self) -> None:
        self._heard_s: dict[Life, float] = {}
        self._looked_s: float | None = None

    def look(
        self, routers: Iterable[Life], workers: Iterable[Life], heard: Mapping[Life, RouterStatus], now: float
    ) -> dict[Life, float]:
        """Seconds of silence of each listening life. `heard`: the last heartbeats of the routers that are heard."""
        is_blind = self._looked_s is None or now - self._looked_s > LOOK_GAP_S
        self._looked_s = now
        lives = {(status.worker, status.epoch) for router in heard.values() for status in router.workers}
        silent: dict[Life, float] = {}
        for life in routers:
            silent[life] = self._since(life, is_blind or life in heard, now)
        for life in workers:
            silent[life] = self._since(life, is_blind or not heard or life in lives, now)
        self._heard_s = {life: since_s for life, since_s in self._heard_s.items() if life in silent}
        return silent

    def _since(self, life: Life, is_heard: bool, now: float) -> float:
        if is_heard:
            self._heard_s[life] = now
        return now - self._heard_s.setdefault(life, now)
