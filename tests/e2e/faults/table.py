"""The fault matrix as `docs/faults.md` has it: rows, columns, one outcome in each cell.

Knows nothing about how an outcome comes about.
"""

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent.parent / "docs" / "faults.md"
CONTROLLER_ROWS = frozenset({"controller-killed", "controller-stopped"})
"""Rows whose cells need a controller on stage."""
_OUTCOME = re.compile(r"recovered|unaffected|cancelled|error event|refused \d{3}( \+ Retry-After)?")
_ID = re.compile(r"[a-z][a-z-]*")


def read_table(text: str) -> dict[tuple[str, str], str]:
    """(row, column) -> outcome of the one table whose first heading is `fault`. Raises ValueError for anything odd."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("| fault |")]
    if len(starts) != 1:
        raise ValueError(f"{len(starts)} tables begin with '| fault |', not one")
    columns = _cells(lines[starts[0]])[1:]
    cells: dict[tuple[str, str], str] = {}
    for line in lines[starts[0] + 2 :]:
        if not line.startswith("|"):
            break
        row, *outcomes = _cells(line)
        row = row.strip("`")
        if len(outcomes) != len(columns) or not _ID.fullmatch(row):
            raise ValueError(f"not a row of {len(columns)} outcomes: {line}")
        for column, outcome in zip(columns, outcomes, strict=True):
            if not _ID.fullmatch(column) or not _OUTCOME.fullmatch(outcome):
                raise ValueError(f"{row}, {column}: '{outcome}' is no outcome")
            if (row, column) in cells:
                raise ValueError(f"{row}, {column} is there twice")
            cells[row, column] = outcome
    return cells


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
