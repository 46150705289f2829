"""The measurements run and account for the whole step; how fast anything is, is not tested here."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine import profile
from engine.runner import TorchRunner
from tests.engine.tiny_models import TinyModel, gemma_layers, make_tiny_family, make_tiny_model

pytestmark = pytest.mark.torch


@pytest.fixture
def runner() -> TorchRunner:
    return make_runner(make_tiny_model())


def make_runner(model: TinyModel) -> TorchRunner:
    return TorchRunner(
        model.config,
        model.weights,
        dtype="float32",
        device=torch.device("cpu"),
        block_size=16,
        num_blocks=32,
        max_model_len=64,
        numerics="fast",
        threads=1,
    )


def test_cases_alternate_and_take_time(runner: TorchRunner) -> None:
    products = profile.BareProducts(make_tiny_model().config, torch.float32)
    plan, order = profile.prefill_plan(runner, 20), []

    def run(name: str, case: Callable[[], object]) -> None:
        order.append(name)
        case()

    seconds = profile.measure_alternating(
        {
            "step": lambda: run("step", lambda: runner.execute(plan)),
            "products": lambda: run("products", lambda: products.run(20, 1)),
        },
        repeats=2,
    )
    assert order == ["step", "products"] * 3
    assert seconds["step"] > 0 and seconds["products"] > 0


def test_kinds_add_up_to_the_step_and_leave_the_model_as_it_was(runner: TorchRunner) -> None:
    plan = profile.prefill_plan(runner, 20)
    before = runner.logits(plan)
    layers, attend = runner.model.layers, runner.model.attention.attend
    kinds = profile.time_by_kind(runner, plan, 1)
    total = kinds.pop("total")
    assert set(kinds) == {"qkv", "attention", "output", "gate_up", "down", "head", "other"}
    assert sum(kinds.values()) == pytest.approx(total)
    assert runner.model.layers is layers and runner.model.attention.attend == attend
    assert torch.equal(runner.logits(plan), before)


def test_decode_plan_gives_streams_blocks_of_their_own(runner: TorchRunner) -> None:
    plan = profile.decode_plan(runner, 16, 20)
    assert len(np.unique(plan.block_tables)) == plan.block_tables.size
    assert plan.num_tokens == 16 and (plan.context_lengths == 20).all()


def test_plans_have_a_table_for_every_group_when_layers_have_windows() -> None:
    runner = make_runner(make_tiny_family("gemma3", **gemma_layers("wfw"), sliding_window=8))
    plan = profile.decode_plan(runner, 4, 60)
    blocks = plan.block_tables
    assert blocks.shape == (3, 4, 4) and plan.slots.shape == (3, 4)
    assert len(np.unique(blocks[0])) == 16 and not blocks[1:, :, :3].any()
    assert len(np.unique([*blocks[0].flat, *blocks[1:, :, 3].flat])) == 24
    assert runner.logits(plan).shape == (4, 97)
    kinds = profile.time_by_kind(runner, profile.prefill_plan(runner, 30, 20), 1)
    assert min(kinds.values()) > 0


def test_read_bandwidth_is_positive() -> None:
    assert profile.read_bandwidth(1 << 20, 1) > 0
