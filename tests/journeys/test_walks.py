from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import walks


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(1, 8))
def test_settings_signals_and_kills_lose_nothing_in_silence(
    spark: Any, mongodb_uri: str, database: Any, tmp_path: Path, seed: int
) -> None:
    """Every collection is in gold as in the source, or is reported as incomplete; a snapshot repairs it."""
    assert walks.Walk(spark, mongodb_uri, database, tmp_path / "lake", seed, print).run(7) == {}
