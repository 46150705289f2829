"""The command line of the simulator: `pdcluster simulate`.

Commands parse, call and print; what they do lies in `cluster.sim`, imported inside the commands so that `--help` loads
none of it. Exit code 1: an invariant did not hold or an answer was wrong. Knows nothing about how it is simulated.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

if TYPE_CHECKING:
    from cluster.sim.chaos import Verdict
    from cluster.sim.schedule import Schedule

EXIT_FAILED = 1
LAST_LINES = 40
"""Of the journal, printed of a run that failed."""


@click.command()
@click.option("--scenario", type=click.Choice(["chaos"]), help="Random clusters, requests and faults.")
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Of the first run.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Runs, with consecutive seeds.")
@click.option("--schedule", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Repeat a stored run.")
@click.option("--shrink", is_flag=True, help="Cut the first run that fails down to what it takes.")
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Store the first run that fails.")
@click.option("--log", type=click.File("w"), help="Everything that happens in the first run.")
@click.option("--keep-going", is_flag=True, help="Do not end at the first run that fails.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each run, and one for all.")
def simulate(
    scenario: str | None,
    seed: int,
    seeds: int,
    schedule: Path | None,
    shrink: bool,
    save: Path | None,
    log: TextIO | None,
    keep_going: bool,
    as_json: bool,
) -> None:
    """Run the real cluster on virtual time.

    --scenario chaos plays random clusters with random faults, one for each seed, and asserts the numbered invariants
    all the way; the same seed is the same run, to the last byte of its log.
    """
    if (scenario is None) == (schedule is None):
        raise click.UsageError("give --scenario or --schedule")
    logging.disable(logging.CRITICAL)  # members log on a real cluster; here the journal tells
    failed = None
    endings: Counter[str] = Counter()
    num_runs = 0
    for number, drawn in enumerate(_schedules(seed, seeds, schedule)):
        verdict = _play(drawn, log if number == 0 else None)
        num_runs += 1
        endings += verdict.endings
        _print_verdict(verdict, as_json)
        if verdict.problem:
            failed = failed or drawn
            if not keep_going:
                break
    total = {"runs": num_runs, "answers": dict(sorted(endings.items()))}
    click.echo(json.dumps(total) if as_json else f"{num_runs} runs, answers: {total['answers']}")
    if failed is not None:
        _keep(failed, shrink, save)
        raise SystemExit(EXIT_FAILED)


def _schedules(seed: int, seeds: int, path: Path | None) -> Iterable["Schedule"]:
    import msgspec

    from cluster.sim.schedule import Schedule, draw
    from core.errors import SimulationError

    if path is None:
        return (draw(number) for number in range(seed, seed + seeds))
    try:
        return [msgspec.json.decode(path.read_bytes(), type=Schedule)]
    except msgspec.DecodeError as error:
        raise SimulationError(problem=f"{path} is no stored run: {error}") from error


def _play(schedule: "Schedule", log: TextIO | None) -> "Verdict":
    from cluster.sim.chaos import play

    return play(schedule, log)


def _print_verdict(verdict: "Verdict", as_json: bool) -> None:
    if as_json:
        told = {
            "seed": verdict.seed,
            "problem": verdict.problem,
            "seconds": round(verdict.seconds, 3),
            "answers": dict(sorted(verdict.endings.items())),
            "digest": verdict.digest,
        }
        click.echo(json.dumps(told))
    elif verdict.problem:
        click.echo("\n".join(_failure_lines(verdict)))


def _failure_lines(verdict: "Verdict") -> Iterator[str]:
    yield from verdict.last_lines[-LAST_LINES:]
    yield f"seed {verdict.seed} failed after {verdict.seconds:.3f} s: {verdict.problem}"
    yield f"again: pdcluster simulate --scenario chaos --seed {verdict.seed}"


def _keep(failed: "Schedule", shrink: bool, save: Path | None) -> None:
    import msgspec

    if shrink:
        from cluster.sim.shrink import shrink as cut_down

        failed = cut_down(failed, lambda candidate: bool(_play(candidate, None).problem))
        click.echo(f"it takes {len(failed.faults)} faults and {len(failed.asked)} requests:")
        for item in (failed.shape, *failed.faults, *failed.asked):
            click.echo(f"  {item}")
    if save is not None:
        save.write_bytes(msgspec.json.format(msgspec.json.encode(failed)))
        click.echo(f"again: pdcluster simulate --schedule {save}")
