"""What the seam of a disk tier's files promises: the same tests over memory and over the operating system."""

from collections.abc import Callable

import pytest

from core.errors import TierFilesError
from kvtransfer.tiers.files import FILE_BYTES_MAX, NAME_LENGTH_MAX, OPERATION_BYTES_MAX, Files


def test_bytes_are_read_back_when_written_at_offsets(files: Files) -> None:
    files.pwrite("a.seg", 0, b"0123456789")
    files.pwrite("a.seg", 4, memoryview(b"XY"))
    files.pwrite("a.seg", 8, bytearray(b"zzzz"))
    assert files.pread("a.seg", 0, 12) == b"0123XY67zzzz"
    assert files.pread("a.seg", 3, 4) == b"3XY6"
    assert files.size_bytes("a.seg") == 12


def test_view_of_wide_items_is_written_as_its_bytes(files: Files) -> None:
    files.pwrite("a", 0, memoryview(b"\1\0\0\0\2\0\0\0").cast("I"))
    assert files.pread("a", 0, 99) == b"\1\0\0\0\2\0\0\0"


def test_read_is_short_only_when_the_file_ends(files: Files) -> None:
    files.pwrite("a", 0, b"abc")
    assert files.pread("a", 1, 100) == b"bc"
    assert files.pread("a", 3, 1) == files.pread("a", 500, 5) == files.pread("a", 0, 0) == b""


def test_gap_is_zeros_when_a_write_begins_behind_the_end(files: Files) -> None:
    files.pwrite("a", 600, b"x")
    assert files.pread("a", 0, 700) == bytes(600) + b"x"


def test_empty_file_is_made_when_nothing_is_written(files: Files) -> None:
    files.pwrite("a", 10, b"")
    assert (files.names(), files.size_bytes("a")) == (["a"], 0)


def test_target_is_replaced_when_a_file_is_renamed(files: Files) -> None:
    files.pwrite("index.new", 0, b"new")
    files.pwrite("index", 0, b"older")
    files.fsync("index.new")
    files.rename("index.new", "index")
    files.fsync_directory()
    assert files.names() == ["index"]
    assert files.pread("index", 0, 10) == b"new"
    files.rename("index", "index")
    assert files.pread("index", 0, 10) == b"new"


def test_file_is_gone_when_removed_and_empty_when_made_again(files: Files) -> None:
    files.pwrite("b", 0, b"1")
    files.pwrite("a", 0, b"2")
    assert files.names() == ["a", "b"]
    files.remove("b")
    assert files.names() == ["a"]
    files.pwrite("b", 1, b"3")
    assert files.pread("b", 0, 9) == b"\0003"


ON_A_FILE: dict[str, Callable[[Files, str], object]] = {
    "pread": lambda files, name: files.pread(name, 0, 1),
    "pwrite": lambda files, name: files.pwrite(name, 0, b"x"),
    "fsync": lambda files, name: files.fsync(name),
    "rename": lambda files, name: files.rename(name, "other"),
    "rename-to": lambda files, name: files.rename("there", name),
    "remove": lambda files, name: files.remove(name),
    "size": lambda files, name: files.size_bytes(name),
}


@pytest.mark.parametrize("operation", [name for name in ON_A_FILE if name not in ("pwrite", "rename-to")])
def test_error_names_file_and_operation_when_the_file_is_missing(files: Files, operation: str) -> None:
    with pytest.raises(TierFilesError, match=f"'gone'.*{operation}") as caught:
        ON_A_FILE[operation](files, "gone")
    assert caught.value.kind == "missing" and caught.value.retryable
    assert files.names() == []


BAD_NAMES = ["", ".", "..", ".hidden", "a/b", "/a", "../a", "a\0", "a\n", "ä", "-a", "a b", "a" * (NAME_LENGTH_MAX + 1)]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_name_is_refused_when_it_could_leave_the_directory_or_hide(files: Files, name: str) -> None:
    files.pwrite("there", 0, b"x")
    for operation in ON_A_FILE.values():
        with pytest.raises(ValueError, match="called"):
            operation(files, name)
    assert files.names() == ["there"]


def test_name_is_taken_when_it_is_as_long_as_may_be(files: Files) -> None:
    name = "A9_" + "x" * (NAME_LENGTH_MAX - 7) + "-1.z"
    files.pwrite(name, 0, b"x")
    assert files.names() == [name]


def test_range_is_refused_when_outside_the_limits(files: Files) -> None:
    for offset, size in ((-1, 1), (0, -1), (0, OPERATION_BYTES_MAX + 1), (FILE_BYTES_MAX, 1)):
        with pytest.raises(ValueError, match="at most"):
            files.pread("a", offset, size)
    for offset in (-1, FILE_BYTES_MAX):
        with pytest.raises(ValueError, match="at most"):
            files.pwrite("a", offset, b"x")
    assert files.names() == []


def test_room_is_known_when_asked(files: Files) -> None:
    assert files.free_bytes() > 0
