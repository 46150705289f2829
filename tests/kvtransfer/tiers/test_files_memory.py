"""The faults of files in memory.

Goal of the state machine: after any operations and crashes, the names are those of one moment since the directory's
last fsync, and each file holds one of the contents that it had, sector by sector, since its last fsync. Method: a
dictionary of files beside the real thing, each with the list of contents that a crash may leave.
"""

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.errors import TierFilesError
from kvtransfer.tiers.files_memory import SECTOR_BYTES, FileFaults, MemoryFiles

OLD, NEW = b"o" * (4 * SECTOR_BYTES), b"n" * (4 * SECTOR_BYTES)


def _outcomes(act: Callable[[MemoryFiles], None], look: Callable[[MemoryFiles], object]) -> set[object]:
    """What is found after a crash, over many seeds."""
    found: set[object] = set()
    for seed in range(60):
        files = MemoryFiles(seed=seed)
        act(files)
        files.crash()
        found.add(look(files))
    return found


def _old(files: MemoryFiles) -> None:
    files.pwrite("a", 0, OLD)
    files.fsync("a")
    files.fsync_directory()


def test_every_prefix_of_sectors_is_left_when_power_fails_during_a_write() -> None:
    def act(files: MemoryFiles) -> None:
        _old(files)
        files.pwrite("a", 100, NEW[: 3 * SECTOR_BYTES])

    ends = [100, SECTOR_BYTES, 2 * SECTOR_BYTES, 3 * SECTOR_BYTES, 3 * SECTOR_BYTES + 100]
    torn = {(OLD[:100] + NEW[: end - 100] + OLD[end:]) for end in ends}
    assert _outcomes(act, lambda files: files.pread("a", 0, 9999)) == torn


def test_bytes_and_name_are_there_when_both_were_synced() -> None:
    assert _outcomes(_old, lambda files: files.pread("a", 0, 9999)) == {OLD}


def test_new_file_may_be_gone_or_torn_when_only_one_of_two_was_synced() -> None:
    def write_and_sync(files: MemoryFiles) -> None:
        files.pwrite("a", 0, OLD)
        files.fsync("a")

    def write_and_name(files: MemoryFiles) -> None:
        files.pwrite("a", 0, OLD)
        files.fsync_directory()

    assert _outcomes(write_and_sync, lambda files: tuple(files.names())) == {(), ("a",)}
    sizes = _outcomes(write_and_name, lambda files: files.size_bytes("a"))
    assert sizes == {number * SECTOR_BYTES for number in range(5)}


def test_rename_may_be_lost_when_the_directory_was_not_synced() -> None:
    def act(files: MemoryFiles) -> None:
        _old(files)
        files.pwrite("new", 0, NEW)
        files.fsync("new")
        files.fsync_directory()
        files.rename("new", "a")

    def look(files: MemoryFiles) -> tuple[str, ...]:
        return (*files.names(), files.pread("a", 0, 1).decode())

    assert _outcomes(act, look) == {("a", "new", "o"), ("a", "n")}


def test_removed_file_may_come_back_when_the_directory_was_not_synced() -> None:
    def act(files: MemoryFiles) -> None:
        _old(files)
        files.remove("a")

    assert _outcomes(act, lambda files: tuple(files.names())) == {(), ("a",)}


def test_disk_is_the_same_when_the_seed_is_the_same() -> None:
    def run(seed: int) -> list[bytes]:
        files, found = MemoryFiles(seed=seed), []
        for _ in range(10):
            _old(files)
            files.pwrite("a", 0, NEW)
            files.crash()
            found.append(files.pread("a", 0, 9999))
        return found

    assert run(1) == run(1) != run(2)


def test_write_fails_and_overwriting_still_works_when_the_disk_is_full() -> None:
    files = MemoryFiles(faults=FileFaults(capacity_bytes=1000))
    files.pwrite("a", 0, bytes(600))
    with pytest.raises(TierFilesError, match="no space left") as caught:
        files.pwrite("b", 0, bytes(401))
    assert caught.value.kind == "full" and files.free_bytes() == 0
    files.pwrite("a", 0, b"x" * 600)
    files.remove("b")
    assert files.free_bytes() == 400
    files.pwrite("a", 600, bytes(400))
    with pytest.raises(TierFilesError, match="no space left"):
        files.pwrite("a", 5000, b"x")
    assert files.size_bytes("a") == 1000


def test_operations_fail_as_often_as_asked_when_the_disk_has_errors() -> None:
    def num_failed(operation: Callable[[MemoryFiles], object], faults: FileFaults) -> int:
        files, failed = MemoryFiles(seed=3), 0
        files.pwrite("a", 0, b"abc")
        files.faults = faults
        for _ in range(200):
            try:
                operation(files)
            except TierFilesError as error:
                assert error.kind == "failed"
                failed += 1
        return failed

    assert 20 < num_failed(lambda files: files.pread("a", 0, 1), FileFaults(read_error_rate=0.2)) < 60
    assert 20 < num_failed(lambda files: files.pwrite("a", 0, b"xyz"), FileFaults(write_error_rate=0.2)) < 60
    assert num_failed(lambda files: files.rename("a", "b"), FileFaults(write_error_rate=1.0)) == 200
    assert num_failed(lambda files: files.remove("a"), FileFaults(write_error_rate=1.0)) == 200
    assert num_failed(lambda files: files.fsync("a"), FileFaults(fsync_error_rate=1.0)) == 200
    assert num_failed(lambda files: files.fsync_directory(), FileFaults(fsync_error_rate=1.0)) == 200
    assert num_failed(lambda files: files.pread("a", 0, 1), FileFaults(write_error_rate=1.0)) == 0


def test_failed_write_has_written_a_prefix_when_read_back() -> None:
    lengths = set()
    for seed in range(40):
        files = MemoryFiles(seed=seed, faults=FileFaults(write_error_rate=1.0))
        with pytest.raises(TierFilesError):
            files.pwrite("a", 0, b"abc")
        assert b"abc".startswith(files.pread("a", 0, 9))
        lengths.add(files.size_bytes("a"))
    assert lengths == {0, 1, 2, 3}


def test_bytes_may_be_lost_for_good_when_an_fsync_failed_though_the_next_did_not() -> None:
    def act(files: MemoryFiles) -> None:
        _old(files)
        files.pwrite("a", 0, NEW)
        files.faults.fsync_error_rate = 1.0
        with pytest.raises(TierFilesError):
            files.fsync("a")
        files.faults.fsync_error_rate = 0.0
        files.fsync("a")
        assert files.pread("a", 0, 9999) == NEW

    found = _outcomes(act, lambda files: files.pread("a", 0, 9999))
    assert found - {NEW} and all(isinstance(one, bytes) and len(one) == len(NEW) for one in found)


class _Model:
    """One file: the contents that it may have after a crash, the newest last."""

    def __init__(self, content: bytes = b"") -> None:
        self.contents = [content]

    def write(self, offset: int, data: bytes) -> None:
        ends = [*range(SECTOR_BYTES - offset % SECTOR_BYTES, len(data), SECTOR_BYTES), len(data)]
        for end in ends if data else []:
            before = self.contents[-1].ljust(offset, b"\0")
            self.contents.append(before[:offset] + data[:end] + before[offset + end :])


NAMES = ["a", "b", "c", "d"]
PLACES = st.integers(0, 3 * SECTOR_BYTES)


class CrashingDisk(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, _Model] = {}
        self.moments = [self.model]
        """The directory at each moment that a crash may lead back to."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.files = MemoryFiles(seed=seed)
        for name in NAMES:
            self.pwrite(name, 0, 1, name.encode())
        self.fsync_directory()

    def _renamed(self, model: dict[str, _Model]) -> None:
        self.model = model
        self.moments.append(model)

    @rule(name=st.sampled_from(NAMES), offset=PLACES, size=PLACES, letter=st.sampled_from([b"x", b"y", b"z"]))
    def pwrite(self, name: str, offset: int, size: int, letter: bytes) -> None:
        self.files.pwrite(name, offset, letter * size)
        if name not in self.model:
            self._renamed({**self.model, name: _Model()})
        self.model[name].write(offset, letter * size)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fsync(self, data: st.DataObject) -> None:
        name = self._existing(data)
        self.files.fsync(name)
        self.model[name].contents = self.model[name].contents[-1:]

    @rule()
    def fsync_directory(self) -> None:
        self.files.fsync_directory()
        self.moments = [self.model]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), new=st.sampled_from(NAMES))
    def rename(self, data: st.DataObject, new: str) -> None:
        old = self._existing(data)
        self.files.rename(old, new)
        others = {name: one for name, one in self.model.items() if name != old}
        self._renamed({**others, new: self.model[old]})

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = self._existing(data)
        self.files.remove(name)
        self._renamed({other: one for other, one in self.model.items() if other != name})

    @rule()
    def crash(self) -> None:
        self.files.crash()
        found = {name: self.files.pread(name, 0, 99_999) for name in self.files.names()}
        assert any(
            found.keys() == moment.keys() and all(found[name] in moment[name].contents for name in found)
            for moment in self.moments
        )
        self.model = {name: _Model(content) for name, content in found.items()}
        self.moments = [self.model]

    @invariant()
    def reads_are_of_the_newest(self) -> None:
        assert self.files.names() == sorted(self.model)
        for name, one in self.model.items():
            assert self.files.pread(name, 0, 99_999) == one.contents[-1]
            assert self.files.size_bytes(name) == len(one.contents[-1])

    def _existing(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.model)))


TestCrashingDisk = CrashingDisk.TestCase
