"""What `status` reads of a table's history."""

from __future__ import annotations

from pipelines.delta.local_log import Commit
from pipelines.operations import status


def test_a_restore_takes_the_position_back() -> None:
    """What came between the restored version and the RESTORE is undone; what others committed says nothing."""
    history = [Commit(6, 6, None), Commit(5, 5, None, restored=2), *(Commit(n, n, {"to": n * 10}) for n in (4, 3, 2, 1))]
    assert [to for _, to in status._with_position(history)] == [20, 10]
