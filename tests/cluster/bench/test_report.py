"""The page of results: valid, complete, in need of nothing else, and safe against what stands in a file."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cluster.bench.plots import Charts
from cluster.bench.record import FailureReason, RequestRecord
from cluster.bench.report import render_report
from cluster.bench.results import read_result, runs_of, write_result
from cluster.bench.summary import Numbers, Objectives, median_ratios, ratios, spread, summarise
from core.errors import BenchError

pytestmark = pytest.mark.process
"""Drawing takes seconds, and on a new machine matplotlib asks a program for its fonts."""

EVIL = '<script>alert("x")</script>&$a_b$'
VOID = {"meta", "br", "path", "use", "rect", "line"}


class Page(HTMLParser):
    """Checks that every element is closed in order; collects text, attributes and ids."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def run_result(name: str, concurrency: int | None, gap_s: float, *, num_failed: int = 0, **more: Any) -> Numbers:
    complete = [
        RequestRecord(
            started_s=0.1 * i, num_prompt_tokens=8, num_output_tokens=3,
            token_times_s=[0.1 * i + gap_s * k for k in (2, 3, 4)],
        )
        for i in range(5)
    ]  # fmt: skip
    failed = [
        RequestRecord(started_s=0.0, num_prompt_tokens=8, failure=FailureReason.ERROR_EVENT, detail=EVIL)
    ] * num_failed
    numbers = summarise([*complete, *failed], 7.0, Objectives(limits_ms={"ttft": 100.0}))
    return {
        "kind": "serve", "base_url": name, "model_id": EVIL, "request_rate": "inf", "max_concurrency": concurrency,
        "client_cpu_share": 0.0625, **numbers, **more,
    }  # fmt: skip


def pair_result() -> Numbers:
    rounds = [
        [run_result("http://a", 4, 0.01, round=i), run_result("http://b", 4, 0.01 * (i + 2), round=i)] for i in (0, 1)
    ]
    found = [ratios(*runs) for runs in rounds]
    return {
        "kind": "serve-rounds", "base_urls": ["http://a", "http://b"], "median_ratios": median_ratios(found),
        "rounds": [
            {"round": i, "order": [[0, 1], [1, 0]][i], "runs": runs, "ratios": found[i]}
            for i, runs in enumerate(rounds)
        ],
    }  # fmt: skip


def isolation_result() -> Numbers:
    quiet, loud = ({"num_gaps": 4, "client_cpu_share": 0.03125, **spread("itl", g, (50, 90, 99))}
                   for g in ([0.1, 0.2], [0.3, 0.7]))  # fmt: skip
    return {
        "kind": "isolation", "undisturbed": quiet, "disturbed": loud, "median_itl_ratio": 3.3125,
        "p99_itl_ratio": 3.4875, "capacity_prompts_per_s": 1.8125, "disturbing_prompts_per_s": 1.0875,
        "prompts": summarise([], 1.0), "windows": [],
    }  # fmt: skip


def engine_result() -> Numbers:
    case = {
        "seconds": 0.03175, "seconds_by_kind": {"attention": 0.0125, "other": 0.01925, "total": 0.03175},
        "bare_seconds": {"float32": 0.025}, "ratio": {"float32": 1.27},
    }  # fmt: skip
    return {
        "kind": "engine", "processor": EVIL, "torch": "2.13", "decode": [{"rows": 4, "context": 512, **case}],
        "prefill": [{"tokens": 128, "context": 0, **case}], "read_gb_per_s": 28.25, "copy_gb_per_s": 9.125,
        "products": [{"dtype": "float32", "rows": 4, "head_rows": 4, "seconds": 0.025, "gflop_per_s": 43.75}],
        "sampler": [{"rows": 4, "case": "greedy", "seconds": 0.00025}], "digest_gb_per_s": 2.375,
    }  # fmt: skip


def served_result() -> Numbers:
    one = {"round": 0, "rows": 16, "seconds_per_token": 0.28, "bare_seconds": 0.35, "ratio": 0.8, "ttft_seconds": 1.75}
    return {"kind": "served", "rounds": [one], "median_ratio": {"16": 0.8}}


@pytest.fixture(scope="module")
def text() -> str:
    return render_report(
        [
            (f"{EVIL}.json", run_result(EVIL, 1, 0.01)),
            ("eight.json", run_result(EVIL, 8, 0.02, num_failed=2)),
            ("pair.json", pair_result()),
            ("isolation.json", isolation_result()),
            ("engine.json", engine_result()),
            ("served.json", served_result()),
        ]
    )


def test_page_is_valid_when_every_kind_is_in_it(text: str) -> None:
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>\n")
    assert len(page.ids) == len(set(page.ids)) > 0
    assert page.tags.count("svg") == 13
    targets = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    assert targets and targets <= set(page.ids)


def test_page_needs_nothing_else_when_it_is_opened(text: str) -> None:
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    for tag, name, value in page.attributes:
        assert "//" not in value, f"{tag} {name} names a place outside: {value}"
        assert not name.startswith("on"), f"{tag} {name} is code"
        if name in ("href", "xlink:href", "src"):
            assert value.startswith("#")
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    assert "default-src 'none'" in text


def test_nothing_in_a_file_is_taken_for_markup(text: str) -> None:
    assert "<script" not in text
    assert EVIL in Page(text).text


def test_numbers_of_the_results_are_on_the_page(text: str) -> None:
    words = Page(text).text.split()
    one, eight = run_result("", 1, 0.01), run_result("", 8, 0.02, num_failed=2)
    for run in (one, eight):
        for key in ("request_throughput", "output_throughput", "p99_ttft_ms", "p90_itl_ms", "median_tpot_ms",
                    "slo_attainment", "request_goodput"):  # fmt: skip
            assert f"{run[key]:.4g}" in words, key
    medians = pair_result()["median_ratios"]
    for value in (medians["median_itl_ms"], medians["median_e2el_ms"]):
        assert f"{value:.4g}" in words
    for number in ("3.312", "3.487", "1.812", "0.03125", "31.75", "1.27", "43.75", "28.25", "2.375", "280", "0.0625"):
        assert number in words, number
    assert "2 error_event" in Page(text).text


def test_throughput_is_drawn_over_concurrency_when_there_are_several(text: str) -> None:
    page = Page(text).text
    assert "output_throughput by concurrency" in page
    assert "by offered requests/s" not in page, "all of these runs had the same rate"


def test_same_page_when_drawn_again() -> None:
    results = [("a.json", run_result("http://a", 1, 0.01))]
    assert render_report(results) == render_report(results)


def test_charts_share_no_id() -> None:
    charts = Charts()
    first, second = (charts.lines("t", "x", "y", {"a": ([1.0, 2.0], [1.0, 3.0])}) for _ in range(2))
    assert not set(Page(first).ids) & set(Page(second).ids)


def test_results_of_vllm_are_read_when_they_have_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "vllm.json"
    result = {
        k: v for k, v in run_result("x", 1, 0.01).items() if k not in ("kind", "base_url") and "quantiles" not in k
    }
    path.write_text(json.dumps(result))
    read = read_result(path)
    assert (read["kind"], read["base_url"]) == ("serve", "vllm bench serve")
    Page(render_report([("vllm.json", read)]))


def test_runs_are_found_when_there_are_rounds() -> None:
    assert [(run["round"], run["server"]) for run in runs_of(pair_result())] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{", "no JSON"),
        ("[]", "no result"),
        ('{"kind": "x"}', "no result"),
        ("\xff", "no JSON"),
        ("[" * 10**5, "no JSON"),
    ],
)
def test_file_is_refused_when_it_is_no_result(tmp_path: Path, content: str, part: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(BenchError, match=part):
        read_result(path)


def test_errors_name_the_file_when_it_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"gone/x\.json.*cannot be written: No such file"):
        write_result(tmp_path / "gone" / "x.json", {})
    with pytest.raises(BenchError, match=r"x\.json.*cannot be read: No such file"):
        read_result(tmp_path / "x.json")
