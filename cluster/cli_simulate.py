"""The command line of the simulator: `pdcluster simulate`.

Commands parse, call and print; what they do lies in `cluster.sim`, imported inside the commands so that `--help` loads
none of it. Exit code 1: an invariant did not hold or an answer was wrong. Knows nothing about how it is simulated.
"""

import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from cluster.cli_bench import Positive, PositiveNumber, parse_objectives, parse_percentiles

if TYPE_CHECKING:
    from cluster.sim.chaos import Verdict
    from cluster.sim.coverage import Cell
    from cluster.sim.schedule import Schedule

InputFile = click.Path(exists=True, dir_okay=False, path_type=Path)
OutputFile = click.Path(dir_okay=False, path_type=Path)
EXIT_NOT_CLEAN = 1
LAST_LINES = 40
"""Of the journal, printed of a run that failed."""


@click.command()
@click.option("--scenario", type=click.Choice(["chaos"]), help="Random clusters, requests and faults.")
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Of the first run.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Runs, with consecutive seeds.")
@click.option("--schedule", type=InputFile, help="Repeat a stored run of the scenario.")
@click.option("--shrink", is_flag=True, help="Cut the first run that fails down to what it takes.")
@click.option("--save", type=OutputFile, help="Store the first run that fails.")
@click.option("--log", type=click.File("w"), help="Everything that happens in the first run.")
@click.option("--coverage", is_flag=True, help="Which cells of docs/faults.md were reached how often.")
@click.option("--keep-going", is_flag=True, help="Do not end at the first run that fails.")
@click.option("--config", type=InputFile, help="The cluster that serves a trace.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of the configuration.")
@click.option("--trace", type=InputFile, help="Mooncake JSONL, Azure CSV or a recorded request log.")
@click.option("--synthetic", metavar="requests=N,rate=R,...", help="Arrivals made up: see docs/simulator.md.")
@click.option("--profile", type=InputFile, help="What a step takes: a result of `bench engine`, or a stated one.")
@click.option("--speed", type=PositiveNumber, default=1.0, show_default=True, help="Requests come so much faster.")
@click.option("--num-requests", type=Positive, help="So many: the trace's first, or its shape repeated.")
@click.option("--kv-bytes-per-token", type=Positive, default=46_080, show_default=True, help="Of the model: they move.")
@click.option("--read-gb-per-s", type=PositiveNumber, default=5.0, show_default=True, help="KV reads from one worker.")
@click.option("--link-ms", type=click.FloatRange(min=0), default=0.2, show_default=True, help="Latency of a message.")
@click.option("--cores", type=PositiveNumber, default=math.inf, help="That all workers share; default: one each.")
@click.option("--step-overhead-ms", type=click.FloatRange(min=0), default=0.0, help="Of a step beyond the profile.")
@click.option("--max-output-tokens", type=Positive, help="Of any request; default: as many as it had.")
@click.option("--verify", is_flag=True, help="Compare every answer with the right one.")
@click.option("--goodput", multiple=True, callback=parse_objectives, metavar='"ttft:MS tpot:MS e2el:MS"', help="SLOs.")
@click.option("--percentiles", default="50,90,99", show_default=True, callback=parse_percentiles, help="To print.")
@click.option("--result", type=OutputFile, help="Write every number of a trace's run as JSON.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")
def simulate(**flags: Any) -> None:
    """Run the real cluster on virtual time.

    --scenario chaos plays random clusters with random faults, one for each seed, and asserts the numbered invariants
    all the way; the same seed is the same run, to the last byte of its log.

    --config FILE --trace TRACE --profile FILE serves a trace and prints what `bench serve` would.
    """
    given = [name for name in ("scenario", "schedule", "trace", "synthetic") if flags[name] is not None]
    if len(given) != 1:
        raise click.UsageError("give one of --scenario, --schedule, --trace and --synthetic")
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # members log on a real cluster; here the journal tells
    try:
        if given[0] in ("trace", "synthetic"):
            _replay(flags)
        elif not _chaos(flags):
            raise SystemExit(EXIT_NOT_CLEAN)
    finally:
        logging.disable(before)


def _replay(flags: dict[str, Any]) -> None:
    from cluster.cli_replay import ReplayFlags, run_replay

    for name in ("config", "profile"):
        if flags[name] is None:
            raise click.UsageError(f"to serve requests, --{name} is needed")
    taken = {field.name: flags[field.name] for field in fields(ReplayFlags) if field.name in flags}
    replay_flags = ReplayFlags(**taken, is_verified=flags["verify"], objectives=flags["goodput"])
    run_replay(replay_flags, flags["result"], flags["as_json"])


def _chaos(flags: dict[str, Any]) -> bool:
    """Returns whether every run was clean."""
    failed, num_runs = None, 0
    endings: Counter[str] = Counter()
    cells: Counter[Cell] = Counter()
    for number, drawn in enumerate(_schedules(flags["seed"], flags["seeds"], flags["schedule"])):
        verdict = _play(drawn, flags["log"] if number == 0 else None)
        num_runs += 1
        endings += verdict.endings
        cells += verdict.cells
        _print_verdict(verdict, flags["schedule"], flags["as_json"])
        if verdict.problem:
            failed = failed or drawn
            if not flags["keep_going"]:
                break
    total = {"runs": num_runs, "answers": dict(sorted(endings.items()))}
    click.echo(json.dumps(total) if flags["as_json"] else f"{num_runs} runs, answers: {total['answers']}")
    if flags["coverage"]:
        click.echo("\n".join(_coverage_lines(cells)))
    if failed is None:
        return True
    _keep(failed, flags["shrink"], flags["save"])
    return False


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


def _print_verdict(verdict: "Verdict", stored: Path | None, as_json: bool) -> None:
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
        click.echo("\n".join(_failure_lines(verdict, stored)))


def _failure_lines(verdict: "Verdict", stored: Path | None) -> Iterator[str]:
    yield from verdict.last_lines[-LAST_LINES:]
    yield f"seed {verdict.seed} failed after {verdict.seconds:.3f} s: {verdict.problem}"
    again = f"--scenario chaos --seed {verdict.seed}" if stored is None else f"--schedule {stored}"
    yield f"again: pdcluster simulate {again}"


def _coverage_lines(cells: "Counter[Cell]") -> Iterator[str]:
    from cluster.sim.coverage import COLUMNS, ROWS

    yield f"{'':22}" + "".join(f"{column:>11}" for column in COLUMNS)
    for row in ROWS:
        yield f"{row:22}" + "".join(f"{cells[row, column]:11}" for column in COLUMNS)
    missing = [f"{row}/{column}" for row in ROWS for column in COLUMNS if not cells[row, column]]
    yield f"{len(ROWS) * len(COLUMNS) - len(missing)} of {len(ROWS) * len(COLUMNS)} cells reached"
    if missing:
        yield f"not reached: {', '.join(missing)}"


def _keep(failed: "Schedule", shrink: bool, save: Path | None) -> None:
    import msgspec

    from cluster.bench.results import write_text

    if shrink:
        from cluster.sim.shrink import shrink as cut_down

        failed = cut_down(failed, lambda candidate: bool(_play(candidate, None).problem))
        click.echo(f"it takes {len(failed.faults)} faults and {len(failed.asked)} requests:")
        for item in (failed.shape, *failed.faults, *failed.asked):
            click.echo(f"  {item}")
    if save is not None:
        write_text(save, msgspec.json.format(msgspec.json.encode(failed)).decode() + "\n")
        click.echo(f"again: pdcluster simulate --schedule {save}")
