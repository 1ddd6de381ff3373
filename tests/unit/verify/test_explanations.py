"""What explains a difference: a snapshot that is not at its end, for one."""

from __future__ import annotations

from typing import Any

import pytest

from cdc_core import errors
from pipelines.bronze import registry
from pipelines.verify import bronze_state
from pipelines.verify.explanations import Explanations
from pipelines.verify.result import KeyDifference, KeyVerdict


@pytest.mark.parametrize("kind", [KeyVerdict.MISSING, KeyVerdict.EXTRA, KeyVerdict.DIFFERENT])
@pytest.mark.parametrize("is_being_read", [True, False])
def test_what_a_snapshot_has_not_read_waits(monkeypatch: pytest.MonkeyPatch, kind: KeyVerdict, is_being_read: bool) -> None:
    """Rows of before a gap are old until the snapshot that fills it is read to its end."""
    unused: Any = None
    known = {
        "_in_silver": lambda *_: set(),
        "_left_by_a_drop": lambda _: "false",
        "_quarantined": lambda _: set(),
        "keeps_rows": lambda _: False,
        "_is_being_read": lambda _: is_being_read,
    }
    for name, said in known.items():
        monkeypatch.setattr(Explanations, name, said)
    (found,) = Explanations(unused, unused, has_source=True).explained([KeyDifference("1", kind)])
    assert found.kind is (KeyVerdict.WAITING if is_being_read else kind)


def test_what_is_advised_names_the_one_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """`medallion signal` takes expressions: a dot in a collection's name would stand for any sign."""
    monkeypatch.setattr(bronze_state.bronze_log, "is_whole", lambda *_: False)
    unused: Any = None
    with pytest.raises(errors.DecisionNeeded, match=r"--data-collections 'shop\\.a\\.b'"):
        bronze_state.check_whole(unused, unused, registry.Namespace("shop", "a.b"))
