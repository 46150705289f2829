"""Whole clusters on Ray over HTTP: `pdcluster up`, the official client, transformers' tokens, bytes over NIXL."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIStatusError, BadRequestError, NotFoundError, OpenAI

from core.process import COMPUTE_NICENESS

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parent.parent.parent
DATA = ROOT / "tests" / "data"
NEAR_TIE = 1e-4
LOGPROB_TOLERANCE = 1e-3
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
START_TIMEOUT_S = 240


class Running:
    """A cluster that `pdcluster up` started."""

    def __init__(self, config: str, state: Path, name: str, *settings: str) -> None:
        self.name = name
        self.environment = {**os.environ, "PDCLUSTER_STATE": str(state)}
        changes = [f"--set={setting}" for setting in ("router.port=0", f"name={name}", *settings)]
        self.call("up", str(ROOT / "configs" / config), "--detach", *changes)
        status = self.status()
        self.url = str(status["urls"][0])
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)
        self.model = self.client.models.list().data[0].id

    def call(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "cluster.cli", *arguments]
        result = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            cwd=ROOT,
            check=False,
        )
        assert result.returncode == 0, f"{arguments}: {result.stdout}\n{result.stderr}"
        return result.stdout

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.call("status", self.name, "--json"))
        return status

    def metric(self, name: str, worker: str) -> float:
        """A worker's counter as of its last heartbeat, once it stopped changing."""
        text = httpx.get(f"{self.url}/metrics").text
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith(name) and f'worker="{worker}"' in line
        )

    def settled(self, name: str, worker: str, expected: float) -> float:
        """The counter, after it had time to reach what is expected."""
        deadline = time.monotonic() + 10
        while self.metric(name, worker) != expected and time.monotonic() < deadline:
            httpx.get(f"{self.url}/health")
        return self.metric(name, worker)


@pytest.fixture(scope="module")
def disaggregated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running("local.yaml", tmp_path_factory.mktemp("state"), "test-1p1d")
    yield running
    running.call("down", running.name)


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running("colocated.yaml", tmp_path_factory.mktemp("state"), "test-colocated")
    yield running
    running.call("down", running.name)


def _golden(file: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = json.loads((DATA / file).read_text())["items"]
    return items


def _complete(running: Running, item: dict[str, Any], max_tokens: int) -> tuple[list[int], list[float]]:
    answer = running.client.completions.create(
        model=running.model,
        prompt=item["prompt_token_ids"],
        max_tokens=max_tokens,
        temperature=0,
        logprobs=5,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    return list(choice.token_ids), list(choice.logprobs.token_logprobs)  # type: ignore[attr-defined]


def test_golden_prompts_give_transformers_tokens_over_http(disaggregated: Running) -> None:
    for item in _golden("smollm2-135m-golden.json"):
        top = item["top5_logprobs_first10"]
        tokens, logprobs = _complete(disaggregated, item, len(top))
        for index, candidates in enumerate(top):
            (expected, best), (_second, second) = candidates[0], candidates[1]
            if tokens[index] != expected:
                assert best - second <= NEAR_TIE
                break
            assert abs(logprobs[index] - best) <= LOGPROB_TOLERANCE
        else:
            assert tokens == item["output_token_ids"][: len(top)]


def test_kv_moves_exactly_as_demanded_for_every_length(disaggregated: Running) -> None:
    layout_bytes = 30 * 2 * 3 * 64 * 4 * 16
    computed = disaggregated.metric("pdcluster_decode_prompt_tokens_computed_total", "decode-0")
    pulled = disaggregated.metric("pdcluster_pulled_bytes_total", "decode-0")
    for item in _golden("smollm2-135m-matrix.json"):
        if not item["name"].startswith("length"):
            continue
        tokens, _logprobs = _complete(disaggregated, item, 2)
        assert tokens == item["output_token_ids"][:2], item["name"]
        length = len(item["prompt_token_ids"])
        demanded = (length - 1) // 16
        computed += length - 16 * demanded
        pulled += demanded * layout_bytes
        assert disaggregated.settled("pdcluster_pulled_bytes_total", "decode-0", pulled) == pulled
        name = "pdcluster_decode_prompt_tokens_computed_total"
        assert disaggregated.settled(name, "decode-0", computed) == computed


def _scenario(running: Running) -> list[Any]:
    """One scripted conversation with the API; everything in it that must not depend on the topology."""
    client: Any = running.client
    model = running.model
    seen: list[Any] = []
    chat = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=24, temperature=0)
    seen.append(("chat", chat.choices[0].message.content, chat.choices[0].finish_reason, chat.usage.total_tokens))
    text = client.completions.create(model=model, prompt="The sea is", max_tokens=12, temperature=0)
    seen.append(("completion", text.choices[0].text, text.choices[0].finish_reason))
    pieces, usage = [], None
    for chunk in client.chat.completions.create(
        model=model,
        messages=QUESTION,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        pieces += [c.delta.content for c in chunk.choices if c.delta.content]
        usage = chunk.usage or usage
    assert usage is not None and "".join(pieces) == chat.choices[0].message.content
    seen.append(("stream", "".join(pieces), usage.prompt_tokens, usage.completion_tokens))
    for seed in (7, 8):
        both = client.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=10, n=2, seed=seed, temperature=1.0, top_p=0.9
        )
        seen.append(("n=2", seed, [c.message.content for c in both.choices]))
    assert seen[-1][2] != seen[-2][2] and len(set(seen[-1][2])) == 2
    stopped = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=24, temperature=0, stop=["Paris"]
    )
    assert "Paris" not in stopped.choices[0].message.content
    seen.append(("stop", stopped.choices[0].message.content, stopped.choices[0].finish_reason))
    likely = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    for entry in likely.choices[0].logprobs.content:
        seen.append(("logprobs", entry.token, [t.token for t in entry.top_logprobs], round(entry.logprob, 3)))
    seen += _errors(running)
    return seen


def _errors(running: Running) -> list[Any]:
    client: Any = running.client
    model = running.model
    seen: list[Any] = []
    calls: list[tuple[type[APIStatusError], dict[str, Any]]] = [
        (NotFoundError, {"model": "nothing", "messages": QUESTION}),
        (BadRequestError, {"model": model, "messages": QUESTION, "temperature": -1}),
        (BadRequestError, {"model": model, "messages": QUESTION, "tools": [{"type": "function"}]}),
        (BadRequestError, {"model": model, "messages": QUESTION, "extra_body": {"temprature": 1}}),
        (BadRequestError, {"model": model, "messages": QUESTION, "max_tokens": 100_000}),
        (BadRequestError, {"model": model, "messages": []}),
    ]
    for kind, arguments in calls:
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**arguments)
        seen.append(("error", caught.value.status_code, caught.value.body))
    return seen


def test_openai_client_sees_the_same_when_disaggregated_and_colocated(
    disaggregated: Running, colocated: Running
) -> None:
    here, there = _scenario(disaggregated), _scenario(colocated)
    assert here == there
    assert "Paris" in here[0][1]


def test_status_tells_what_runs_and_nothing_is_held_when_idle(disaggregated: Running) -> None:
    status = disaggregated.status()
    assert status["state"] == "ready"
    assert {w["role"] for w in status["workers"]} == {"prefill", "decode"}
    for worker in status["workers"]:
        assert worker["epoch"] >= 1 and worker["pid"] and worker["endpoint"].startswith("127.")
    assert (status["requests"]["waiting"], status["requests"]["running"]) == (0, 0)
    assert (status["leases"], status["pins"]) == (0, 0)
    assert all(kv["used"] == 0 for kv in status["kv"].values())
    assert "admission" in status


def test_all_books_are_in_order_when_every_member_is_asked(disaggregated: Running) -> None:
    checked = json.loads(disaggregated.call("status", disaggregated.name, "--check", "--json"))
    assert (checked["problems"], checked["held"]) == ([], [])
    assert set(checked["members"]) == {"router-0", "prefill-0", "decode-0"}
    for member in checked["members"].values():
        books = member["books"]
        assert books["file_descriptors"] > 0 and books["threads"] > 1 and books["resident_mib"] > 10
    assert checked["members"]["prefill-0"]["books"]["leases"] == 0
    assert disaggregated.call("status", disaggregated.name, "--check").endswith("all invariants hold\n")


def test_operator_endpoints_answer(disaggregated: Running) -> None:
    url = disaggregated.url
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/ready").status_code == 200
    assert "version" in httpx.get(f"{url}/version").json()
    assert "pdcluster_pulled_bytes_total" in httpx.get(f"{url}/metrics").text
    assert httpx.get(f"{url}/nothing").json()["error"]["code"] == 404


def test_computing_gives_way_to_whatever_else_the_machine_has_to_do(disaggregated: Running) -> None:
    """The threads that step the models come last; links, transfers and routers do not."""
    status = disaggregated.status()
    for member in (*status["workers"], *status["routers"]):
        stats = [path.read_text() for path in Path(f"/proc/{member['pid']}/task").glob("*/stat")]
        priorities = Counter(int(stat.rsplit(")", 1)[1].split()[16]) for stat in stats)
        assert (priorities[COMPUTE_NICENESS] > 0) == (not member["id"].startswith("router")), member
        assert priorities[0] > priorities[COMPUTE_NICENESS], (member["id"], priorities)
