"""The command line of the bench: `pdcluster bench serve | isolation | engine | report`.

Commands parse, call and print; what they do lies in `cluster.bench`, imported inside the commands so that `--help`
loads none of it. Exit code 1: a request failed, or nothing could be measured. Knows nothing about how anything is
measured.
"""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import click

if TYPE_CHECKING:
    from cluster.bench.client import RequestOptions
    from cluster.bench.summary import Numbers, Objectives

API_KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the key; never a flag, which everybody on the machine could read."""
OWN_FIELDS = frozenset({"model", "prompt", "messages", "max_tokens", "stream", "stream_options", "ignore_eos"})
"""Fields of a request that flags decide."""
EXIT_REQUESTS_FAILED = 1

Command = TypeVar("Command", bound=Callable[..., Any])
Positive = click.IntRange(min=1)
PositiveNumber = click.FloatRange(min=0, min_open=True)


class NumberList(click.ParamType[tuple[int, ...]]):
    """Comma-separated positive integers."""

    name = "N,N,..."

    def __init__(self, at_least: int = 1) -> None:
        self._at_least = at_least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no list of whole numbers such as 1,4,16", param, ctx)
        if min(numbers) < self._at_least:
            self.fail(f"{min(numbers)} is less than {self._at_least}", param, ctx)
        return numbers


class Rate(click.ParamType[float]):
    """A positive number or `inf`."""

    name = "R|inf"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            rate = float(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor inf", param, ctx)
        if not rate > 0:
            self.fail(f"{value} is not positive", param, ctx)
        return rate


def _json_object(ctx: click.Context, param: click.Parameter, value: str) -> dict[str, Any]:
    try:
        fields = json.loads(value)
    except ValueError as error:
        raise click.BadParameter(f"is no JSON: {error}", ctx, param) from error
    if not isinstance(fields, dict):
        raise click.BadParameter("is no JSON object", ctx, param)
    if taken := sorted(OWN_FIELDS & set(fields)):
        raise click.BadParameter(f"{', '.join(taken)}: flags of their own decide", ctx, param)
    return fields


def parse_objectives(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> "Objectives | None":
    from cluster.bench.summary import SLO_METRICS, Objectives

    limits: dict[str, float] = {}
    for item in " ".join(values).split():
        name, _, limit = item.partition(":")
        try:
            limits[name] = float(limit)
        except ValueError as error:
            raise click.BadParameter(f"{item!r} is not NAME:MILLISECONDS", ctx, param) from error
        if name not in SLO_METRICS or not 0 <= limits[name] < math.inf:
            raise click.BadParameter(f"{item!r}: NAME is one of {', '.join(SLO_METRICS)}, the limit finite", ctx, param)
    return Objectives(limits_ms=limits) if limits else None


def parse_percentiles(ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter("is no list such as 50,90,99", ctx, param) from error
    if not all(0 <= number <= 100 for number in numbers):
        raise click.BadParameter("is not within 0 to 100", ctx, param)
    return numbers


def _base_urls(ctx: click.Context, param: click.Parameter, value: tuple[str, ...] | str) -> tuple[str, ...]:
    urls = (value,) if isinstance(value, str) else tuple(value or ())
    if len(urls) > 2:
        raise click.BadParameter("is given more than twice", ctx, param)
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise click.BadParameter(f"{url!r} begins with neither http:// nor https://", ctx, param)
        try:
            urlsplit(url).port  # noqa: B018  (it is parsed when it is asked for)
        except ValueError as error:
            raise click.BadParameter(f"{url!r} is no URL: {error}", ctx, param) from error
    if len(set(url.rstrip("/") for url in urls)) < len(urls):
        problem = "names the same server twice: the second would be asked what the first has in its cache"
        raise click.BadParameter(problem, ctx, param)
    return urls


_RESULT = click.option(
    "--result", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.json", help="Write all numbers there."
)
_SEED = click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of prompts and arrivals."
)


def _request_flags(command: Command) -> Command:
    """Flags of every command that sends requests."""
    for flag in (
        click.option("--model", default="", help="Name of the model; by default the first of /v1/models."),
        click.option("--extra-body", default="{}", callback=_json_object, metavar="JSON", help="More fields to send."),
        click.option("--timeout", type=PositiveNumber, default=600.0, show_default=True, help="Seconds per request."),
        click.option("--check-ids", is_flag=True, help="Ask for token ids and count them, too (return_token_ids)."),
    ):
        command = flag(command)
    return command


@click.group()
def bench() -> None:
    """Measure a server, the engine, or both; make a page of the results."""


@bench.command()
@click.option(
    "--base-url", "base_urls", multiple=True, required=True, callback=_base_urls, help="Of the API; twice compares two."
)
@click.option(
    "--endpoint",
    type=click.Choice(["/v1/completions", "/v1/chat/completions"]),
    default="/v1/completions",
    show_default=True,
    help="Which API is asked.",
)
@_request_flags
@click.option(
    "--dataset", type=click.Choice(["random", "shared-prefix"]), default="random", show_default=True, help="Of prompts."
)
@click.option("--prompts", "form", type=click.Choice(["ids", "text"]), help="Sent as; by default ids, in a chat text.")
@click.option("--num-prompts", type=Positive, default=100, show_default=True, help="Requests per round.")
@click.option("--input-len", type=Positive, default=512, show_default=True, help="Tokens after any shared prefix.")
@click.option("--output-len", type=Positive, default=128, show_default=True, help="Tokens asked for.")
@click.option(
    "--range-ratio", type=click.FloatRange(0, 1, max_open=True), default=0.0, help="Lengths vary by this share."
)
@click.option("--prefix-len", type=Positive, help="Tokens that prompts share (shared-prefix).")
@click.option("--num-prefixes", type=Positive, help="Different shared prefixes (shared-prefix).")
@click.option("--token-ids", "token_ids", default="1000-30000", show_default=True, help="Range of random token ids.")
@_SEED
@click.option("--request-rate", type=Rate(), default=math.inf, help="Requests per second, at random times; or inf.")
@click.option("--burstiness", type=Rate(), default=1.0, help="1: Poisson; less: bursts; inf: evenly spaced.")
@click.option("--max-concurrency", type=Positive, help="Requests at once; more wait in this client.")
@click.option("--num-warmups", type=click.IntRange(min=0), default=0, help="Requests before, which do not count.")
@click.option("--rounds", type=Positive, help="Repetitions with new prompts; 1, or 3 when two servers are compared.")
@click.option("--ignore-eos/--no-ignore-eos", default=True, help="Ask for exactly --output-len tokens, and check that.")
@click.option("--goodput", "objectives", multiple=True, callback=parse_objectives, help="ttft:MS tpot:MS e2el:MS, any")
@click.option("--percentiles", default="50,90,99", callback=parse_percentiles, show_default=True, help="Of latencies.")
@click.option("--save-detailed", is_flag=True, help="Write one entry per request, too.")
@_RESULT
def serve(result: Path | None, **flags: Any) -> None:
    """Send prompts to a server and measure its answers; two servers get the same prompts in alternating rounds.

    An API key is taken from the environment variable OPENAI_API_KEY.
    """
    from cluster.bench.serve import ServeOptions, num_failed, run_bench_serve
    from core.clock import SystemClock

    urls = flags["base_urls"]
    numbers = run_bench_serve(
        ServeOptions(
            base_urls=urls,
            requests=_requests(flags, endpoint=flags["endpoint"], ignore_eos=flags["ignore_eos"]),
            workload=_workload(flags),
            request_rate=flags["request_rate"],
            burstiness=flags["burstiness"],
            max_concurrency=flags["max_concurrency"],
            num_warmups=flags["num_warmups"],
            rounds=flags["rounds"] or (3 if len(urls) == 2 else 1),
            objectives=flags["objectives"],
            percentiles=flags["percentiles"],
            has_details=flags["save_detailed"],
            api_key=os.environ.get(API_KEY_VARIABLE),
        ),
        SystemClock(),
        click.echo,
    )
    _finish(numbers, result, num_failed(numbers))


@bench.command()
@click.option("--base-url", "base_urls", required=True, callback=_base_urls, help="Of the API.")
@_request_flags
@click.option("--streams", type=Positive, default=4, show_default=True, help="That decode all the time.")
@click.option("--stream-input-len", type=Positive, default=64, show_default=True, help="Tokens of their prompts.")
@click.option("--stream-output-len", type=Positive, default=1900, show_default=True, help="Tokens they ask for.")
@click.option("--prompt-len", type=Positive, default=1500, show_default=True, help="Tokens of each disturbing prompt.")
@click.option(
    "--load", type=PositiveNumber, default=0.6, show_default=True, help="Its rate, as a share of prefill capacity."
)
@click.option("--capacity-prompts", type=Positive, default=8, show_default=True, help="Sent to measure capacity.")
@click.option("--window", type=PositiveNumber, default=15.0, show_default=True, help="Seconds of each window.")
@click.option(
    "--pairs", type=click.IntRange(min=1), default=3, show_default=True, help="Of a quiet window and one not."
)
@_SEED
@_RESULT
def isolation(result: Path | None, **flags: Any) -> None:
    """Measure what arriving prompts do to the token gaps of streams that already run."""
    from cluster.bench.isolation import IsolationOptions, run_bench_isolation
    from core.clock import SystemClock

    options = IsolationOptions(
        base_url=flags["base_urls"][0],
        requests=_requests(flags),
        num_streams=flags["streams"],
        stream_input_len=flags["stream_input_len"],
        stream_output_len=flags["stream_output_len"],
        prompt_len=flags["prompt_len"],
        load=flags["load"],
        capacity_prompts=flags["capacity_prompts"],
        window_s=flags["window"],
        num_pairs=flags["pairs"],
        seed=flags["seed"],
        api_key=os.environ.get(API_KEY_VARIABLE),
    )
    numbers = run_bench_isolation(options, SystemClock(), click.echo)
    click.echo(f"median ratio {numbers['median_itl_ratio']:.3f}, p99 ratio {numbers['p99_itl_ratio']:.3f}")
    _finish(numbers, result, int(numbers["prompts"]["failed"]))


@bench.command()
@click.option("--model", default="smollm2", show_default=True, help="Bundled name, GGUF file or directory.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True, help="Of it."
)
@click.option("--numerics", type=click.Choice(["exact", "fast"]), default="exact", show_default=True, help="Of it.")
@click.option("--threads", type=Positive, default=1, show_default=True, help="Of the model and of bare products.")
@click.option("--block-size", type=Positive, default=16, show_default=True, help="Token positions of a KV block.")
@click.option("--streams", type=NumberList(), default="1,4,16", show_default=True, help="Rows of decode steps.")
@click.option("--context", type=NumberList(), default="512", show_default=True, help="Positions they attend to.")
@click.option("--chunks", type=NumberList(), default="128,512", show_default=True, help="Tokens of prefill steps.")
@click.option("--prefill-context", type=NumberList(0), default="0", show_default=True, help="Positions before a chunk.")
@click.option(
    "--bare", type=click.Choice(["float32", "bfloat16"]), multiple=True, help="Dtypes of bare products; --dtype's own."
)
@click.option("--repeats", type=Positive, default=9, show_default=True, help="Of each case; with --base-url rounds.")
@click.option("--base-url", "base_urls", callback=_base_urls, help="Compare this cluster's streams with bare products.")
@_SEED
@_RESULT
def engine(result: Path | None, **flags: Any) -> None:
    """Measure the steps of a model on this machine beside bare matrix products of the same shapes.

    With --base-url: the served streams of a running cluster beside the same products.
    """
    from cluster.bench.engine import ServedOptions, bench_engine, run_bench_served
    from core.clock import SystemClock
    from engine.measure import EngineGrid
    from engine.model.catalog import resolve_model

    path = resolve_model(flags["model"], Path.cwd())
    bare, threads, repeats = flags["bare"] or (flags["dtype"],), flags["threads"], flags["repeats"]
    if flags["base_urls"]:
        served = ServedOptions(
            base_url=flags["base_urls"][0],
            path=path,
            dtype=bare[0],
            threads=threads,
            streams=flags["streams"],
            context=flags["context"][0],
            rounds=repeats,
            seed=flags["seed"],
            api_key=os.environ.get(API_KEY_VARIABLE),
        )
        _finish(run_bench_served(served, SystemClock(), click.echo), result, 0)
        return
    grid = EngineGrid(
        path=path,
        dtype=flags["dtype"],
        numerics=flags["numerics"],
        threads=threads,
        block_size=flags["block_size"],
        streams=flags["streams"],
        contexts=flags["context"],
        chunks=flags["chunks"],
        prefill_contexts=flags["prefill_context"],
        bare_dtypes=tuple(bare),
        repeats=repeats,
    )
    _finish(bench_engine(grid, SystemClock(), click.echo), result, 0)


@bench.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default="report.html",
    show_default=True,
    help="The page to write.",
)
def report(results: tuple[Path, ...], output: Path) -> None:
    """Make one HTML page with tables and plots of RESULTS; it needs no network and no other file."""
    from cluster.bench.report import render_report
    from cluster.bench.results import read_result, write_text

    write_text(output, render_report([(path.name, read_result(path)) for path in results]))
    click.echo(f"wrote {output}")


def _requests(flags: dict[str, Any], **more: Any) -> "RequestOptions":
    from cluster.bench.client import RequestOptions

    return RequestOptions(
        model=flags["model"],
        has_token_ids=flags["check_ids"],
        extra_body=flags["extra_body"],
        timeout_s=flags["timeout"],
        **more,
    )


def _workload(flags: dict[str, Any]) -> Any:
    from cluster.bench.workload import Workload

    is_shared = flags["dataset"] == "shared-prefix"
    if not is_shared and (flags["prefix_len"] or flags["num_prefixes"]):
        raise click.UsageError("--prefix-len and --num-prefixes need --dataset shared-prefix")
    is_chat = flags["endpoint"] == "/v1/chat/completions"
    if is_chat and flags["form"] == "ids":
        raise click.UsageError("--prompts ids needs --endpoint /v1/completions: a chat takes text only")
    low, _, high = flags["token_ids"].partition("-")
    if not (low.isdecimal() and high.isdecimal() and int(low) <= int(high)):
        raise click.UsageError(f"--token-ids {flags['token_ids']!r} is not LOW-HIGH")
    return Workload(
        dataset=flags["dataset"],
        form=flags["form"] or ("text" if is_chat else "ids"),
        num_prompts=flags["num_prompts"],
        input_len=flags["input_len"],
        output_len=flags["output_len"],
        range_ratio=flags["range_ratio"],
        prefix_len=(flags["prefix_len"] or 256) if is_shared else 0,
        num_prefixes=(flags["num_prefixes"] or 1) if is_shared else 1,
        token_id_min=int(low),
        token_id_max=int(high),
        seed=flags["seed"],
    )


def _finish(numbers: "Numbers", result: Path | None, num_failed: int) -> None:
    """Write the file before the exit code says that requests failed."""
    from cluster.bench.results import write_result

    if result is not None:
        write_result(result, numbers)
        click.echo(f"wrote {result}")
    if num_failed:
        click.echo(f"error: {num_failed} requests failed; the numbers count the others only", err=True)
        click.get_current_context().exit(EXIT_REQUESTS_FAILED)
