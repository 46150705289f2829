"""Choosing tokens: argmax(logits / temperature + noise) over what penalties, bias and filters leave.

Order: repetition, frequency and presence penalty, bias, temperature, top-k, top-p, min-p, noise. Each part touches only
the rows that ask for it, and a row's token depends on no other row. Filters keep every token at least as likely as the
least likely one that is in, so that equal logits stay or go together. Knows nothing about the model.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from engine.noise import GumbelNoise, row_keys
from engine.step import FloatArray, IntArray, SamplingBatch, StepOutput

CANDIDATES_FIRST = 64
"""Most likely tokens of a row that top-k and top-p look at first."""
CANDIDATES_GROWTH = 16
"""Factor by which they look at more when these are not enough."""


class Sampler:
    """Stateless but for the device's noise table."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._noise = GumbelNoise(vocab_size, device)
        self._device = device

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, history: IntArray | None) -> StepOutput:
        """One token per row. logits: float32[B, V], not modified; history: [B, n] token ids, needed by penalties."""
        scores = self._adjust(logits, batch, history)
        random = np.flatnonzero(batch.temperature > 0)
        tokens = scores.argmax(dim=-1)
        if len(random):
            index = self._tensor(random)
            chosen = scores if len(random) == batch.size else scores[index]
            chosen = chosen / self._column(batch.temperature[random])
            self._filter(chosen, batch, random)
            keys = row_keys(batch.seed[random], batch.child[random], batch.position[random])
            tokens[index] = chosen.add_(self._noise.rows(keys)).argmax(dim=-1)
        return self._output(logits, tokens, batch)

    def _tensor(self, values: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    def _column(self, values: NDArray[np.generic]) -> torch.Tensor:
        return self._tensor(values).unsqueeze(1)

    def _adjust(self, logits: torch.Tensor, batch: SamplingBatch, history: IntArray | None) -> torch.Tensor:
        """Penalties and bias; the logits themselves when no row has any."""
        output_penalties = (batch.frequency_penalty != 0) | (batch.presence_penalty != 0)
        penalised = np.flatnonzero((batch.repetition_penalty != 1) | output_penalties)
        if not len(penalised) and not batch.logit_bias:
            return logits
        scores = logits.clone()
        if len(penalised):
            assert history is not None, "a plan with penalties carries the history of its rows"
            rows = self._tensor(penalised)
            scores[rows] = self._penalise(scores[rows], batch, history[penalised], penalised)
        if batch.logit_bias:
            places = [(row, token) for row, biases in batch.logit_bias.items() for token in biases]
            values = [value for biases in batch.logit_bias.values() for value in biases.values()]
            row_index, token_index = torch.tensor(places, device=self._device).unbind(dim=1)
            bias = torch.tensor(values, dtype=scores.dtype, device=self._device)
            scores.index_put_((row_index, token_index), bias, accumulate=True)
        return scores

    def _penalise(
        self, scores: torch.Tensor, batch: SamplingBatch, history: IntArray, rows: NDArray[np.intp]
    ) -> torch.Tensor:
        tokens = self._tensor(history.astype(np.int64))
        place = np.arange(history.shape[1])
        is_known = place < batch.num_tokens[rows, None]
        is_output = is_known & (place >= batch.prompt_length[rows, None])
        seen, counts = (
            torch.zeros_like(scores).scatter_add_(1, tokens, self._tensor(flags.astype(np.float32)))
            for flags in (is_known, is_output)
        )
        repetition = self._column(batch.repetition_penalty[rows])
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(seen > 0, repeated, scores)
        scores -= counts * self._column(batch.frequency_penalty[rows])
        return scores.sub_((counts > 0) * self._column(batch.presence_penalty[rows]))

    def _filter(self, scores: torch.Tensor, batch: SamplingBatch, random: NDArray[np.intp]) -> None:
        """Put -inf where top-k, top-p and min-p drop a token. scores: of the rows `random`, changed in place."""
        top_k, top_p, min_p = batch.top_k[random], batch.top_p[random], batch.min_p[random]
        wanted = np.flatnonzero(((top_k > 0) & (top_k < scores.shape[1])) | (top_p < 1) | (min_p > 0))
        if not len(wanted):
            return
        rows = self._tensor(wanted)
        probabilities = scores[rows].softmax(dim=-1)
        least = _least_kept(
            probabilities, self._tensor(top_k[wanted]).long(), self._tensor(top_p[wanted]), self._tensor(min_p[wanted])
        )
        scores[rows] = scores[rows].masked_fill_(probabilities < least, float("-inf"))

    def _output(self, logits: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch) -> StepOutput:
        token_ids = tokens.to(torch.int32).cpu().numpy()
        asking = np.flatnonzero(batch.num_logprobs >= 0)
        if not len(asking):
            return StepOutput(token_ids=token_ids)
        rows, count = self._tensor(asking), int(batch.num_logprobs.max())
        raw = logits[rows].log_softmax(dim=-1)
        logprobs = np.full(batch.size, np.nan, dtype=np.float32)
        logprobs[asking] = raw.gather(1, tokens[rows].unsqueeze(1)).squeeze(1).cpu().numpy()
        if not count:
            return StepOutput(token_ids=token_ids, logprobs=logprobs)
        values, ids = raw.topk(count, dim=-1)
        top_logprobs: FloatArray = np.full((batch.size, count), np.nan, dtype=np.float32)
        top_ids: IntArray = np.full((batch.size, count), -1, dtype=np.int32)
        top_logprobs[asking], top_ids[asking] = values.cpu().numpy(), ids.cpu().numpy()
        return StepOutput(token_ids=token_ids, logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)


def _least_kept(
    probabilities: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    num_candidates: int = CANDIDATES_FIRST,
) -> torch.Tensor:
    """[R, 1] probability of the least likely token that all filters keep. probabilities: [R, V]; the others: [R].

    Orders only the most likely tokens of a row, and more of them for the rows that need more.
    """
    needs_order = (top_k > 0) | (top_p < 1)
    if not bool(needs_order.any()):
        return min_p.unsqueeze(1) * probabilities.amax(dim=1, keepdim=True)
    count = min(num_candidates, probabilities.shape[1])
    ordered = probabilities.topk(count, dim=1).values
    sums = ordered.cumsum(dim=1)
    has_rank = (top_k > 0).unsqueeze(1)
    last = torch.where(has_rank, top_k.unsqueeze(1), count).clamp_(max=count) - 1
    kept_sum = torch.where(has_rank, sums.gather(1, last), 1.0)
    num_inside = ((sums - ordered) < top_p.unsqueeze(1) * kept_sum).sum(dim=1, keepdim=True).clamp_(min=1)
    least = ordered.gather(1, torch.minimum(num_inside - 1, last))
    least = torch.where(needs_order.unsqueeze(1), least, 0.0)
    least = torch.maximum(least, min_p.unsqueeze(1) * ordered[:, :1])
    if count < probabilities.shape[1]:
        is_short = torch.where(top_k > 0, top_k > count, (top_p < 1) & (sums[:, -1] < top_p))
        short = is_short.nonzero().squeeze(1)
        if len(short):
            least[short] = _least_kept(
                probabilities[short], top_k[short], top_p[short], min_p[short], count * CANDIDATES_GROWTH
            )
    return least
