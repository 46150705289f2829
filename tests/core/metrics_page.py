"""The tables of docs/metrics.md as the catalogue has them. `python -m tests.core.metrics_page` writes them there."""

from collections.abc import Sequence
from pathlib import Path

from core.metrics import PROCESS_METRICS, ROUTER_METRICS, VIEW_METRICS, VLLM_METRICS, WORKER_METRICS, Metric

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
TABLES = {
    "router": ROUTER_METRICS,
    "vllm": VLLM_METRICS,
    "worker": WORKER_METRICS,
    "view": VIEW_METRICS,
    "process": PROCESS_METRICS,
}
"""By the name of their place on the page."""


def render_table(metrics: Sequence[Metric]) -> str:
    """One row per metric; a label's closed set of values stands behind it."""
    rows = ["| name | kind | unit | labels | meaning |", "|---|---|---|---|---|"]
    for metric in metrics:
        common = ("router",) if metric.owner == "router" else ("router", "worker", "role")
        own = [label for label in metric.labels if label not in common]
        labels = [f"{label} ({', '.join(metric.values[label])})" if label in metric.values else label for label in own]
        cells = (f"`{metric.name}`", metric.kind, metric.unit, "; ".join(labels), metric.help)
        rows.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(rows)


def render_page(page: str) -> str:
    """The page with its tables renewed. ValueError when a place for one is missing."""
    for name, metrics in TABLES.items():
        begin, end = f"<!-- table {name} -->", f"<!-- end {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"docs/metrics.md has no place for the table '{name}': {begin} ... {end}")
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{render_table(metrics)}\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(render_page(PAGE.read_text()))
