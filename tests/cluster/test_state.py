"""Records of running clusters: written whole, private, found again, and never about another process of the same id."""

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.state import ClusterRecord, ProcessRef, StateStore, is_alive, is_stale, process_ref
from core.errors import ClusterError


def make_record(name: str = "demo", started: tuple[ProcessRef, ...] = ()) -> ClusterRecord:
    return ClusterRecord(
        name=name, config_path="/etc/demo.yaml", urls=("http://127.0.0.1:8000",), ray_address="127.0.0.2:6379",
        namespace="demo", controller="controller", started=started, up=None, log_dir="/tmp/logs", started_at=1.0,
    )  # fmt: skip


def own_process() -> ProcessRef:
    process = process_ref(os.getpid(), "this test")
    assert process is not None
    return process


def test_record_reads_back_equal_when_written(tmp_path: Path) -> None:
    store, record = StateStore(tmp_path / "state"), make_record(started=(own_process(),))
    store.write(record)
    store.write(record)
    assert store.read("demo") == record
    assert store.names() == ["demo"]


def test_record_is_private_and_alone_when_written(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "state")
    store.write(make_record())
    files = list((tmp_path / "state" / "demo").iterdir())
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600]
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


def test_old_record_stays_when_writing_the_new_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, record = StateStore(tmp_path), make_record()
    store.write(record)

    def fail(handle: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        store.write(replace(record, urls=()))
    assert store.read("demo") == record
    assert len(list((tmp_path / "demo").iterdir())) == 1


def test_record_is_none_when_absent_or_removed(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    assert store.read("demo") is None
    store.write(make_record())
    store.remove("demo")
    store.remove("demo")
    assert store.read("demo") is None
    assert store.names() == []


def test_error_names_the_file_when_a_record_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "cluster.json").write_text('{"name": 1}')
    with pytest.raises(ClusterError, match=r"demo/cluster\.json cannot be read"):
        StateStore(tmp_path).read("demo")


def test_the_only_cluster_is_found_when_no_name_is_given(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    with pytest.raises(ClusterError, match="none is running"):
        store.find(None)
    store.write(make_record("a"))
    assert store.find(None).name == "a"
    store.write(make_record("b"))
    with pytest.raises(ClusterError, match="name one of a, b"):
        store.find(None)
    with pytest.raises(ClusterError, match="'c': is not running; running: a, b"):
        store.find("c")


def test_process_is_not_alive_when_its_id_belongs_to_another_one_now() -> None:
    process = own_process()
    assert is_alive(process)
    assert not is_alive(replace(process, start_ticks=process.start_ticks - 1))


def test_record_is_stale_when_everything_that_was_started_is_gone() -> None:
    alive = own_process()
    gone = replace(alive, start_ticks=alive.start_ticks - 1)
    assert is_stale(make_record(started=(gone,)))
    assert not is_stale(make_record(started=(gone, alive)))
    assert not is_stale(make_record(started=()))


def test_lock_is_refused_when_another_command_holds_it(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    with store.lock("demo"), pytest.raises(ClusterError, match="another pdcluster command"), store.lock("demo"):
        pass
    with store.lock("demo"), store.lock("other"):
        pass


def test_root_is_the_environment_s_when_it_names_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDCLUSTER_STATE", str(tmp_path / "here"))
    assert StateStore.default().log_dir("demo") == tmp_path / "here" / "demo" / "logs"
    monkeypatch.delenv("PDCLUSTER_STATE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert StateStore.default().root == tmp_path / ".local" / "state" / "pdcluster"


def test_error_names_the_directory_when_it_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match=r"file/demo cannot be made .*PDCLUSTER_STATE"):
        StateStore(tmp_path / "file").directory("demo")
