"""The operating system's files beyond the contract: privacy, short reads and writes, what the system refuses."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from core.errors import TierFilesError
from kvtransfer.tiers.files import OsFiles


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "tier"


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_directory_and_files_are_private_when_made(directory: Path) -> None:
    OsFiles(directory).pwrite("a", 0, b"secret")
    assert (_mode(directory), _mode(directory / "a")) == (0o700, 0o600)


def test_files_are_there_when_the_directory_is_opened_again(directory: Path) -> None:
    files = OsFiles(directory)
    files.pwrite("a", 0, b"kept")
    files.close()
    files.close()
    assert OsFiles(directory).pread("a", 0, 9) == b"kept"


@pytest.mark.parametrize("mode", [0o750, 0o701])
def test_directory_is_refused_when_others_may_enter(directory: Path, mode: int) -> None:
    directory.mkdir(parents=True)
    directory.chmod(mode)
    with pytest.raises(TierFilesError, match=f"{mode:04o}; wanted: 0700"):
        OsFiles(directory)
    assert _mode(directory) == mode


def test_directory_is_refused_when_it_is_a_file(directory: Path) -> None:
    directory.parent.mkdir()
    directory.write_bytes(b"")
    with pytest.raises(TierFilesError, match="opening the directory failed"):
        OsFiles(directory)


def test_what_is_no_file_of_a_tier_is_left_alone(directory: Path) -> None:
    files = OsFiles(directory)
    outside = directory.parent / "outside"
    outside.write_bytes(b"theirs")
    (directory / "link").symlink_to(outside)
    (directory / ".hidden").write_bytes(b"")
    (directory / "folder").mkdir()
    assert files.names() == []
    for operation in (lambda: files.pread("link", 0, 9), lambda: files.pwrite("link", 0, b"ours")):
        with pytest.raises(TierFilesError) as caught:
            operation()
        assert caught.value.kind == "failed"
    assert outside.read_bytes() == b"theirs"


def test_everything_moves_when_the_system_reads_and_writes_in_pieces(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, content = OsFiles(directory), bytes(range(256)) * 3
    real_pread, real_pwrite = os.pread, os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: real_pwrite(file, data[:100], offset))
    monkeypatch.setattr(os, "pread", lambda file, size, offset: real_pread(file, min(size, 7), offset))
    files.pwrite("a", 5, content)
    assert files.pread("a", 5, 1000) == content
    assert files.pread("a", 6, 20) == content[1:21]


def _raise(number: int) -> Callable[..., object]:
    def refuse(*_args: object, **_kwargs: object) -> object:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EIO, "failed")])
def test_kind_says_what_to_do_when_a_write_fails(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: str
) -> None:
    files = OsFiles(directory)
    monkeypatch.setattr(os, "pwrite", _raise(number))
    with pytest.raises(TierFilesError, match=f"'a': pwrite failed: {os.strerror(number)}") as caught:
        files.pwrite("a", 0, b"x")
    assert caught.value.kind == kind


def test_write_ends_with_an_error_when_the_system_writes_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = OsFiles(directory)
    monkeypatch.setattr(os, "pwrite", lambda *_args: 0)
    with pytest.raises(TierFilesError, match="nothing was written"):
        files.pwrite("a", 0, b"x")


def test_error_is_reported_when_the_system_fails_to_sync_or_to_tell(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = OsFiles(directory)
    files.pwrite("a", 0, b"x")
    for name in ("fsync", "fstatvfs", "scandir"):
        monkeypatch.setattr(os, name, _raise(errno.EIO))
    calls: list[tuple[str, Callable[[], object]]] = [
        ("a", lambda: files.fsync("a")),
        ("directory", files.fsync_directory),
        ("directory", files.free_bytes),
        ("directory", files.names),
    ]
    for file, call in calls:
        with pytest.raises(TierFilesError, match=file):
            call()


def test_no_descriptor_is_left_when_operations_fail(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = OsFiles(directory)
    num_open = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "pwrite", _raise(errno.EIO))
    for _ in range(5):
        with pytest.raises(TierFilesError):
            files.pwrite("a", 0, b"x")
        files.pread("a", 0, 1)
    assert len(os.listdir("/proc/self/fd")) == num_open
