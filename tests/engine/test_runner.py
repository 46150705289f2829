"""The runner against transformers, and the bits of `exact`: logits of a position do not depend on what it ran with."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from core.errors import NumericsError
from engine.probe import ProbeSequence, build_plan
from engine.runner import TorchRunner
from tests.engine.feeder import (
    TOLERANCE,
    AttentionName,
    Feeder,
    assert_mixed_steps_equal_transformers,
    make_runner,
)
from tests.engine.tiny_models import LINEAR, LLAMA3, TinyModel, make_tiny_model, random_tokens

pytestmark = pytest.mark.torch

MODELS: dict[str, Callable[[], TinyModel]] = {
    "tied": make_tiny_model,
    "untied": lambda: make_tiny_model(tied=False),
    "bias": lambda: make_tiny_model(bias=True),
    "wide_heads": lambda: make_tiny_model(head_dim=24),
    "linear": lambda: make_tiny_model(rope_scaling=LINEAR),
    "llama3": lambda: make_tiny_model(rope_scaling=LLAMA3),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attention", ["reference", "fast"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_logits_equal_transformers_when_steps_mix_chunks_and_decodes(
    name: str, attention: AttentionName, block_size: int
) -> None:
    model = MODELS[name]()
    assert_mixed_steps_equal_transformers(model, make_runner(model, block_size=block_size, attention=attention))


def test_logits_of_sampling_rows_equal_when_other_rows_do_not_sample() -> None:
    model = make_tiny_model()
    prompts = [random_tokens(20, 1), random_tokens(33, 2)]
    runner = make_runner(model)
    blocks = np.arange(5, dtype=np.int32)
    plan = build_plan(
        [
            ProbeSequence(token_ids=prompts[0], start=0, end=20, block_ids=blocks[:2], samples=False),
            ProbeSequence(token_ids=prompts[1], start=0, end=33, block_ids=blocks[2:]),
        ],
        16,
    )
    torch.testing.assert_close(runner.logits(plan)[0], model.reference_logits(prompts[1])[-1], atol=TOLERANCE, rtol=0)
    silent = build_plan([ProbeSequence(token_ids=prompts[0], start=0, end=20, block_ids=blocks, samples=False)], 16)
    assert runner.logits(silent).shape == (0, 97)
    assert len(runner.execute(silent).token_ids) == 0


@pytest.mark.parametrize("block_size", [16, 64])
def test_exact_logits_are_bit_equal_when_chunked_batched_or_decoded(block_size: int) -> None:
    model = make_tiny_model(seed=3)
    prompts = [random_tokens(length, seed) for seed, length in enumerate((700, 61, 530))]
    alone = Feeder(make_runner(model, numerics="exact"), prompts, seed=1)
    whole = [alone.logits((index, 0, len(prompt)))[0] for index, prompt in enumerate(prompts)]
    for chunk in (32, 512):
        feeder = Feeder(make_runner(model, block_size=block_size, numerics="exact"), prompts)
        for index, prompt in enumerate(prompts):
            starts = range(0, len(prompt), chunk)
            last = [feeder.logits((index, start, min(start + chunk, len(prompt))))[0] for start in starts][-1]
            assert torch.equal(last, whole[index])
        batched = feeder.logits(*((index, len(prompt) - 1, len(prompt)) for index, prompt in enumerate(prompts)))
        mixed = feeder.logits((0, 699, 700), (1, 0, 61), (2, 511, 530))
        assert torch.equal(batched, torch.stack(whole))
        assert torch.equal(mixed, torch.stack(whole))


def test_exact_decode_is_bit_equal_to_prefill_at_every_position() -> None:
    model = make_tiny_model(seed=4)
    prompt = random_tokens(70, 5)
    runner = make_runner(model, numerics="exact")
    chunked, decoded = Feeder(runner, [prompt], seed=1), Feeder(make_runner(model, numerics="exact"), [prompt])
    for end in range(1, 71):
        assert torch.equal(decoded.logits((0, end - 1, end)), chunked.logits((0, 0, end))), end


def test_bfloat16_logits_are_close_and_exact_ones_bit_equal() -> None:
    model = make_tiny_model(seed=6)
    weights = {name: tensor.bfloat16() for name, tensor in model.weights.items()}
    prompt = random_tokens(50, 7)
    outputs = []
    for numerics in ("fast", "exact"):
        runner = TorchRunner(
            model.config,
            weights,
            dtype="bfloat16",
            device=torch.device("cpu"),
            block_size=16,
            num_blocks=8,
            max_model_len=64,
            numerics=numerics,
            threads=1,
        )
        feeder = Feeder(runner, [prompt])
        outputs += [feeder.logits((0, 0, 50)), feeder.logits((0, 49, 50))]
    scale = model.reference_logits(prompt)[-1].abs().max()
    for logits in outputs:
        assert (logits - model.reference_logits(prompt)[-1]).abs().max() < 0.1 * scale
    assert torch.equal(outputs[2], outputs[3])


def test_execute_returns_greedy_tokens_and_timings_when_rows_are_greedy() -> None:
    model = make_tiny_model()
    prompt = random_tokens(30)
    runner = make_runner(model)
    block_ids = np.arange(2, dtype=np.int32)
    output = runner.execute(build_plan([ProbeSequence(token_ids=prompt, start=0, end=30, block_ids=block_ids)], 16))
    assert output.token_ids.tolist() == [int(model.reference_logits(prompt)[-1].argmax())]
    assert output.token_ids.dtype == np.int32
    assert set(output.timings_s) == {"forward", "sample"} and min(output.timings_s.values()) >= 0


def test_warm_up_leaves_every_block_zero() -> None:
    runner = make_runner(make_tiny_model(), numerics="exact")
    runner.warm_up()
    assert not runner.cache.tensor.any()


def test_warm_up_refuses_exact_when_bits_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(make_tiny_model(), numerics="exact")
    attend = runner.model.attention.attend

    def drifting(*arguments: Any) -> torch.Tensor:
        output = attend(*arguments)
        return output * (1 + 1e-5 * len(output))

    monkeypatch.setattr(runner.model.attention, "attend", drifting)
    with pytest.raises(NumericsError, match="token by token"):
        runner.warm_up()


def test_warm_up_refuses_exact_when_the_activation_depends_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(make_tiny_model(), numerics="exact")
    runner.warm_up()
    monkeypatch.setattr(runner.model, "activation", F.silu)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(NumericsError, match="token by token"):
            runner.warm_up()
    finally:
        torch.set_num_threads(before)


def test_warm_up_refuses_exact_when_long_attention_depends_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(make_tiny_model(), numerics="exact")
    attend = runner.model.attention.attend

    def drifting(*arguments: Any) -> torch.Tensor:
        output = attend(*arguments)
        return output * 1.001 if len(output) > 512 else output

    monkeypatch.setattr(runner.model.attention, "attend", drifting)
    with pytest.raises(NumericsError, match="token by token"):
        runner.warm_up()
