"""Where a step thread's time goes, and how full its steps are; counted into an outbox.

Durations only, of this process's performance counter: nothing here decides anything. Knows nothing about plans.
"""

import time
from collections.abc import Callable, Mapping

from core.metrics import STEP_PARTS, series_key
from core.outbox import Outbox

_STEPS, _SEQUENCES, _ROWS, _TOKENS = (
    "pdcluster_steps_total",
    "pdcluster_step_sequences_total",
    "pdcluster_step_rows_total",
    "pdcluster_step_tokens",
)
_SECONDS = "pdcluster_step_seconds_total"
_PART_KEYS = {part: series_key(_SECONDS, part) for part in STEP_PARTS}

STEP_COUNTERS = (_STEPS, _SECONDS, _TOKENS, _SEQUENCES, _ROWS)


class StepMeter:
    """Every call to `lap` charges the time since the one before to a part, so that the parts add up to all time."""

    def __init__(self, outbox: Outbox, *, num_rows: int, now: Callable[[], float] = time.perf_counter) -> None:
        """`num_rows`: sequences that one step has room for."""
        self._outbox = outbox
        self._num_rows = num_rows
        self._now = now
        self._lap_s = now()

    def lap(self, part: str) -> None:
        """One of STEP_PARTS ended now."""
        self._charge(part, 0.0)

    def step(self, *, num_tokens: int, num_sequences: int, timings_s: Mapping[str, float]) -> None:
        """The runner has carried a plan out; `timings_s` as in `StepOutput`: what it did not report is `forward`."""
        sample_s = timings_s.get("sample", 0.0)
        self._charge("forward", sample_s)
        self._outbox.count(_PART_KEYS["sample"], sample_s)
        self._outbox.count(_STEPS)
        self._outbox.count(_SEQUENCES, num_sequences)
        self._outbox.count(_ROWS, self._num_rows)
        self._outbox.observe(_TOKENS, num_tokens)

    def _charge(self, part: str, less_s: float) -> None:
        started_s, self._lap_s = self._lap_s, self._now()
        self._outbox.count(_PART_KEYS[part], max(0.0, self._lap_s - started_s - less_s))
