"""The course of `up` and `down` against a launcher that starts nothing, on time that only tests move."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from cluster.cli_prepare import Prepared
from cluster.cli_up import READY_TIMEOUT_S, ProgressLines, start_and_wait, take_down, watch
from cluster.state import ClusterRecord, ProcessRef, StateStore
from core.config import parse_config
from core.errors import ClusterError
from engine.model.config import ModelConfig

ENDED = ProcessRef(pid=1, start_ticks=-1, what="ray head")
URL = "http://127.0.0.1:8000"


def member(name: str, state: str, problem: str = "") -> dict[str, Any]:
    return {"id": name, "role": "decode", "epoch": 1, "state": state, "pid": 7, "endpoint": None, "url": URL,
            "problem": problem, "restarts": 0, "status": None}  # fmt: skip


def published(state: str, worker: str, *, problem: str = "") -> dict[str, Any]:
    return {"name": "demo", "state": state, "reason": problem, "workers": [member("decode-0", worker, problem)],
            "routers": [member("router-0", "ready")], "controller": {}}  # fmt: skip


@dataclass
class FakeLauncher:
    """Publishes the given states one after the other, the last one for ever."""

    states: list[dict[str, Any] | ClusterError]
    is_up: bool = True
    calls: list[str] = field(default_factory=list)
    started: tuple[ProcessRef, ...] = ()

    def start(self, prepared: Prepared, store: StateStore, report: object) -> ClusterRecord:
        self.calls.append("start")
        name = prepared.config.name
        return ClusterRecord(
            name=name, config_path="demo.yaml", urls=(), ray_address="127.0.0.2:6379", namespace=name,
            controller="controller", started=self.started, up=None, log_dir="/tmp/logs", started_at=0.0,
        )  # fmt: skip

    def status(self, record: ClusterRecord) -> Mapping[str, Any]:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, ClusterError):
            raise state
        return state

    def audit(self, record: ClusterRecord) -> Mapping[str, Any]:
        raise AssertionError("neither `up` nor `down` audits")

    def stop(self, record: ClusterRecord, report: object) -> None:
        self.calls.append("stop")

    def is_ready(self, url: str) -> bool:
        return self.is_up


@dataclass
class FakeTimer:
    """Waiting moves time, and may run something."""

    time_s: float = 0.0
    on_wait: list[Any] = field(default_factory=list)

    def now(self) -> float:
        return self.time_s

    def wait(self, seconds: float) -> None:
        self.time_s += seconds
        if self.on_wait:
            self.on_wait.pop(0)()


def make_prepared() -> Prepared:
    config = parse_config("schema_version: 1\nname: demo\nmodel: {path: m}\n", file="demo.yaml")
    model = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=9, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=8, rms_norm_eps=1e-5, rope_theta=1e4, rope_scaling=None, max_position_embeddings=64,
        tie_word_embeddings=True, attention_bias=False, mlp_bias=False, bos_token_id=0, eos_token_ids=(1,),
        dtype="float32",
    )  # fmt: skip
    return Prepared(file=Path("demo.yaml"), overrides=(), config=config, model_path=Path("/m"), model=model)


def start(launcher: FakeLauncher, store: StateStore, timer: FakeTimer | None = None) -> tuple[ClusterRecord, list[str]]:
    lines: list[str] = []
    record = start_and_wait(make_prepared(), launcher, store, timer or FakeTimer(), lines.append, up=None)
    return record, lines


def test_each_change_is_one_line_when_a_cluster_becomes_ready(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    states = [published("starting", "starting"), published("starting", "starting"), published("ready", "ready")]
    record, lines = start(FakeLauncher(states=[*states]), store)
    assert [line.split() for line in lines] == [
        ["decode-0", "starting"], ["router-0", "ready"], ["decode-0", "ready", "after", "0.5", "s"],
        ["ready", "after", "0.5", "s:", URL],
    ]  # fmt: skip
    assert store.read("demo") == record
    assert record.urls == (URL,)
    assert "device_gib: 1.0" in (tmp_path / "demo" / "effective.yaml").read_text()


def test_start_goes_on_when_the_controller_does_not_answer_for_a_moment(tmp_path: Path) -> None:
    silent = ClusterError(name="demo", problem="the controller does not answer")
    states: list[Any] = [published("starting", "starting"), silent, published("ready", "ready")]
    record, lines = start(FakeLauncher(states=states), StateStore(tmp_path))
    assert record.urls == (URL,)
    assert "Cluster 'demo': the controller does not answer" in lines


def test_nothing_is_left_when_the_cluster_fails_to_start(tmp_path: Path) -> None:
    launcher, store = (
        FakeLauncher(states=[published("failed", "failed", problem="out of memory")]),
        StateStore(tmp_path),
    )
    with pytest.raises(ClusterError, match="out of memory"):
        start(launcher, store)
    assert (launcher.calls, store.names()) == (["start", "stop"], [])


def test_nothing_is_left_when_the_api_never_becomes_ready(tmp_path: Path) -> None:
    launcher, store = FakeLauncher(states=[published("ready", "ready")], is_up=False), StateStore(tmp_path)
    timer = FakeTimer()
    with pytest.raises(ClusterError, match="was not ready within 600 s"):
        start(launcher, store, timer)
    assert timer.now() >= READY_TIMEOUT_S
    assert (launcher.calls, store.names()) == (["start", "stop"], [])


def test_nothing_is_left_when_interrupted_while_it_starts(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    launcher, store = FakeLauncher(states=[published("starting", "starting")]), StateStore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        start(launcher, store, FakeTimer(on_wait=[interrupt]))
    assert (launcher.calls, store.names()) == (["start", "stop"], [])


def test_second_start_is_refused_when_the_cluster_runs(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    record, _ = start(FakeLauncher(states=[published("ready", "ready")]), store)
    second = FakeLauncher(states=[published("ready", "ready")])
    with pytest.raises(ClusterError, match=f"is running already at {URL}"):
        start(second, store)
    assert (second.calls, store.read("demo")) == ([], record)


def test_start_goes_on_when_the_recorded_cluster_is_gone(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    gone = FakeLauncher(states=[published("ready", "ready")], started=(ENDED,))
    start(gone, store)
    record, _ = start(FakeLauncher(states=[published("ready", "ready")]), store)
    assert store.read("demo") == record


def test_watch_reports_changes_until_another_command_ends_the_cluster(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    record, _ = start(FakeLauncher(states=[published("ready", "ready")]), store)
    silent = ClusterError(name="demo", problem="the controller does not answer")
    killed = published("degraded", "restarting", problem="killed")
    launcher = FakeLauncher(states=[silent, published("ready", "ready"), silent, killed])
    lines: list[str] = []
    timer = FakeTimer(on_wait=[*[lambda: None] * 3, lambda: store.remove("demo")])
    watch(record, launcher, store, timer, lines.append)
    assert lines[:2] == ["Cluster 'demo': the controller does not answer"] * 2
    assert lines[2].split() == ["decode-0", "restarting", "(killed)"]
    assert lines[3] == "cluster demo was ended by another command"


def test_watch_fails_and_forgets_when_the_processes_are_gone(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    launcher = FakeLauncher(states=[published("ready", "ready")])
    record = replace(start(launcher, store)[0], started=(ENDED,))
    store.write(record)
    with pytest.raises(ClusterError, match="its processes ended"):
        watch(record, launcher, store, FakeTimer(), print)
    assert store.names() == []


def test_down_stops_nothing_when_the_record_is_stale(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    launcher = FakeLauncher(states=[published("ready", "ready")], started=(ENDED,))
    record, lines = start(launcher, store)
    take_down(record, launcher, store, lines.append)
    assert (launcher.calls, store.names()) == (["start"], [])
    assert "was gone already" in lines[-1]


def test_worker_is_still_starting_when_no_router_heard_it_yet() -> None:
    progress = ProgressLines(0.0)
    progress.lines(published("starting", "starting"), 1.0)
    assert progress.lines(published("ready", "silent"), 2.0) == []
    assert progress.lines(published("ready", "ready"), 4.0) == ["decode-0    ready after 3.0 s"]
    assert progress.lines(published("ready", "silent"), 9.0) == ["decode-0    silent"]


def test_progress_is_silent_when_nothing_changed() -> None:
    progress = ProgressLines(0.0)
    status = published("starting", "starting")
    assert len(progress.lines(status, 1.0)) == 2
    assert progress.lines(status, 2.0) == []
