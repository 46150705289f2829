"""A disk tier's files in memory, with seeded faults: a stand-in for the operating system's with the same contract.

    current: what is read | durable: what a crash surely leaves | between them: sectors and changes of names, in order

`crash` keeps, of each file, a random prefix of the sectors written since its last fsync, and a random prefix of the
changes of names since the last fsync of the directory. Knows nothing about what a file's bytes mean.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from core.errors import TierFilesError
from kvtransfer.tiers.files import DIRECTORY_NAME, Bytes, check_name, check_range

SECTOR_BYTES = 512
"""What a disk writes wholly or not at all."""


@dataclass(slots=True, kw_only=True)
class FileFaults:
    """What goes wrong. May be changed at any time; the rates are probabilities per operation."""

    capacity_bytes: int = 2**40
    """Of all files together."""
    read_error_rate: float = 0.0
    write_error_rate: float = 0.0
    """Of pwrite, which has then written a prefix, and of rename and remove, which have done nothing."""
    fsync_error_rate: float = 0.0
    """Of a file's, any of whose unsynced sectors are then lost at a crash unless written again, or the directory's."""


@dataclass(eq=False, slots=True)
class _File:
    """One file, whatever its name."""

    current: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    """(offset, bytes of one sector) in the order of writing, since the last fsync."""


class MemoryFiles:
    """See the module. After `crash` it is the disk as the next process finds it."""

    def __init__(self, *, seed: int = 0, faults: FileFaults | None = None) -> None:
        self.faults = faults or FileFaults()
        self._rng = random.Random(seed)
        self._files: dict[str, _File] = {}
        self._durable: Mapping[str, _File] = {}
        self._changes: list[Mapping[str, _File]] = []
        """The whole directory after each change of names since the last fsync of it."""

    def pread(self, name: str, offset: int, size_bytes: int) -> bytes:
        check_range(name, offset, size_bytes)
        file = self._find(name, "pread")
        self._fail(name, "pread", self.faults.read_error_rate)
        return bytes(file.current[offset : offset + size_bytes])

    def pwrite(self, name: str, offset: int, data: Bytes) -> None:
        content = bytes(data)
        check_range(name, offset, len(content))
        if name not in self._files:
            self._change({**self._files, name: _File()})
        file = self._files[name]
        room = self.free_bytes() + len(file.current) - offset
        if content and len(content) > room:
            self._write(file, offset, content[: max(room, 0)])
            raise TierFilesError(file=name, operation="pwrite", cause="no space left", kind="full")
        if self._rng.random() < self.faults.write_error_rate:
            self._write(file, offset, content[: self._rng.randrange(len(content) + 1)])
            raise TierFilesError(file=name, operation="pwrite", cause="seeded fault")
        self._write(file, offset, content)

    def fsync(self, name: str) -> None:
        check_name(name)
        file = self._find(name, "fsync")
        if self._rng.random() < self.faults.fsync_error_rate:
            file.pending = [sector for sector in file.pending if self._rng.random() < 0.5]
            raise TierFilesError(file=name, operation="fsync", cause="seeded fault")
        self._settle(file, len(file.pending))

    def fsync_directory(self) -> None:
        self._fail(DIRECTORY_NAME, "fsync", self.faults.fsync_error_rate)
        self._durable, self._changes = self._files, []

    def rename(self, source: str, target: str) -> None:
        check_name(source)
        check_name(target)
        file = self._find(source, "rename")
        self._fail(source, "rename", self.faults.write_error_rate)
        self._change({name: one for name, one in self._files.items() if name != source} | {target: file})

    def remove(self, name: str) -> None:
        check_name(name)
        self._find(name, "remove")
        self._fail(name, "remove", self.faults.write_error_rate)
        self._change({other: one for other, one in self._files.items() if other != name})

    def names(self) -> list[str]:
        return sorted(self._files)

    def size_bytes(self, name: str) -> int:
        check_name(name)
        return len(self._find(name, "size").current)

    def free_bytes(self) -> int:
        return max(0, self.faults.capacity_bytes - sum(len(file.current) for file in self._files.values()))

    def close(self) -> None:
        """Nothing is held; what was not made durable stays so."""

    def crash(self) -> None:
        """Lose power, and start again with what the disk has."""
        kept = self._rng.randrange(len(self._changes) + 1)
        survivors = self._changes[kept - 1] if kept else self._durable
        self._files = dict(survivors)
        for file in self._files.values():
            self._settle(file, self._rng.randrange(len(file.pending) + 1))
            file.current = bytearray(file.durable)
        self._durable, self._changes = self._files, []

    def _find(self, name: str, operation: str) -> _File:
        file = self._files.get(name)
        if file is None:
            raise TierFilesError(file=name, operation=operation, cause="there is no such file", kind="missing")
        return file

    def _fail(self, name: str, operation: str, rate: float) -> None:
        if self._rng.random() < rate:
            raise TierFilesError(file=name, operation=operation, cause="seeded fault")

    def _change(self, files: dict[str, _File]) -> None:
        self._files = files
        self._changes.append(files)

    def _write(self, file: _File, offset: int, content: bytes) -> None:
        _put(file.current, offset, content)
        while content:
            num_bytes = SECTOR_BYTES - offset % SECTOR_BYTES
            file.pending.append((offset, content[:num_bytes]))
            offset, content = offset + num_bytes, content[num_bytes:]

    def _settle(self, file: _File, num_sectors: int) -> None:
        """Make the first sectors of what is pending durable and forget the rest."""
        for offset, content in file.pending[:num_sectors]:
            _put(file.durable, offset, content)
        file.pending = []


def _put(target: bytearray, offset: int, content: bytes) -> None:
    if content:
        target.extend(bytes(max(0, offset - len(target))))
        target[offset : offset + len(content)] = content
