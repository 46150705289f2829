"""Every cell of the fault matrix in `docs/faults.md`: the outcome is the documented one, and nothing stays behind.

RQ-1, RQ-2, KV-1, KV-4, TX-1, TX-2.
"""

import pytest

from tests.e2e.faults.cells import play_cell
from tests.e2e.faults.columns import COLUMNS
from tests.e2e.faults.rows import ROWS
from tests.e2e.faults.table import CONTROLLER_ROWS, PAGE, read_table

TABLE = read_table(PAGE.read_text())


@pytest.mark.parametrize(("row", "column"), [cell for cell in TABLE if cell[0] not in CONTROLLER_ROWS])
def test_outcome_is_the_documented_one_and_nothing_stays_when_a_fault_strikes(row: str, column: str) -> None:
    assert play_cell(ROWS[row], column) == TABLE[row, column]


def test_table_has_every_fault_at_every_point() -> None:
    assert set(TABLE) == {(row, column) for row in {*ROWS, *CONTROLLER_ROWS} for column in COLUMNS}


GOOD = "| fault | credit |\n|---|---|\n| `deadline` | refused 504 |\n"


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace("refused 504", "refused"),
        GOOD.replace("refused 504", "fine"),
        GOOD.replace("refused 504", "refused 504 | cancelled"),
        GOOD + "| `deadline` | cancelled |\n",
        GOOD + GOOD,
        "no table",
    ],
)
def test_table_is_not_taken_when_something_in_it_is_odd(text: str) -> None:
    assert read_table(GOOD) == {("deadline", "credit"): "refused 504"}
    with pytest.raises(ValueError, match=r"not a row|no outcome|twice|not one"):
        read_table(text)
