"""Cuts a failing chaos run down: fewer faults, fewer requests, shorter ones, as long as it still fails.

Knows nothing about what fails.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from cluster.sim.schedule import Asked, Schedule

Item = TypeVar("Item")
IsFailing = Callable[[Schedule], bool]


def shrink(schedule: Schedule, is_failing: IsFailing) -> Schedule:
    """The smallest failing schedule that taking things away leads to. `schedule` itself must fail."""
    while True:
        smaller = _drop_faults(schedule, is_failing)
        smaller = _drop_requests(smaller, is_failing)
        smaller = _simplify_requests(smaller, is_failing)
        if smaller == schedule:
            return schedule
        schedule = smaller


def _drop_faults(schedule: Schedule, is_failing: IsFailing) -> Schedule:
    kept = fewest(schedule.faults, lambda faults: is_failing(replace(schedule, faults=tuple(faults))))
    return replace(schedule, faults=tuple(kept))


def _drop_requests(schedule: Schedule, is_failing: IsFailing) -> Schedule:
    kept = fewest(schedule.asked, lambda asked: is_failing(replace(schedule, asked=tuple(asked))))
    return replace(schedule, asked=tuple(kept))


def fewest(items: Sequence[Item], is_enough: Callable[[Sequence[Item]], bool]) -> Sequence[Item]:
    """Take ever smaller runs of items away, as long as the rest is enough (delta debugging, complements only)."""
    size = len(items)
    while size:
        start = 0
        while start < len(items):
            rest = [*items[:start], *items[start + size :]]
            if is_enough(rest):
                items = rest
            else:
                start += size
        size //= 2
    return items


def _simplify_requests(schedule: Schedule, is_failing: IsFailing) -> Schedule:
    for index, asked in enumerate(schedule.asked):
        for simpler in _simpler(asked):
            changed = list(schedule.asked)
            changed[index] = simpler
            candidate = replace(schedule, asked=tuple(changed))
            if simpler != asked and is_failing(candidate):
                schedule, asked = candidate, simpler
    return schedule


def _simpler(asked: Asked) -> list[Asked]:
    return [
        replace(asked, num_children=1),
        replace(asked, temperature=0.0),
        replace(asked, leaves_after_s=None),
        replace(asked, cancelled_after_s=None),
        replace(asked, max_tokens=1),
    ]
