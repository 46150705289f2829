"""The bench as people type it: what it refuses, its exit codes, its files, and what it never loads."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import cluster.cli
from tests.cluster.bench.fake_server import FakeAnswer, FakeServer, plain_answer, serving

URL = "http://127.0.0.1:1"


def run(*arguments: str, **environment: str) -> Result:
    result = CliRunner(env=environment).invoke(cluster.cli.main, ["bench", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["serve"], "Missing option '--base-url'"),
        (["serve", "--base-url", "localhost:8000"], "begins with neither http:// nor https://"),
        (["serve", *(["--base-url", URL] * 3)], "is given more than twice"),
        (["serve", "--base-url", "http://localhost:abc"], "is no URL"),
        (["serve", "--base-url", URL, "--base-url", f"{URL}/"], "names the same server twice"),
        (["serve", "--base-url", URL, "--request-rate", "0"], "0 is not positive"),
        (["serve", "--base-url", URL, "--request-rate", "nan"], "nan is not positive"),
        (["serve", "--base-url", URL, "--burstiness", "x"], "neither a number nor inf"),
        (["serve", "--base-url", URL, "--goodput", "ttft"], "is not NAME:MILLISECONDS"),
        (["serve", "--base-url", URL, "--goodput", "itl:5"], "NAME is one of ttft, tpot, e2el"),
        (["serve", "--base-url", URL, "--goodput", "ttft:nan"], "the limit finite"),
        (["serve", "--base-url", URL, "--percentiles", "50,101"], "within 0 to 100"),
        (["serve", "--base-url", URL, "--percentiles", "nan"], "within 0 to 100"),
        (["serve", "--base-url", URL, "--extra-body", "{"], "is no JSON"),
        (["serve", "--base-url", URL, "--extra-body", "[]"], "is no JSON object"),
        (["serve", "--base-url", URL, "--extra-body", '{"max_tokens": 1}'], "max_tokens: flags of their own decide"),
        (["serve", "--base-url", URL, "--prefix-len", "5"], "need --dataset shared-prefix"),
        (["serve", "--base-url", URL, "--token-ids", "9-3"], "is not LOW-HIGH"),
        (["serve", "--base-url", URL, "--endpoint", "/v1/chat/completions", "--prompts", "ids"], "text only"),
        (["serve", "--base-url", URL, "--range-ratio", "1"], "range"),
        (["engine", "--streams", "1,x"], "is no list of whole numbers"),
        (["engine", "--chunks", "0"], "0 is less than 1"),
        (["isolation", "--base-url", URL, "--pairs", "0"], "range"),
        (["report"], "Missing argument"),
    ],
)
def test_command_line_is_refused_before_anything_is_sent(arguments: list[str], part: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert part in " ".join(result.stderr.split())


def test_error_names_the_file_when_it_is_no_result(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    result = run("report", str(path), "--output", str(tmp_path / "r.html"))
    assert (result.exit_code, list(tmp_path.iterdir())) == (1, [path])
    assert result.stderr.startswith(f"error: Bench of {path}: is no result")


@pytest.mark.process
def test_error_names_the_url_when_nobody_listens() -> None:
    result = run("serve", "--base-url", URL)
    assert result.exit_code == 1
    assert f"error: Bench of {URL}: GET /v1/models failed" in result.stderr


def serve(server: FakeServer, path: Path, *flags: str, **environment: str) -> tuple[Result, Any]:
    with serving(server):
        small = ["--num-prompts", "4", "--input-len", "6", "--output-len", "3"]
        result = run("serve", "--base-url", server.url, *small, *flags, "--result", str(path), **environment)
    return result, json.loads(path.read_text()) if path.exists() else None


@pytest.mark.process
def test_flags_reach_the_requests_and_the_result(tmp_path: Path) -> None:
    server = FakeServer(plain_answer)
    flags = ["--goodput", "ttft:5000 e2el:9000", "--goodput", "tpot:800", "--percentiles", "25,75", "--seed", "3"]
    result, numbers = serve(
        server, tmp_path / "a.json", *flags, "--extra-body", '{"temperature": 0}', "--request-rate", "200",
        "--save-detailed", OPENAI_API_KEY="key-of-the-environment",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "4 completed, 0 failed" in result.stdout and f"wrote {tmp_path / 'a.json'}" in result.stdout
    assert numbers["goodput_slos_ms"] == {"ttft": 5000.0, "e2el": 9000.0, "tpot": 800.0}
    assert numbers["slo_attainment"] == 1.0
    assert numbers["request_rate"] == 200 and numbers["config"]["workload"]["seed"] == 3
    assert "p25_itl_ms" in numbers and "p99_itl_ms" not in numbers
    assert len(numbers["ttfts"]) == 4
    assert {body["temperature"] for body in server.bodies} == {0}
    assert all("Bearer key-of-the-environment" in head for head in server.heads)
    assert "key-of-the-environment" not in json.dumps(numbers) + result.output


@pytest.mark.process
def test_code_is_1_and_the_file_is_written_when_a_request_failed(tmp_path: Path) -> None:
    result, numbers = serve(FakeServer(lambda body: FakeAnswer(pieces=[], status=500)), tmp_path / "a.json")
    assert result.exit_code == 1
    assert "4 requests failed" in result.stderr
    assert numbers["failures_by_reason"] == {"http_status": 4}


@pytest.mark.process
def test_page_is_made_of_results_when_asked(tmp_path: Path) -> None:
    _, numbers = serve(FakeServer(plain_answer), tmp_path / "a.json")
    page = tmp_path / "r.html"
    result = run("report", str(tmp_path / "a.json"), "--output", str(page))
    assert (result.exit_code, result.stdout) == (0, f"wrote {page}\n")
    assert f"{numbers['output_throughput']:.4g}" in page.read_text()


@pytest.mark.process
def test_nothing_heavy_is_loaded_until_a_command_needs_it() -> None:
    code = """
import sys, cluster.cli
for arguments in (["bench", "serve", "-h"], ["bench", "serve", "--base-url", "http://x", "--goodput", "x"]):
    try:
        cluster.cli.main(arguments)
    except SystemExit:
        pass
found = {"torch", "ray", "httpx", "fastapi", "matplotlib"} & set(sys.modules)
assert not found, found
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
