"""Typed reads from the JSON objects of a model directory; what does not fit is an error that names file and field.

Imports no torch. Knows nothing about which fields a model has.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from core.errors import ModelLoadError


class Fields:
    """Typed reads from one JSON object; a value of another type is a ModelLoadError that names it."""

    def __init__(self, directory: Path, file: str, values: Mapping[str, object], prefix: str = "") -> None:
        self._directory, self._file, self._values, self._prefix = directory, file, values, prefix

    def error(self, key: str, problem: str) -> ModelLoadError:
        """The error to raise about `key`."""
        return ModelLoadError(path=self._directory, file=self._file, field=self._prefix + key, problem=problem)

    def get(self, key: str) -> object:
        """The value, None when absent or null."""
        return self._values.get(key)

    def names(self) -> tuple[str, ...]:
        """Names of all values, those that are null too."""
        return tuple(self._values)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = default if self.get(key) is None else self.get(key)
        if type(value) is not int or value <= 0:
            raise self.error(key, "is missing" if value is None else f"must be a positive integer, is {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = default if self.get(key) is None else self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(key, "is missing" if value is None else f"must be a positive number, is {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false."""
        value = default if self.get(key) is None else self.get(key)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, is {value!r}")
        return value

    def part(self, key: str) -> "Fields":
        """A nested object; empty when absent."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, f"must be an object, is {value!r}")
        return Fields(self._directory, self._file, value or {}, f"{self._prefix}{key}.")

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One token id, a list of them, or none."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise self.error(key, f"must hold token ids in [0, {vocab_size}), holds {token!r}")
        return tuple(ids)
