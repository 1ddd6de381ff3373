"""What explains a difference: a snapshot that is not at its end, for one."""

from __future__ import annotations

from typing import Any

import pytest

from pipelines.verify.explanations import Explanations
from pipelines.verify.result import KeyDifference, KeyVerdict


@pytest.mark.parametrize("kind", [KeyVerdict.MISSING, KeyVerdict.EXTRA, KeyVerdict.DIFFERENT])
@pytest.mark.parametrize("is_being_read", [True, False])
def test_what_a_snapshot_has_not_read_waits(monkeypatch: pytest.MonkeyPatch, kind: KeyVerdict, is_being_read: bool) -> None:
    """Rows of before a gap are old until the snapshot that fills it is read to its end."""
    unused: Any = None
    known = {
        "_incomplete": lambda *_: set(),
        "_quarantined": lambda _: set(),
        "keeps_rows": lambda _: False,
        "_is_being_read": lambda _: is_being_read,
    }
    for name, said in known.items():
        monkeypatch.setattr(Explanations, name, said)
    (found,) = Explanations(unused, unused, has_source=True).explained([KeyDifference("1", kind)])
    assert found.kind is (KeyVerdict.WAITING if is_being_read else kind)
