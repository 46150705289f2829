"""The sampler against a per-row reference in NumPy, its distribution, and the independence of its rows."""

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine import sampler as sampler_module
from engine.sampler import Sampler
from engine.step import SamplingBatch, StepOutput
from tests.engine.test_noise import reference_noise

pytestmark = pytest.mark.torch

VOCAB = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row's parameters, as a request would have them."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    child: int = 0
    position: int = 0
    num_logprobs: int = -1
    bias: dict[int, float] = field(default_factory=dict)
    prompt: tuple[int, ...] = (1,)
    output: tuple[int, ...] = ()


def make_batch(rows: list[Row]) -> tuple[SamplingBatch, NDArray[np.int32]]:
    floats = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
    columns: dict[str, Any] = {}
    for name in (item.name for item in fields(Row) if item.name not in ("bias", "prompt", "output")):
        kind = np.float32 if name in floats else np.uint64 if name == "seed" else np.int32
        columns[name] = np.array([getattr(row, name) for row in rows], dtype=kind)
    known = [row.prompt + row.output for row in rows]
    history = np.zeros((len(rows), max(map(len, known))), dtype=np.int32)
    for index, tokens in enumerate(known):
        history[index, : len(tokens)] = tokens
    batch = SamplingBatch(
        **columns,
        logit_bias={index: row.bias for index, row in enumerate(rows) if row.bias},
        prompt_length=np.array([len(row.prompt) for row in rows], dtype=np.int32),
        num_tokens=np.array([len(tokens) for tokens in known], dtype=np.int32),
    )
    return batch, history


def run(logits: NDArray[np.float32], rows: list[Row]) -> StepOutput:
    batch, history = make_batch(rows)
    tensor = torch.from_numpy(logits)
    output = Sampler(logits.shape[1], torch.device("cpu")).sample(tensor, batch, history)
    assert np.array_equal(tensor.numpy(), logits)
    return output


def reference_scores(logits: NDArray[np.float32], row: Row) -> NDArray[np.float64]:
    """Scores before the noise; -inf where a filter drops the token; greedy rows keep all."""
    scores = logits.astype(np.float64)
    for token in set(row.prompt + row.output):
        scores[token] = (
            scores[token] / row.repetition_penalty if scores[token] > 0 else scores[token] * row.repetition_penalty
        )
    for token in set(row.output):
        scores[token] -= row.frequency_penalty * row.output.count(token) + row.presence_penalty
    for token, value in row.bias.items():
        scores[token] += value
    if row.temperature == 0:
        return scores
    scores /= row.temperature
    order = np.argsort(-scores, kind="stable")
    kept = order[: row.top_k] if row.top_k else order
    chances = np.exp(scores[kept] - scores[kept].max())
    chances /= chances.sum()
    kept = kept[(np.cumsum(chances) - chances) < row.top_p]
    kept = kept[np.exp(scores[kept] - scores.max()) >= row.min_p]
    filtered = np.full_like(scores, -np.inf)
    filtered[kept] = scores[kept]
    return filtered


def reference_token(logits: NDArray[np.float32], row: Row) -> int:
    scores = reference_scores(logits, row)
    if row.temperature > 0:
        scores = scores + [reference_noise(row.seed, row.child, row.position, token) for token in range(len(scores))]
    return int(scores.argmax())


def random_rows(count: int, seed: int) -> list[Row]:
    random = np.random.default_rng(seed)

    def one(index: int) -> Row:
        return Row(
            temperature=float(random.choice([0.0, 0.5, 1.0, 1.7])),
            top_k=int(random.choice([0, 1, 5, 20, VOCAB, 100])),
            top_p=float(random.choice([1.0, 0.9, 0.3, 0.01])),
            min_p=float(random.choice([0.0, 0.0, 0.05, 0.5, 1.0])),
            repetition_penalty=float(random.choice([1.0, 1.3, 0.7])),
            frequency_penalty=float(random.choice([0.0, 0.5, -1.0])),
            presence_penalty=float(random.choice([0.0, 1.5])),
            seed=int(random.integers(1 << 63)),
            child=index % 3,
            position=int(random.integers(1000)),
            num_logprobs=int(random.choice([-1, 0, 4])),
            bias={int(random.integers(VOCAB)): float(random.normal() * 3) for _ in range(index % 3)},
            prompt=tuple(random.integers(0, VOCAB, 1 + index % 5).tolist()),
            output=tuple(random.integers(0, VOCAB, index % 7).tolist()),
        )

    return [one(index) for index in range(count)]


def random_logits(count: int, seed: int) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).normal(size=(count, VOCAB)) * 2).astype(np.float32)


@pytest.mark.parametrize("seed", range(8))
def test_tokens_equal_the_reference_when_rows_mix_all_parameters(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:
        monkeypatch.setattr(sampler_module._least_kept, "__defaults__", (2,))
    rows, logits = random_rows(48, seed), random_logits(48, seed + 100)
    wanted = [reference_token(logits[index], row) for index, row in enumerate(rows)]
    assert run(logits, rows).token_ids.tolist() == wanted


def test_a_row_gets_the_same_token_alone_as_in_a_batch() -> None:
    rows, logits = random_rows(64, 50), random_logits(64, 51)
    together = run(logits, rows).token_ids
    alone = [run(logits[index : index + 1], [row]).token_ids[0] for index, row in enumerate(rows)]
    assert together.tolist() == alone


def test_tokens_are_argmax_when_every_row_is_greedy() -> None:
    logits = random_logits(9, 3)
    assert run(logits, [Row(temperature=0.0)] * 9).token_ids.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize(
    "row",
    [
        Row(),
        Row(temperature=0.6),
        Row(temperature=1.4, top_k=8),
        Row(top_p=0.8),
        Row(min_p=0.1),
        Row(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02),
    ],
)
def test_frequencies_follow_the_filtered_distribution(row: Row) -> None:
    """Chi-square over 20,000 draws of one distribution; the bound is the 99.99th percentile, by Wilson and Hilferty."""
    draws = 20_000
    logits = random_logits(1, 9)
    batch, _ = make_batch([row])
    columns = {
        item.name: np.repeat(value, draws)
        for item in fields(SamplingBatch)
        if isinstance(value := getattr(batch, item.name), np.ndarray)
    }
    columns["position"] = np.arange(draws, dtype=np.int32)
    columns["seed"] = np.full(draws, 77, dtype=np.uint64)
    many = SamplingBatch(**columns, logit_bias={})
    output = Sampler(VOCAB, torch.device("cpu")).sample(torch.from_numpy(logits).expand(draws, -1), many, None)
    counts = np.bincount(output.token_ids, minlength=VOCAB)
    scores = reference_scores(logits[0], row)
    expected = np.exp(scores - scores.max())
    expected *= draws / expected.sum()
    assert not counts[expected == 0].any()
    likely = expected >= 5
    pairs = [*zip(counts[likely], expected[likely], strict=True)]
    if expected[~likely].sum() >= 1:
        pairs.append((counts[~likely].sum(), expected[~likely].sum()))
    statistic = sum((count - mean) ** 2 / mean for count, mean in pairs)
    freedom = len(pairs) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < bound


def test_seed_child_and_position_each_change_the_noise() -> None:
    logits = np.zeros((4, VOCAB), dtype=np.float32)
    tokens = run(logits, [Row(seed=5), Row(seed=6), Row(seed=5, child=1), Row(seed=5, position=1)]).token_ids
    assert len(set(tokens.tolist())) == 4
    assert run(logits[:1], [Row(seed=5)]).token_ids[0] == tokens[0]


def test_equal_logits_stay_together_when_a_filter_cuts_among_them() -> None:
    logits = np.zeros((200, 4), dtype=np.float32)
    tokens = run(logits, [Row(top_k=2, seed=seed) for seed in range(200)]).token_ids
    assert set(tokens.tolist()) == {0, 1, 2, 3}


def test_logprobs_are_of_the_raw_distribution_when_rows_have_penalties_and_filters() -> None:
    rows = [
        Row(num_logprobs=3, temperature=0.3, top_k=2, bias={5: 9.0}, repetition_penalty=2.0, seed=4),
        Row(num_logprobs=-1),
        Row(num_logprobs=0, temperature=0.0),
    ]
    logits = random_logits(3, 21)
    output = run(logits, rows)
    raw = logits.astype(np.float64)
    raw -= np.log(np.exp(raw).sum(axis=1, keepdims=True))
    assert output.logprobs is not None and output.top_ids is not None and output.top_logprobs is not None
    chosen = raw[np.arange(3), output.token_ids]
    np.testing.assert_allclose(output.logprobs[[0, 2]], chosen[[0, 2]], atol=1e-5)
    assert np.isnan(output.logprobs[1]) and (output.top_ids[1] == -1).all()
    assert output.top_ids[0].tolist() == np.argsort(-raw[0])[:3].tolist()
    np.testing.assert_allclose(output.top_logprobs[0], np.sort(raw[0])[::-1][:3], atol=1e-5)


def test_no_logprobs_come_back_when_no_row_asks() -> None:
    output = run(random_logits(2, 1), [Row(), Row(temperature=0.0)])
    assert output.logprobs is None and output.top_ids is None and output.top_logprobs is None


def test_no_top_ids_come_back_when_rows_ask_for_the_chosen_only() -> None:
    output = run(random_logits(1, 1), [Row(num_logprobs=0)])
    assert output.logprobs is not None and output.top_ids is None
