"""What is sent and when: seeded prompts of stated lengths, and seeded arrival times.

The same seed gives the same prompts and times on every machine. Knows nothing about servers or time that passes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Dataset = Literal["random", "shared-prefix"]
PromptForm = Literal["ids", "text"]

_TEXT = (
    "the of and to in is it you that he was for on are with as his they be at one have this from or had by hot word "
    "but what some we can out other were all there when up use your how said an each she which do their time if will "
    "way about many then them write would like so these her long make thing see him two has look more day could go "
    "come did number sound no most people my over know water than call first who may down side been now find any new "
    "work part take get place live where after back little only round man year came show every good me give our"
)
WORDS = tuple(_TEXT.split())
"""Words that common byte-pair vocabularies hold as one token each, so that a text of n words has about n tokens."""

_PROMPTS, _WARM_UPS, _ARRIVALS = range(3)
"""What a random stream is for: streams of one seed do not repeat each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts to draw."""

    dataset: Dataset = "random"
    form: PromptForm = "ids"
    num_prompts: int = 100
    input_len: int = 512
    """Tokens (as text: words) of a prompt; of its part after the prefix in `shared-prefix`."""
    output_len: int = 128
    """Tokens asked for."""
    range_ratio: float = 0.0
    """Lengths are uniform in [length * (1 - ratio), length * (1 + ratio)]; at least 0 and below 1."""
    prefix_len: int = 0
    """Tokens that prompts of one prefix share (`shared-prefix` only)."""
    num_prefixes: int = 1
    token_id_min: int = 1000
    token_id_max: int = 30_000
    """Ids are drawn from [token_id_min, token_id_max]: ordinary tokens of common vocabularies."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request to send."""

    content: str | tuple[int, ...]
    num_tokens: int
    """Tokens, or words if it is text."""
    num_output_tokens: int


def make_prompts(workload: Workload, round_index: int = 0) -> list[Prompt]:
    """The prompts of one round. Each round has its own, so that no server meets a prompt in its prefix cache twice."""
    rng = np.random.default_rng((workload.seed, _PROMPTS, round_index))
    prefixes = [_draw(rng, workload, workload.prefix_len) for _ in range(workload.num_prefixes)]
    chosen = rng.permutation(np.arange(workload.num_prompts) % workload.num_prefixes)
    input_lens = _lengths(rng, workload.input_len, workload)
    output_lens = _lengths(rng, workload.output_len, workload)
    return [
        _prompt(workload, prefixes[index] + _draw(rng, workload, num_input), num_output)
        for index, num_input, num_output in zip(chosen.tolist(), input_lens, output_lens, strict=True)
    ]


def make_warm_ups(workload: Workload, count: int) -> list[Prompt]:
    """Prompts of the stated mean lengths that no round uses."""
    rng = np.random.default_rng((workload.seed, _WARM_UPS))
    length = workload.prefix_len + workload.input_len
    return [_prompt(workload, _draw(rng, workload, length), workload.output_len) for _ in range(count)]


def arrival_offsets(count: int, rate: float, burstiness: float, seed: int, round_index: int = 0) -> list[float]:
    """Seconds after the start at which each request is due, ascending; all 0 when `rate` is infinite.

    Gaps are gamma distributed with shape `burstiness` (1: a Poisson process; less: bursts; infinite: a fixed gap), then
    scaled so that the last request is due at exactly count / rate: every seed offers the same load.
    """
    if rate <= 0 or burstiness <= 0:
        raise ValueError(f"rate and burstiness are positive numbers, not {rate} and {burstiness}")
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        gaps = np.ones(count)
    else:
        gaps = np.random.default_rng((seed, _ARRIVALS, round_index)).gamma(burstiness, size=count)
    offsets = np.cumsum(gaps)
    scaled: list[float] = (offsets * (count / rate / offsets[-1])).tolist()
    return scaled


def arrivals_within(rate: float, seconds: float, seed: int, round_index: int) -> list[float]:
    """Seconds after the start at which requests are due that come at random for some time, ascending.

    Rounds 0, 1, 2 together have rate * seconds * 3 requests, to the nearest whole number, and so on: a Poisson process
    given how many came.
    """
    count = round(rate * seconds * (round_index + 1)) - round(rate * seconds * round_index)
    offsets = np.random.default_rng((seed, _ARRIVALS, round_index)).uniform(0.0, seconds, count)
    due: list[float] = np.sort(offsets).tolist()
    return due


def _lengths(rng: np.random.Generator, length: int, workload: Workload) -> list[int]:
    low, high = math.floor(length * (1 - workload.range_ratio)), math.ceil(length * (1 + workload.range_ratio))
    lengths: list[int] = rng.integers(max(low, 1), high, endpoint=True, size=workload.num_prompts).tolist()
    return lengths


def _draw(rng: np.random.Generator, workload: Workload, length: int) -> list[int]:
    """Token ids, or places in WORDS."""
    low, high = (workload.token_id_min, workload.token_id_max) if workload.form == "ids" else (0, len(WORDS) - 1)
    drawn: list[int] = rng.integers(low, high, endpoint=True, size=length).tolist()
    return drawn


def _prompt(workload: Workload, drawn: Sequence[int], num_output: int) -> Prompt:
    content = tuple(drawn) if workload.form == "ids" else " ".join(WORDS[index] for index in drawn)
    return Prompt(content=content, num_tokens=len(drawn), num_output_tokens=num_output)
