"""The commands as people type them: what they print, their exit codes, and what they never load."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import httpx
import msgspec
import pytest
from click.testing import CliRunner, Result

import cluster.chat
import cluster.cli
from cluster.cli_prepare import Prepared
from cluster.state import ClusterRecord, StateStore
from core.ids import Epoch, RouterId
from core.messages import Audited, AuditReport

URL = "http://127.0.0.1:8000"


class FakeLauncher:
    """A cluster that is always ready and remembers that it was stopped."""

    def __init__(self) -> None:
        self.stopped: list[str] = []
        self.found: dict[str, Any] = {"reports": {}, "members": {}, "settle_s": 0.0}

    def start(self, prepared: Prepared, store: StateStore, report: object) -> ClusterRecord:
        raise AssertionError("no test here starts a cluster")

    def status(self, record: ClusterRecord) -> Mapping[str, Any]:
        return {"name": record.name, "state": "ready", "reason": "", "workers": [], "routers": [], "controller": {}}

    def audit(self, record: ClusterRecord) -> Mapping[str, Any]:
        return self.found

    def stop(self, record: ClusterRecord, report: object) -> None:
        self.stopped.append(record.name)

    def is_ready(self, url: str) -> bool:
        return True


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> FakeLauncher:
    fake = FakeLauncher()
    monkeypatch.setattr(cluster.cli, "_launcher", lambda: fake)
    return fake


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateStore:
    monkeypatch.setenv("PDCLUSTER_STATE", str(tmp_path / "state"))
    return StateStore.default()


def run(*arguments: str, typed: str = "") -> Result:
    result = CliRunner().invoke(cluster.cli.main, arguments, input=typed)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def record_cluster(store: StateStore, name: str = "demo") -> None:
    store.write(
        ClusterRecord(
            name=name, config_path="demo.yaml", urls=(URL,), ray_address="127.0.0.2:1", namespace=name,
            controller="controller", started=(), up=None, log_dir="/tmp/logs", started_at=0.0,
        )
    )  # fmt: skip


def test_every_problem_is_one_line_and_code_2_when_the_yaml_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("schema_version: 1\nname: a\nmodel: {path: m}\nprefil: {}\ndecode: {workers: x}\n")
    for command in ("validate", "up"):
        result = run(command, str(file))
        assert result.exit_code == 2
        assert result.stderr.splitlines() == [
            f"error: {file}:4: prefil: unknown key. Did you mean `prefill`?",
            f"error: {file}:5: decode.workers: expected an integer, found the string 'x'",
        ]


def test_code_is_2_when_the_model_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("schema_version: 1\nname: a\nmodel: {path: nowhere}\n")
    result = run("validate", str(file))
    assert result.exit_code == 2
    assert "model.path: is neither a model directory" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["statu"], "Did you mean 'status'?"),
        (["status", "--jsn"], "Did you mean '--json'?"),
        (["validate"], "Missing argument"),
    ],
)
def test_command_line_is_refused_with_a_suggestion_when_it_is_wrong(arguments: list[str], part: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert part in result.stderr


def test_status_prints_json_or_a_table_when_a_cluster_runs(store: StateStore, launcher: FakeLauncher) -> None:
    record_cluster(store)
    assert json.loads(run("status", "--json").stdout)["state"] == "ready"
    assert run("status", "demo").stdout.startswith("cluster demo: ready\n")


def test_check_prints_the_books_and_its_code_says_whether_all_holds(store: StateStore, launcher: FakeLauncher) -> None:
    record_cluster(store)
    router = Audited(number=1, member=RouterId("router-0"), epoch=Epoch(1), problems=(), books={"in_flight": 0})
    report = AuditReport(number=1, members=(router,))
    launcher.found["reports"] = {"router-0": msgspec.to_builtins(report)}
    launcher.found["members"] = {"router-0": "ready"}
    result = run("status", "--check")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "all invariants hold")
    assert json.loads(run("status", "--check", "--json").stdout)["members"]["router-0"]["books"] == {"in_flight": 0}
    launcher.found["members"]["decode-0"] = "restarting"
    result = run("status", "--check")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (1, "PROBLEM decode-0 (restarting): did not answer")
    result = run("status", "--check", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["problems"] == ["decode-0 (restarting): did not answer"]


@pytest.mark.parametrize("command", ["status", "down", "chat"])
def test_code_is_1_when_nothing_runs(store: StateStore, launcher: FakeLauncher, command: str) -> None:
    result = run(command)
    assert result.exit_code == 1
    assert result.stderr == "error: Cluster 'any': none is running; `pdcluster up FILE` starts one\n"


def test_down_ends_only_the_named_cluster_when_two_run(store: StateStore, launcher: FakeLauncher) -> None:
    record_cluster(store, "a")
    record_cluster(store, "b")
    assert run("down").exit_code == 1
    assert run("down", "b").exit_code == 0
    assert (launcher.stopped, store.names()) == (["b"], ["a"])


def serve_chat(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Answers every question with its number; returns the bodies received."""
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        bodies.append(json.loads(request.content))
        chunk = {"choices": [{"delta": {"content": f"answer {len(bodies)}"}, "finish_reason": "stop"}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 1}, "pdcluster_timing": {"ttft_s": 0.25}}
        return httpx.Response(200, text=f"data: {json.dumps(chunk)}\n\ndata: {json.dumps(usage)}\n\ndata: [DONE]\n\n")

    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(cluster.chat, "open_client", lambda url: httpx.Client(base_url=url, transport=transport))
    return bodies


def test_prompt_is_answered_with_timing_when_asked(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    record_cluster(store)
    bodies = serve_chat(monkeypatch)
    result = run("chat", "demo", "--timing", "--temperature", "0", "What", "is", "it?")
    assert result.exit_code == 0
    assert bodies[0]["messages"] == [{"role": "user", "content": "What is it?"}]
    assert result.stdout.startswith("answer 1\nwhere the time went\n  queue       -\n")
    assert "first token     0.250 s" in result.stdout
    run("chat", "no", "name", "here")
    assert bodies[1]["messages"][0]["content"] == "no name here"


def test_conversation_grows_when_there_is_no_prompt(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    record_cluster(store)
    bodies = serve_chat(monkeypatch)
    result = run("chat", "--system", "Be brief.", typed="one\n\ntwo\n")
    assert (result.exit_code, result.stdout) == (0, "answer 1\nanswer 2\n")
    roles = [message["role"] for message in bodies[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert bodies[1]["messages"][2]["content"] == "answer 1"


def test_code_is_130_when_interrupted(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> FakeLauncher:
        raise KeyboardInterrupt

    record_cluster(store)
    monkeypatch.setattr(cluster.cli, "_launcher", interrupt)
    assert run("status").exit_code == 130


def test_printing_goes_on_when_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_pipe(line: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(click, "echo", break_pipe)
    cluster.cli.print_line("ending cluster demo")


def test_every_command_and_option_has_help_when_listed() -> None:
    commands: list[click.Command] = [cluster.cli.main]
    for command in commands:
        assert command.help, command.name
        assert all(option.help for option in command.params if isinstance(option, click.Option)), command.name
        commands += command.commands.values() if isinstance(command, click.Group) else []
    assert len(commands) == 16


@pytest.mark.process
def test_nothing_heavy_is_loaded_when_only_checking(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("schema_version: 1\nname: a\nmodel: {path: nowhere}\n")
    code = f"""
import sys, cluster.cli
try:
    cluster.cli.main(["validate", {str(file)!r}])
except SystemExit as end:
    assert end.code == 2, end.code
found = {{"torch", "ray", "httpx", "fastapi", "transformers"}} & set(sys.modules)
assert not found, found
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
