"""A cluster whose router is scraped while a script goes on, and what Prometheus would make of the scrapes."""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Sequence
from functools import cached_property
from itertools import product
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from cluster.assembly import WorkerIdentity
from cluster.local import LocalCluster
from core.clock import ManualClock
from core.config import parse_config
from core.errors import PdclusterError
from core.ids import Epoch, Role, RouterId, WorkerId
from core.link import MemoryNetwork
from core.metrics import CATALOGUE
from core.request import SamplingParams
from engine.standin import StandinRunner
from kvtransfer.transport.memory import MemoryFabric, MemoryFaults
from router.actions import StallLimits
from router.generation import ChildDelta, PreparedRequest, Summary
from router.service import RouterService
from tests.e2e.stage import LETTERS, VOCAB, LetterCodec

MAX_REQUESTS = 24
Series = tuple[str, frozenset[tuple[str, str]]]
"""Name of a sample and its labels."""


class Scrape:
    """One answer of /metrics."""

    def __init__(self, text: str) -> None:
        self.text = text
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        self.values = {series: value for series, _, value in lines}
        """Text of each value, by the text of its series."""

    @cached_property
    def samples(self) -> dict[Series, float]:
        """The same, as Prometheus' parser reads it."""
        families = text_string_to_metric_families(self.text)
        return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}

    def select(self, name: str, **labels: str) -> dict[Series, float]:
        """The series that a selector with these labels finds."""
        wanted = set(labels.items())
        return {series: v for series, v in self.samples.items() if series[0] == name and wanted <= series[1]}


def increase(first: Scrape, last: Scrape, name: str, **labels: str) -> dict[Series, float]:
    """What `increase()` sees between two scrapes, for each series that is in both."""
    before, after = first.select(name, **labels), last.select(name, **labels)
    return {series: after[series] - before[series] for series in before if series in after}


def quantile(share: float, buckets: dict[float, float]) -> float:
    """As `histogram_quantile`: by upper bound, the observations up to it; linear within a bucket; NaN without any."""
    total = buckets[math.inf]
    if not total:
        return math.nan
    lower = below = 0.0
    for bound, count in sorted(buckets.items()):
        if count >= share * total:
            inside = count - below
            return lower if math.isinf(bound) else lower + (bound - lower) * (share * total - below) / inside
        lower, below = bound, count
    raise AssertionError("the last bucket has no bound")


class ScrapedCluster:
    """Workers on stand-in runners behind one router, on a manual clock."""

    def __init__(self, *overrides: str, num_blocks: int = 64, stall_s: float = 300.0) -> None:
        lines = ["schema_version: 1", "name: test", "model: {path: standin}", "kv: {block_size: 4, device_blocks: 64}"]
        self.config = parse_config("\n".join(lines), file="test.yaml", overrides=overrides)
        self.clock = ManualClock()
        self.network = MemoryNetwork(self.clock)
        self.faults = MemoryFaults()
        self.fabric = MemoryFabric(self.clock, faults=self.faults)
        self.cluster = LocalCluster(
            self.config, LETTERS, self._runner, clock=self.clock, network=self.network, fabric=self.fabric
        )
        self.service = RouterService(
            router_id=RouterId("router-0"),
            epoch=Epoch(1),
            clock=self.clock,
            dialer=self.network,
            text=LetterCodec(),
            model_name="standin",
            max_requests=MAX_REQUESTS,
            max_running_sequences=MAX_REQUESTS,
            stall=StallLimits(prompt_s=stall_s, stream_s=stall_s),
        )
        self.scrapes: list[Scrape] = []
        self.num_blocks = num_blocks
        """Of workers that start from now on."""
        self._frozen: dict[WorkerId, Any] = {}

    def _runner(self, identity: WorkerIdentity) -> tuple[StandinRunner, memoryview]:
        runner = StandinRunner(num_blocks=self.num_blocks, block_size=4, vocab_size=VOCAB)
        return runner, runner.byte_view()

    async def open(self) -> None:
        await self.service.start()
        self.service.update_workers(self.cluster.start())
        await self.ready()

    async def ready(self) -> None:
        while not self.service.is_ready():
            await self.clock.sleep(0.01)

    async def close(self) -> None:
        await self.service.close()
        await self.cluster.close()

    def scrape(self) -> Scrape:
        self.scrapes.append(Scrape(self.service.render_metrics().decode()))
        return self.scrapes[-1]

    async def wait(self, seconds: float, every_s: float = 0.5) -> None:
        """Let time pass, and look meanwhile."""
        end_s = self.clock.now() + seconds
        while (left_s := end_s - self.clock.now()) > 0:
            await self.clock.sleep(min(every_s, left_s))
            self.scrape()

    # ---- what clients do ---------------------------------------------------------------------------------------------

    def events(
        self, prompt: Sequence[int], num_children: int, sampling: dict[str, Any]
    ) -> AsyncGenerator[ChildDelta | Summary, None]:
        params = SamplingParams(**{"max_tokens": 6, "temperature": 0.0, **sampling})
        prepared = PreparedRequest(token_ids=tuple(prompt), sampling=params, num_children=num_children, stop=())
        return self.service.generate(prepared)

    async def ask(self, prompt: Sequence[int], *, num_children: int = 1, **sampling: Any) -> Summary | PdclusterError:
        """The end of one request."""
        summaries: list[Summary] = []
        try:
            async for event in self.events(prompt, num_children, sampling):
                summaries += [event] if isinstance(event, Summary) else []
        except PdclusterError as error:
            return error
        return summaries[0]

    def begin(self, prompt: Sequence[int], **options: Any) -> "asyncio.Task[Summary | PdclusterError]":
        return asyncio.ensure_future(self.ask(prompt, **options))

    async def hang_up(self, asking: "asyncio.Task[Summary | PdclusterError]") -> None:
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking

    # ---- what happens to workers -------------------------------------------------------------------------------------

    def freeze(self, name: str) -> None:
        """The worker takes messages in and beats, but does nothing."""
        worker: Any = self.cluster.workers[WorkerId(name)]
        self._frozen[WorkerId(name)], worker.advance = worker.advance, lambda _now: False

    def thaw(self, name: str) -> None:
        worker: Any = self.cluster.workers[WorkerId(name)]
        worker.advance = self._frozen.pop(WorkerId(name))

    def cut(self, name: str) -> None:
        """The links to a worker break; it lives on."""
        for link in self.network.links:
            if link.peer == name:
                link.lose()

    async def kill(self, name: str) -> None:
        await self.cluster.kill_worker(WorkerId(name))
        await self.wait(1.0)

    async def start(self, name: str, role: Role, epoch: int) -> None:
        self.cluster.start_worker(WorkerIdentity(worker_id=WorkerId(name), role=role, epoch=Epoch(epoch)))
        self.service.update_workers(self.cluster.worker_set())
        await self.ready()

    # ---- what was seen -----------------------------------------------------------------------------------------------

    def _moved(self) -> set[str]:
        """Series that had two values; of a constant, those that came or went."""
        first: dict[str, str] = {}
        moved: set[str] = set()
        for scrape in self.scrapes:
            moved |= {series for series, value in scrape.values.items() if first.setdefault(series, value) != value}
        gone = self.scrapes[0].values.keys() - self.scrapes[-1].values.keys()
        constants = {f"{metric.name}{{" for metric in CATALOGUE if metric.unit == "constant"}
        return moved | {series for series in gone if series.startswith(tuple(constants))}

    def unmoved(self) -> list[str]:
        """Metrics of the catalogue none of whose series moved."""
        moved = {series.partition("{")[0] for series in self._moved()}
        return [m.name for m in CATALOGUE if f"{m.name}_count" not in moved and m.name not in moved]

    def unmoved_values(self) -> set[tuple[str, ...]]:
        """Metric and values of its closed labels, where no series that has them moved."""
        moved = self._moved()
        found = set()
        for metric in CATALOGUE:
            for values in product(*metric.values.values()) if metric.values else ():
                wanted = [f'{label}="{value}"' for label, value in zip(metric.values, values, strict=True)]
                names = (f"{metric.name}{{", f"{metric.name}_count{{")
                if not any(one.startswith(names) and all(w in one for w in wanted) for one in moved):
                    found.add((metric.name, *values))
        return found
