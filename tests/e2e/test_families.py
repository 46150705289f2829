"""Every family served, in one process and as 1P1D, against transformers: tokens, log-probabilities, and what moved.

Tiny random weights; time is virtual, arithmetic is real (RQ-3, TX-3).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cluster.assembly import ServedModel, WorkerIdentity
from cluster.local import LocalCluster
from core.clock import ManualClock
from core.config import parse_config
from core.ids import Epoch, RouterId, WeightIdentity, WorkerId
from core.link import MemoryNetwork
from core.request import SamplingParams
from engine.runner import TorchRunner
from kvtransfer.plan import demand
from kvtransfer.transport.memory import MemoryFabric
from router.generation import ChildDelta, PreparedRequest
from router.service import RouterService
from tests.e2e.stage import LetterCodec, play
from tests.engine.tiny_models import TinyModel, gemma_layers, make_tiny_family, make_tiny_model, random_tokens

pytestmark = pytest.mark.torch

BLOCK = 8
NUM_BLOCKS = 256
OUTPUT_TOKENS = 12
TOLERANCE = 1e-4
LENGTHS = (1, 8, 9, 25, 60)
MODELS: dict[str, Callable[[], TinyModel]] = {
    "llama": make_tiny_model,
    "qwen2": lambda: make_tiny_family("qwen2"),
    "qwen3": lambda: make_tiny_family("qwen3"),
    "gemma3": lambda: make_tiny_family("gemma3", **gemma_layers("wwfwwfw"), sliding_window=20),
    "gemma3, windows only": lambda: make_tiny_family("gemma3", **gemma_layers("www"), sliding_window=12),
}
TOPOLOGIES = {"one process": ("mode=colocated",), "1P1D": ("prefill.workers=1", "decode.workers=1")}


class Served:
    """One tiny model under one topology."""

    def __init__(self, model: TinyModel, overrides: tuple[str, ...]) -> None:
        lines = [
            "schema_version: 1",
            "name: families",
            "model: {path: tiny}",
            f"kv: {{block_size: {BLOCK}, device_blocks: {NUM_BLOCKS}}}",
            "prefill: {max_batched_tokens: 16}",
            "decode: {max_batched_tokens: 16}",
        ]
        self.model = model
        self.config = parse_config("\n".join(lines), file="families.yaml", overrides=overrides)
        self.layout = model.config.block_layout(BLOCK, "float32")
        self.clock = ManualClock()
        network = MemoryNetwork(self.clock)
        served = ServedModel(
            name="tiny",
            vocab_size=model.config.vocab_size,
            eos_token_ids=frozenset(),
            max_model_len=128,
            layout=self.layout,
            weight_identity=WeightIdentity("tiny"),
        )
        self.cluster = LocalCluster(
            self.config,
            served,
            self._runner,
            clock=self.clock,
            network=network,
            fabric=MemoryFabric(self.clock),
            is_checked=True,
        )
        self.service = RouterService(
            router_id=RouterId("router-0"),
            epoch=Epoch(1),
            clock=self.clock,
            dialer=network,
            text=LetterCodec(),
            model_name="tiny",
            mode=self.config.mode,
        )

    def _runner(self, identity: WorkerIdentity) -> tuple[TorchRunner, memoryview]:
        runner = TorchRunner(
            self.model.config,
            self.model.weights,
            dtype="float32",
            device=torch.device("cpu"),
            block_size=BLOCK,
            num_blocks=NUM_BLOCKS,
            max_model_len=128,
            numerics="exact",
            threads=1,
        )
        view = runner.cache.byte_view()
        assert view is not None
        return runner, view

    async def ask(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, num_logprobs=0)
        prepared = PreparedRequest(token_ids=tuple(prompt), sampling=sampling, num_children=1, stop=())
        tokens: list[int] = []
        logprobs: list[float] = []
        async for event in self.service.generate(prepared):
            if isinstance(event, ChildDelta):
                tokens += event.token_ids
                logprobs += [item.logprob for item in event.logprobs]
        return tokens, logprobs

    def run(self, scene: Callable[[], Any]) -> None:
        async def whole() -> None:
            await self.service.start()
            self.service.update_workers(self.cluster.start())
            while not self.service.is_ready():
                await self.clock.sleep(0.01)
            try:
                await scene()
            finally:
                await self.service.close()
                await self.cluster.close()

        play(whole, self.clock)


def _reference(model: TinyModel, prompt: list[int]) -> tuple[list[int], list[float]]:
    """transformers' greedy continuation, each step over the whole sequence."""
    tokens, logprobs = list(prompt), []
    for _ in range(OUTPUT_TOKENS):
        with torch.inference_mode():
            logits = model.reference(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        tokens.append(int(logits.argmax()))
        logprobs.append(float(logits[tokens[-1]]))
    return tokens[len(prompt) :], logprobs


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("family", MODELS)
def test_served_family_gives_transformers_tokens(family: str, topology: str) -> None:
    served = Served(MODELS[family](), TOPOLOGIES[topology])

    async def scene() -> None:
        moved = 0
        for length in LENGTHS:
            prompt = random_tokens(length, seed=length).tolist()
            expected, expected_logprobs = _reference(served.model, prompt)
            for _cold_then_warm in range(2):
                tokens, logprobs = await served.ask(prompt)
                assert tokens == expected
                assert logprobs == pytest.approx(expected_logprobs, abs=TOLERANCE)
            moved += len(demand(length, served.layout.windows, BLOCK))
        decode = served.cluster.workers[WorkerId("decode-0")].status().counters
        pulled = sum(value for name, value in decode.items() if name.startswith("pdcluster_pulled_blocks_total"))
        assert pulled == (moved if topology == "1P1D" else 0)

    served.run(scene)
