from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import processes, statements, torment


@pytest.mark.timeout(7200)
def test_a_hundred_faults_of_every_kind_lose_nothing(tmp_path: Path, mongodb_uri: str, database: Any) -> None:
    """Python, the JVM or both killed, one signal or two, a stop past the lease, faults at every boundary of a commit: each event is
    once in bronze, gold equals the source, every table can be read, and no command reports a bug."""
    pipeline = processes.Pipeline(tmp_path, mongodb_uri, database.name).write_settings()
    outcome = torment.run(pipeline, count=100, before=300, rate=20, say=print)
    assert outcome.faults == {}
    assert sum(outcome.struck.values()) >= 100


@pytest.mark.timeout(3600)
def test_a_fault_at_any_statement(tmp_path: Path, mongodb_uri: str, database: Any) -> None:
    """Interrupts, errors and kills away from the boundaries of commits: the next run succeeds, and nothing is lost or doubled."""
    pipeline = processes.Pipeline(tmp_path, mongodb_uri, database.name)
    outcome = statements.run(pipeline, count=24, a_process=12)
    assert outcome.faults == {}
