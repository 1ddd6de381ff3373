from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import kills, processes


@pytest.mark.timeout(2400)
def test_killed_at_any_moment_nothing_is_lost_and_nothing_twice(tmp_path: Path, mongodb_uri: str, database: Any) -> None:
    """After three kills of each layer bronze has exactly the recorded tokens, each once, and gold equals the source."""
    pipeline = processes.Pipeline(tmp_path, mongodb_uri, database.name).write_settings()
    outcome = kills.run(pipeline, kills.Torment(rounds=3, before=500, rate=20), say=print)
    assert outcome.faults == {}
    assert outcome.kills == {"capture": 3, "silver": 3, "gold": 3}
    assert outcome.events > 100
