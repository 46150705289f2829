"""A chaos run before it happens: a topology, what is asked and what goes wrong when, all drawn from one seed and all of
it values, so that a failing run can be repeated, stored and cut down.

Knows nothing about how any of it is carried out.
"""

import random
from typing import Literal

import msgspec

SIZES = (1, 1, 1, 1, 2, 2, 2, 3, 4, 8)
"""Workers of a role, as likely as they are often here."""
BLOCK_SIZE = 4
VOCAB_SIZE = 101
STORM_S = 20.0
CALM_SHARE = 0.15
"""Of the runs, nothing goes wrong in."""
LEASE_S = 3.0
CREDIT_S = 6.0
FaultKind = Literal[
    "kill", "stop", "stall", "cut", "partition", "spoil", "corrupt", "delay", "write-late", "other-weights", "disk-full"
]
MEMBER_FAULTS: tuple[FaultKind, ...] = ("kill", "kill", "stop", "stop", "cut")
FAULTS: tuple[FaultKind, ...] = (
    *MEMBER_FAULTS, "stall", "partition", "spoil", "corrupt", "delay", "write-late", "other-weights", "disk-full",
)  # fmt: skip


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One request of one client."""

    at_s: float
    router: int
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    stop_token: int
    num_children: int = 1
    leaves_after_s: float | None = None
    """The client hangs up by then."""
    cancelled_after_s: float | None = None
    """Somebody else cancels it by then."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that goes wrong, and for how long."""

    at_s: float
    kind: FaultKind
    target: str
    """The member that it strikes."""
    other: str = ""
    """The member it is cut off from."""
    seconds: float = 0.0


class ClusterShape(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster."""

    num_prefill: int
    """0: colocated."""
    num_decode: int
    num_routers: int
    prefill_blocks: int
    decode_blocks: int
    prefill_tokens: int
    """Token budget of a prefill worker's step."""
    decode_tokens: int
    max_running: int
    windows: tuple[int | None, ...]
    step_s: float
    """What a step costs."""
    token_s: float
    """What each of its tokens adds."""
    link_delay_s: float
    link_bytes_per_s: float
    read_bytes_per_s: float
    num_cores: int
    skew: float
    request_timeout_s: float
    stall_s: float
    """A request without progress for so long is tried elsewhere, or ends."""

    @property
    def max_tokens(self) -> int:
        """Of prompt and output together."""
        return BLOCK_SIZE * min(self.prefill_blocks if self.num_prefill else self.decode_blocks, self.decode_blocks)


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    seed: int
    shape: ClusterShape
    asked: tuple[Asked, ...]
    faults: tuple[Fault, ...]


def draw(seed: int) -> Schedule:
    """The run of a seed."""
    rng = random.Random(seed)
    shape = _draw_shape(rng)
    num_asked = rng.choice([4, 10, 25, 50]) * (2 if shape.num_decode > 2 else 1)
    asked = sorted((_draw_asked(rng, shape) for _ in range(num_asked)), key=lambda one: one.at_s)
    num_faults = 0 if rng.random() < CALM_SHARE else rng.randrange(1, 12)
    faults = sorted((_draw_fault(rng, shape) for _ in range(num_faults)), key=lambda one: one.at_s)
    return Schedule(seed=seed, shape=shape, asked=tuple(asked), faults=tuple(faults))


def _draw_shape(rng: random.Random) -> ClusterShape:
    is_colocated = rng.random() < 0.1
    return ClusterShape(
        num_prefill=0 if is_colocated else rng.choice(SIZES),
        num_decode=rng.choice(SIZES),
        num_routers=rng.choice([1, 1, 2]),
        prefill_blocks=rng.randrange(16, 40),
        decode_blocks=rng.randrange(14, 40),
        prefill_tokens=rng.choice([4, 8, 64]),
        decode_tokens=rng.choice([8, 64]),
        max_running=rng.choice([1, 3, 8]),
        windows=rng.choice([(None,), (None,), (None,), (None, 6), (5,)]),
        step_s=rng.choice([0.0, 0.002, 0.02, 0.1]),
        token_s=rng.choice([0.0, 0.0005, 0.005]),
        link_delay_s=rng.choice([0.0, 0.001, 0.05, 0.3]),
        link_bytes_per_s=rng.choice([1e9, 1e5]),
        read_bytes_per_s=rng.choice([1e9, 1e4, 1e3, 2e2]),
        num_cores=rng.choice([1, 4, 64]),
        skew=rng.choice([0.0, 1e-4, 0.02]),
        request_timeout_s=rng.choice([120.0, 120.0, 40.0, 3.0]),
        stall_s=rng.choice([60.0, 8.0]),
    )


def _draw_asked(rng: random.Random, shape: ClusterShape) -> Asked:
    shared = random.Random(rng.randrange(3))
    prefix = [shared.randrange(VOCAB_SIZE) for _ in range(30)][: rng.choice([0, 4, 8, 15, 30])]
    prompt = prefix + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 20))]
    prompt = prompt[: shape.max_tokens - 2]
    return Asked(
        at_s=rng.uniform(0, STORM_S),
        router=rng.randrange(4),
        prompt=tuple(prompt),
        max_tokens=min(rng.choice([1, 2, 9, 30]), shape.max_tokens - len(prompt)),
        temperature=float(rng.randrange(2)),
        seed=rng.randrange(1000),
        stop_token=rng.randrange(VOCAB_SIZE),
        num_children=rng.choice([1, 1, 1, 2, 4]),
        leaves_after_s=rng.uniform(0, 3.0) if rng.random() < 0.15 else None,
        cancelled_after_s=rng.uniform(0, 3.0) if rng.random() < 0.15 else None,
    )


def _draw_fault(rng: random.Random, shape: ClusterShape) -> Fault:
    prefill = [f"prefill-{index}" for index in range(shape.num_prefill)]
    decode = [f"decode-{index}" for index in range(shape.num_decode)]
    routers = [f"router-{index}" for index in range(shape.num_routers)]
    workers = prefill + decode
    kind = rng.choice(FAULTS)
    at_s = rng.uniform(0, STORM_S)
    if kind in ("kill", "stop"):
        target = rng.choice([*workers, *workers, rng.choice(routers), "controller"])
        return Fault(at_s=at_s, kind=kind, target=target, seconds=rng.choice([0.3, 4.0, 12.0, 30.0]))
    if kind in ("cut", "partition"):
        other = rng.choice([rng.choice(workers), rng.choice(routers)])
        target = rng.choice(routers) if other in workers else "controller"
        if prefill and rng.random() < 0.3 and kind == "partition":
            target, other = rng.choice(decode), rng.choice(prefill)
        return Fault(at_s=at_s, kind=kind, target=target, other=other, seconds=rng.choice([0.5, 4.0, 15.0]))
    if kind == "disk-full":
        return Fault(at_s=at_s, kind=kind, target="controller", seconds=rng.uniform(1.0, 10.0))
    target = rng.choice(prefill or decode if kind == "other-weights" else workers)
    return Fault(at_s=at_s, kind=kind, target=target, seconds=rng.choice([0.5, 3.0, 12.0]))
