"""Every family against transformers, whole and in steps, with KV of unneeded positions taken away; and `exact` bits."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from core.errors import NumericsError
from core.layout import GroupLayout
from engine.attention.cpu import Span
from engine.factory import load_runner
from engine.model.directory import check_directory, read_config, weight_identity
from engine.model.loader import load_weights
from engine.numerics import NumericsMode
from engine.runner import TorchRunner
from engine.step import StepPlan
from tests.engine.feeder import (
    TOLERANCE,
    AttentionName,
    Feeder,
    assert_mixed_steps_equal_transformers,
    make_runner,
)
from tests.engine.tiny_models import TinyModel, gemma_layers, make_tiny_family, random_tokens

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
PADDED = gemma_layers("wwfwwfw")
"""Two full layers, five with windows: four groups of two places, the last with one place unused."""
SCALED_ROPE: dict[str, Any] = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
MODELS: dict[str, Callable[[], TinyModel]] = {
    "qwen2": lambda: make_tiny_family("qwen2"),
    "qwen2 tied": lambda: make_tiny_family("qwen2", tie_word_embeddings=True),
    "qwen3": lambda: make_tiny_family("qwen3"),
    "qwen3 tied, with biases": lambda: make_tiny_family("qwen3", tie_word_embeddings=True, attention_bias=True),
    "gemma3, window below a block": lambda: make_tiny_family("gemma3", **PADDED, sliding_window=5),
    "gemma3, window across blocks": lambda: make_tiny_family("gemma3", **PADDED, sliding_window=24),
    "gemma3, window of one prompt": lambda: make_tiny_family("gemma3", **PADDED, sliding_window=40),
    "gemma3, window of itself": lambda: make_tiny_family("gemma3", **gemma_layers("fw"), sliding_window=1),
    "gemma3, window never full": lambda: make_tiny_family("gemma3", **PADDED, sliding_window=512),
    "gemma3, windows only": lambda: make_tiny_family("gemma3", **gemma_layers("www"), sliding_window=20),
    "gemma3, no windows": lambda: make_tiny_family("gemma3", **gemma_layers("ff"), sliding_window=20),
    "gemma3, pattern and one head": lambda: make_tiny_family(
        "gemma3", num_hidden_layers=7, num_key_value_heads=1, sliding_window=16
    ),
    "gemma3, scaled and untied": lambda: make_tiny_family(
        "gemma3", **PADDED, sliding_window=24, rope_parameters=SCALED_ROPE, tie_word_embeddings=False
    ),
}


def test_groups_cover_every_layer_once_and_blocks_have_one_size() -> None:
    config = make_tiny_family("gemma3", **PADDED, sliding_window=24).config
    assert [(group.window, group.layers) for group in config.layer_groups()] == [
        (None, (2, 5)),
        (24, (0, 1)),
        (24, (3, 4)),
        (24, (6,)),
    ]
    layout = config.block_layout(16, "float32")
    assert {group.position_bytes() for group in layout.groups} == {2 * 2 * 2 * 20 * 4}
    assert [(group.kind, group.window) for group in layout.groups] == [("full", None), *[("window", 24)] * 3]


@pytest.mark.parametrize(("kinds", "groups"), [("www", [(20, (0, 1, 2))]), ("fff", [(None, (0, 1, 2))])])
def test_layers_of_one_kind_are_one_group(kinds: str, groups: list[tuple[int | None, tuple[int, ...]]]) -> None:
    config = make_tiny_family("gemma3", **gemma_layers(kinds), sliding_window=20).config
    assert [(group.window, group.layers) for group in config.layer_groups()] == groups


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("attention", "numerics"), [("reference", "fast"), ("fast", "fast"), ("fast", "exact")])
def test_logits_equal_transformers_when_steps_mix_chunks_and_decodes(
    name: str, attention: AttentionName, numerics: NumericsMode
) -> None:
    model = MODELS[name]()
    assert_mixed_steps_equal_transformers(model, make_runner(model, attention=attention, numerics=numerics))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("attention", "block_size"), [("reference", 16), ("fast", 16), ("fast", 64)])
def test_every_position_equals_transformers_when_decoded_token_by_token(
    name: str, attention: AttentionName, block_size: int
) -> None:
    model = MODELS[name]()
    prompt = random_tokens(55, 3)
    expected = model.reference_logits(prompt)
    feeder = Feeder(make_runner(model, attention=attention, block_size=block_size), [prompt])
    for end in range(1, 56):
        torch.testing.assert_close(feeder.logits((0, end - 1, end))[0], expected[end - 1], atol=TOLERANCE, rtol=0)


EXACT = {
    "qwen2": lambda: make_tiny_family("qwen2"),
    "qwen3": lambda: make_tiny_family("qwen3"),
    "window 24": lambda: make_tiny_family("gemma3", **PADDED, sliding_window=24),
    "window 512": lambda: make_tiny_family("gemma3", **PADDED, sliding_window=512),
    "window 700": lambda: make_tiny_family("gemma3", **gemma_layers("wfw"), sliding_window=700),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("block_size", [16, 48])
def test_exact_logits_are_bit_equal_when_chunked_batched_or_decoded(name: str, block_size: int) -> None:
    """Prompts are longer than the window and two units of keys: leading keys of a unit, and whole units, are hidden."""
    model = EXACT[name]()
    prompts = [random_tokens(length, seed) for seed, length in enumerate((1300, 61, 1030))]
    alone = Feeder(make_runner(model, numerics="exact", block_size=block_size), prompts, seed=1)
    whole = [alone.logits((index, 0, len(prompt)))[0] for index, prompt in enumerate(prompts)]
    assert all(torch.isfinite(logits).all() for logits in whole)
    wanted = model.reference_logits(prompts[0])[-1]
    torch.testing.assert_close(whole[0], wanted, atol=TOLERANCE, rtol=0)
    for chunk in (100, 512):
        feeder = Feeder(make_runner(model, block_size=block_size, numerics="exact"), prompts)
        for index, end in ((0, 1299), (2, 1010)):
            for start in range(0, end, chunk):
                feeder.logits((index, start, min(start + chunk, end)))
        mixed = feeder.logits((0, 1299, 1300), (1, 0, 61), (2, 1010, 1030))
        assert torch.equal(mixed, torch.stack(whole))
        decoded = feeder.logits((0, 1299, 1300), (1, 60, 61), (2, 1029, 1030))
        assert torch.equal(decoded, torch.stack(whole))


@pytest.mark.parametrize("name", ["qwen3", "window 24"])
def test_exact_decode_is_bit_equal_to_prefill_at_every_position(name: str) -> None:
    model = EXACT[name]()
    prompt = random_tokens(70, 5)
    decoder = Feeder(make_runner(model, numerics="exact"), [prompt])
    prefill = Feeder(make_runner(model, numerics="exact"), [prompt], seed=1)
    for end in range(1, 71):
        assert torch.equal(decoder.logits((0, end - 1, end)), prefill.logits((0, 0, end))), end


@pytest.mark.parametrize("name", ["window 24", "window 700"])
def test_warm_up_accepts_windows_and_leaves_every_block_zero(name: str) -> None:
    runner = make_runner(EXACT[name](), numerics="exact")
    runner.warm_up()
    assert not runner.cache.tensor.any()


def test_warm_up_refuses_exact_when_a_window_layer_depends_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(EXACT["window 24"](), numerics="exact")
    attend = runner.model.attention.attend

    def drifting(layer: int, *arguments: Any) -> torch.Tensor:
        output = attend(layer, *arguments)
        return output * 1.001 if layer == 0 and len(output) > 512 else output

    monkeypatch.setattr(runner.model.attention, "attend", drifting)
    with pytest.raises(NumericsError, match="token by token"):
        runner.warm_up()


def test_warm_up_refuses_exact_when_keys_are_gathered_from_the_first_needed_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make_runner(make_tiny_family("gemma3", **gemma_layers("ww"), sliding_window=560), numerics="exact")
    attention = runner.model.attention
    spans = attention._spans  # type: ignore[attr-defined]

    def unaligned(plan: StepPlan, group: GroupLayout) -> list[Span]:
        first = group.needed_blocks(int(plan.positions[0]), runner.block_size).start
        return [replace(s, starts=s.starts * 0 + first, num_blocks=s.num_blocks + 32) for s in spans(plan, group)]

    runner.warm_up()
    monkeypatch.setattr(attention, "_spans", unaligned)
    with pytest.raises(NumericsError, match="token by token"):
        runner.warm_up()


def test_runner_refuses_fewer_blocks_than_groups() -> None:
    model = EXACT["window 24"]()
    with pytest.raises(ValueError, match="3 KV blocks cannot hold a position of 4 groups"):
        TorchRunner(
            model.config,
            model.weights,
            dtype="float32",
            device=CPU,
            block_size=16,
            num_blocks=3,
            max_model_len=64,
            numerics="fast",
        )


def test_bfloat16_logits_are_close_when_embeddings_are_scaled_and_norms_offset() -> None:
    model = make_tiny_family("gemma3", **PADDED, sliding_window=24)
    prompt = random_tokens(50, 7)
    outputs = []
    for numerics in ("fast", "exact"):
        runner = TorchRunner(
            model.config,
            {name: tensor.bfloat16() for name, tensor in model.weights.items()},
            dtype="bfloat16",
            device=CPU,
            block_size=16,
            num_blocks=32,
            max_model_len=64,
            numerics=numerics,
            threads=1,
        )
        feeder = Feeder(runner, [prompt])
        feeder.logits((0, 0, 49))
        outputs.append(feeder.logits((0, 49, 50))[0])
        outputs.append(feeder.logits((0, 0, 50))[0])
    wanted = model.reference_logits(prompt)[-1]
    for logits in outputs:
        assert (logits - wanted).abs().max() < 0.1 * wanted.abs().max()
    assert torch.equal(outputs[2], outputs[3])


def save_directory(model: TinyModel, path: Path) -> Path:
    """What transformers saves, and a tokenizer that fits."""
    model.reference.save_pretrained(path)
    Tokenizer(models.WordLevel({f"t{index}": index for index in range(97)}, unk_token="t0")).save(
        str(path / "tokenizer.json")
    )
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return path


@pytest.mark.parametrize("name", MODELS)
def test_directory_that_transformers_saved_serves_the_same_logits(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    path = save_directory(model, tmp_path / "model")
    config = check_directory(path)
    assert config == model.config and len(weight_identity(path)) == 64
    weights = load_weights(path, config, torch.float32, CPU)
    assert all(torch.equal(tensor, model.weights[key]) for key, tensor in weights.items())
    runner = load_runner(
        path,
        dtype="float32",
        device="cpu",
        block_size=16,
        num_blocks=256,
        max_model_len=128,
        numerics="fast",
        threads=1,
    )
    prompt = random_tokens(60, 9)
    feeder = Feeder(runner, [prompt])
    feeder.logits((0, 0, 30))
    expected = model.reference_logits(prompt)
    torch.testing.assert_close(feeder.logits((0, 30, 60))[0], expected[-1], atol=TOLERANCE, rtol=0)


def test_gemmas_older_spelling_gives_the_same_config(tmp_path: Path) -> None:
    model = make_tiny_family("gemma3", num_hidden_layers=7, sliding_window=24, rope_parameters=SCALED_ROPE)
    path = save_directory(model, tmp_path / "model")
    content = json.loads((path / "config.json").read_text())
    for key in ("rope_parameters", "layer_types", "_sliding_window_pattern", "tie_word_embeddings"):
        del content[key]
    content |= {
        "rope_theta": 1_000_000,
        "rope_local_base_freq": 10_000,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 6,
    }
    (path / "config.json").write_text(json.dumps(content))
    assert read_config(path) == model.config
