"""The parts of a report's page, one function per kind of result: tables and charts as HTML.

Every text from a file passes `cell` or the charts, which escape it. Knows nothing about files.
"""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.bench.plots import Charts
from cluster.bench.results import runs_of
from cluster.bench.summary import QUANTILE_STEPS, Numbers

LATENCIES = ("ttft", "tpot", "itl", "e2el")
SERVE_COLUMNS = {
    "run": "run",
    "server": "base_url",
    "model": "model_id",
    "rate, 1/s": "request_rate",
    "concurrency": "max_concurrency",
    "completed": "completed",
    "failed": "failed",
    "s": "duration",
    "requests/s": "request_throughput",
    "output tokens/s": "output_throughput",
    "tokens/s": "total_token_throughput",
    "goodput, 1/s": "request_goodput",
    "SLO attainment": "slo_attainment",
    "client CPU": "client_cpu_share",
}


def cell(value: Any) -> str:
    """A number with four significant digits, or escaped text."""
    if value is None or value == "":
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
    return html.escape(str(value))


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Escapes all of it."""
    head = "".join(f"<th>{cell(header)}</th>" for header in headers)
    lines = ["<tr>" + "".join(f"<td>{cell(value)}</td>" for value in row) + "</tr>" for row in rows]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def figure(svg: str) -> str:
    return f"<figure>{svg}</figure>"


def serve_part(results: Sequence[tuple[str, Numbers]], charts: Charts) -> str:
    """All runs of `bench serve` together, then the comparisons."""
    runs = [{**run, "run": _run_name(name, run)} for name, result in results for run in runs_of(result)]
    rows = [[run.get(key) for key in SERVE_COLUMNS.values()] for run in runs]
    parts = ["<h2>Serving</h2>", table(list(SERVE_COLUMNS), rows)]
    parts += [_failures(run) for run in runs if run.get("failed")]
    headers = ["run", *(f"{stat} {name}, ms" for name in LATENCIES for stat in ("p50", "p90", "p99"))]
    parts.append(table(headers, [[run["run"], *_percentiles(run)] for run in runs]))
    parts += [figure(svg) for svg in _serve_charts(runs, charts)]
    for name, result in results:
        if result["kind"] == "serve-rounds" and result["median_ratios"]:
            parts.append(_ratio_part(name, result, charts))
    return "\n".join(parts)


def _run_name(name: str, run: Numbers) -> str:
    return f"{name}, round {run['round'] + 1}, server {'AB'[run['server']]}" if "round" in run else name


def _percentiles(run: Numbers) -> list[Any]:
    return [
        run.get(f"p{p}_{name}_ms", run.get(f"median_{name}_ms") if p == 50 else None)
        for name in LATENCIES
        for p in (50, 90, 99)
    ]


def _failures(run: Numbers) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in run.get("failures_by_reason", {}).items())
    details = "".join(f"<li>{cell(detail)}</li>" for detail in run.get("failure_details", ()))
    return f'<p class="failed">{cell(run["run"])}: {run["failed"]:d} failed: {cell(reasons)}</p><ul>{details}</ul>'


def _serve_charts(runs: Sequence[Numbers], charts: Charts) -> list[str]:
    drawn = []
    for key, label in (("max_concurrency", "concurrency"), ("request_rate", "offered requests/s")):
        for value in ("output_throughput", "request_goodput", "median_ttft_ms", "median_itl_ms"):
            series = _by_load(runs, key, value)
            if series:
                drawn.append(charts.lines(f"{value} by {label}", label, value, series))
    names = [str(run["run"]) for run in runs]
    for name in ("ttft", "itl"):
        stats = {stat: [_bar(run.get(f"{stat}_{name}_ms")) for run in runs] for stat in ("median", "p99")}
        drawn.append(charts.bars(f"{name.upper()}, ms", "ms", names, stats))
        if curves := _curves(runs, name):
            drawn.append(charts.lines(f"{name.upper()}: share of samples", "ms", "share", curves, has_points=False))
    if any(run.get("request_goodput") is not None for run in runs):
        goodput = {key: [_bar(run.get(key)) for run in runs] for key in ("request_throughput", "request_goodput")}
        drawn.append(charts.bars("Requests per second, and good ones", "1/s", names, goodput))
    return drawn


def _bar(value: float | None) -> float:
    """What was not measured has no bar."""
    return math.nan if value is None else float(value)


def _by_load(runs: Sequence[Numbers], key: str, value: str) -> dict[str, tuple[list[float], list[float]]]:
    """Per server, a value by load; only where there are several loads."""
    series: dict[str, tuple[list[float], list[float]]] = {}
    for server in dict.fromkeys(str(run.get("base_url", "")) for run in runs):
        points = sorted(
            (float(run[key]), float(run[value]))
            for run in runs
            if str(run.get("base_url", "")) == server
            and isinstance(run.get(key), int | float)
            and run.get(value) is not None
        )
        if len({x for x, _ in points}) > 1:
            series[server] = [x for x, _ in points], [y for _, y in points]
    return series


def _curves(runs: Sequence[Numbers], name: str) -> dict[str, tuple[list[float], list[float]]]:
    shares = [step / QUANTILE_STEPS for step in range(QUANTILE_STEPS + 1)]
    found = {str(run["run"]): run.get(f"{name}_quantiles_ms") for run in runs}
    return {label: (values, shares) for label, values in found.items() if values}


def _ratio_part(name: str, result: Numbers, charts: Charts) -> str:
    medians: Mapping[str, Any] = result["median_ratios"]
    first, second = result["base_urls"]
    rows = [[key, *(one["ratios"][key] for one in result["rounds"]), medians[key]] for key in medians]
    order = [f"round {one['round'] + 1} ({'AB' if one['order'] == [0, 1] else 'BA'})" for one in result["rounds"]]
    ratios = {
        key: ([float(one["round"] + 1) for one in result["rounds"]], [one["ratios"][key] for one in result["rounds"]])
        for key in medians
        if medians[key] is not None
    }
    return "\n".join(
        [
            f"<h3>{cell(name)}: B over A</h3><p>A is {cell(first)}, B is {cell(second)}.</p>",
            table(["number", *order, "median"], rows),
            figure(charts.lines("B over A", "round", "ratio", ratios)) if ratios else "",
        ]
    )


def isolation_part(name: str, result: Numbers, charts: Charts) -> str:
    """Streams with and without other prompts."""
    stats = ("median_itl_ms", "p90_itl_ms", "p99_itl_ms", "num_gaps", "client_cpu_share")
    rows = [[part, *(result[part][key] for key in stats)] for part in ("undisturbed", "disturbed")]
    ratios = [[key, result[key]] for key in ("median_itl_ratio", "p99_itl_ratio")]
    curves = _curves([{"run": part, **result[part]} for part in ("undisturbed", "disturbed")], "itl")
    prompts = {**result["prompts"], "run": "prompts that disturb"}
    sent = [[prompts["completed"], prompts["failed"], prompts["median_ttft_ms"], result["disturbing_prompts_per_s"],
             result["capacity_prompts_per_s"]]]  # fmt: skip
    return "\n".join(
        [
            f"<h2>Isolation: {cell(name)}</h2>",
            table(["streams", *stats], rows),
            table(["disturbed over undisturbed", "ratio"], ratios),
            table(["prompts completed", "failed", "median TTFT, ms", "rate, 1/s", "capacity, 1/s"], sent),
            _failures(prompts) if prompts["failed"] else "",
            figure(charts.lines("ITL of the streams: share of gaps", "ms", "share", curves, has_points=False)),
        ]
    )


def engine_part(name: str, result: Numbers, charts: Charts) -> str:
    """Steps by kind beside bare products, and what the machine can do."""
    cases = [(f"decode, {case['rows']} rows, context {case['context']}", case) for case in result["decode"]]
    cases += [(f"prefill, {case['tokens']} tokens after {case['context']}", case) for case in result["prefill"]]
    kinds = list(dict.fromkeys(kind for _, case in cases for kind in case["seconds_by_kind"] if kind != "total"))
    bare = list(dict.fromkeys(name for _, case in cases for name in case["ratio"]))
    rows = [
        [
            label,
            case["seconds"] * 1e3,
            *(case["ratio"].get(name) for name in bare),
            *(case["seconds_by_kind"].get(kind, 0.0) * 1e3 for kind in kinds),
        ]
        for label, case in cases
    ]
    headers = ["step", "ms", *(f"of {name} products" for name in bare), *(f"{kind}, ms" for kind in kinds)]
    stacks = {kind: [case["seconds_by_kind"].get(kind, 0.0) * 1e3 for _, case in cases] for kind in kinds}
    rates = [[key, result[key]] for key in ("read_gb_per_s", "copy_gb_per_s", "digest_gb_per_s")]
    products = [
        [p["dtype"], p["rows"], p["head_rows"], p["seconds"] * 1e3, p["gflop_per_s"]] for p in result["products"]
    ]
    sampler = [[entry["rows"], entry["case"], entry["seconds"] * 1e3] for entry in result["sampler"]]
    return "\n".join(
        [
            f"<h2>Engine: {cell(name)}</h2><p>{cell(result['processor'])}, torch {cell(result['torch'])}</p>",
            table(headers, rows),
            figure(charts.stacks("Steps by kind", "ms", [label for label, _ in cases], stacks)),
            table(["memory", "GB/s"], rates),
            table(["bare products", "rows", "rows of the head", "ms", "GFLOP/s"], products),
            table(["rows sampled", "how", "ms"], sampler),
        ]
    )


def served_part(name: str, result: Numbers, charts: Charts) -> str:
    """Served streams beside bare products."""
    rows = [
        [
            r["round"] + 1,
            r["rows"],
            r["seconds_per_token"] * 1e3,
            r["bare_seconds"] * 1e3,
            r["ratio"],
            r["ttft_seconds"],
        ]
        for r in result["rounds"]
    ]
    medians = [[streams, ratio] for streams, ratio in result["median_ratio"].items()]
    groups = [f"{streams} streams" for streams in result["median_ratio"]]
    return "\n".join(
        [
            f"<h2>Served, beside bare products: {cell(name)}</h2>",
            table(["round", "streams", "ms per token", "bare products, ms", "ratio", "TTFT, s"], rows),
            table(["streams", "median ratio"], medians),
            figure(
                charts.bars(
                    "Served over bare products", "ratio", groups, {"ratio": list(result["median_ratio"].values())}
                )
            ),
        ]
    )
