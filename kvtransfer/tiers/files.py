"""Files of a disk tier, behind a seam: bytes at offsets of named files in one private directory.

    pwrite --> readable at once --fsync(name)--> bytes survive a crash
    create, rename, remove --> seen at once --fsync_directory()--> the name survives a crash

Of what was not made durable, a crash leaves any part. The operating system's files are here; files in memory, with
faults, are in `files_memory`. Knows nothing about blocks, keys or what a file's bytes mean.
"""

import errno
import os
import re
import stat
from pathlib import Path
from typing import Protocol

from core.errors import TierFilesError

NAME_LENGTH_MAX = 128
OPERATION_BYTES_MAX = 64 * 2**20
"""Of one read or write."""
FILE_BYTES_MAX = 2**40
DIRECTORY_NAME = "(the directory)"
"""Stands for the directory in errors."""

FILE_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{NAME_LENGTH_MAX - 1}}}")
"""What a file may be called: no separator, and no dot in front."""

Bytes = bytes | bytearray | memoryview


class Files(Protocol):
    """Used from one thread. A name or range outside the limits is a ValueError; what the disk refuses is a
    TierFilesError, of the kind `missing` when there is no such file.
    """

    def pread(self, name: str, offset: int, size_bytes: int) -> bytes:
        """`size_bytes` bytes from `offset`; fewer only where the file ends."""
        ...

    def pwrite(self, name: str, offset: int, data: Bytes) -> None:
        """Write all of `data`; makes the file if there is none, and fills a gap before `offset` with zeros.

        A write that failed may have written any part. Kind `full` when the disk has no room.
        """
        ...

    def fsync(self, name: str) -> None:
        """Make the file's bytes durable, though not its name. When it fails, what was written since the last one may be
        lost even if a later one succeeds: write it again.
        """
        ...

    def fsync_directory(self) -> None:
        """Make names durable: every file made, renamed or removed so far."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Give `source` the name `target`, whose file, if any, is replaced: a reader finds the one or the other."""
        ...

    def remove(self, name: str) -> None: ...

    def names(self) -> list[str]:
        """Names of all files, sorted."""
        ...

    def size_bytes(self, name: str) -> int: ...

    def free_bytes(self) -> int:
        """Room that the disk has left; a hint, others may use the disk too."""
        ...

    def close(self) -> None:
        """Let go of the directory. Makes nothing durable. Idempotent."""
        ...


def check_name(name: str) -> None:
    """Raise ValueError for what no file of a tier may be called."""
    if not FILE_NAME.fullmatch(name):
        raise ValueError(f"a tier's file cannot be called {name!r}")


def check_range(name: str, offset: int, size_bytes: int) -> None:
    """Raise ValueError for a name or range outside the limits."""
    check_name(name)
    if not 0 <= size_bytes <= OPERATION_BYTES_MAX:
        raise ValueError(f"{size_bytes} bytes of {name} at once: at most {OPERATION_BYTES_MAX} are read or written")
    if not 0 <= offset <= FILE_BYTES_MAX - size_bytes:
        raise ValueError(f"{name} at {offset}: a tier's file has at most {FILE_BYTES_MAX} bytes")


class OsFiles:
    """`Files` of the operating system. The directory is found by path once, then held open.

    A file is opened for each operation. No link is followed. Whether the kernel's late write errors reach `fsync` is
    the kernel's best effort; who must know compares digests.
    """

    def __init__(self, directory: Path) -> None:
        """Makes the directory, mode 0700, if there is none. Raises TierFilesError when it is not private to its owner,
        not the caller's, or cannot be had.
        """
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _failure(str(directory), "opening the directory", error) from error
        found = os.fstat(self._directory)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            self.close()
            cause = f"others may enter it (owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}; wanted: 0700)"
            raise TierFilesError(file=str(directory), operation="opening the directory", cause=cause)

    def pread(self, name: str, offset: int, size_bytes: int) -> bytes:
        check_range(name, offset, size_bytes)
        parts: list[bytes] = []
        try:
            with _Opened(self._directory, name, os.O_RDONLY) as file:
                while size_bytes > 0 and (part := os.pread(file, size_bytes, offset)):
                    parts.append(part)
                    offset, size_bytes = offset + len(part), size_bytes - len(part)
        except OSError as error:
            raise _failure(name, "pread", error) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def pwrite(self, name: str, offset: int, data: Bytes) -> None:
        view = memoryview(data).cast("B")
        check_range(name, offset, len(view))
        try:
            with _Opened(self._directory, name, os.O_WRONLY | os.O_CREAT) as file:
                while view:
                    written = os.pwrite(file, view, offset)
                    if written == 0:
                        raise OSError(errno.EIO, "nothing was written")
                    offset, view = offset + written, view[written:]
        except OSError as error:
            raise _failure(name, "pwrite", error) from error

    def fsync(self, name: str) -> None:
        check_name(name)
        try:
            with _Opened(self._directory, name, os.O_RDONLY) as file:
                os.fsync(file)
        except OSError as error:
            raise _failure(name, "fsync", error) from error

    def fsync_directory(self) -> None:
        try:
            os.fsync(self._directory)
        except OSError as error:
            raise _failure(DIRECTORY_NAME, "fsync", error) from error

    def rename(self, source: str, target: str) -> None:
        check_name(source)
        check_name(target)
        try:
            os.replace(source, target, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except OSError as error:
            raise _failure(source, f"rename to {target}", error) from error

    def remove(self, name: str) -> None:
        check_name(name)
        try:
            os.unlink(name, dir_fd=self._directory)
        except OSError as error:
            raise _failure(name, "remove", error) from error

    def names(self) -> list[str]:
        """What else lies in the directory (another kind, or a name no file of a tier has) is left out."""
        try:
            with os.scandir(self._directory) as entries:
                return sorted(
                    e.name for e in entries if FILE_NAME.fullmatch(e.name) and e.is_file(follow_symlinks=False)
                )
        except OSError as error:
            raise _failure(DIRECTORY_NAME, "list", error) from error

    def size_bytes(self, name: str) -> int:
        check_name(name)
        try:
            return os.stat(name, dir_fd=self._directory, follow_symlinks=False).st_size
        except OSError as error:
            raise _failure(name, "size", error) from error

    def free_bytes(self) -> int:
        try:
            disk = os.fstatvfs(self._directory)
        except OSError as error:
            raise _failure(DIRECTORY_NAME, "free space", error) from error
        return disk.f_bavail * disk.f_frsize

    def close(self) -> None:
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1


class _Opened:
    """One file, open for one operation."""

    def __init__(self, directory: int, name: str, flags: int) -> None:
        self._file = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)

    def __enter__(self) -> int:
        return self._file

    def __exit__(self, *_error: object) -> None:
        os.close(self._file)


def _failure(file: str, operation: str, error: OSError) -> TierFilesError:
    cause = error.strerror or str(error)
    if error.errno == errno.ENOENT:
        return TierFilesError(file=file, operation=operation, cause=cause, kind="missing")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TierFilesError(file=file, operation=operation, cause=cause, kind="full")
    return TierFilesError(file=file, operation=operation, cause=cause)
