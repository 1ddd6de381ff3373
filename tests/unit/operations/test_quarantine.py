"""Corrections of events in quarantine: each text is of one document."""

from __future__ import annotations

from typing import Any

import pytest

from cdc_core import errors
from pipelines.operations import quarantine

CHUNK = "snapshot:s1:1"
HELD: list[dict[str, Any]] = [
    {"resume_token": CHUNK, "key": key, "after": text, "updateDescription": None} for key, text in (("1", "{"), ("2", "["))
]


def _after(corrections: dict[str, dict[str, str]]) -> list[str]:
    quarantine._check(HELD, None, corrections)
    return [quarantine._corrected(row, corrections)["after"] for row in HELD]


def test_a_corrected_document_of_a_chunk_is_no_other_of_its_documents() -> None:
    """All documents of a snapshot's chunk have one token; the `_id` says which one is meant, whatever its number's type."""
    assert _after({CHUNK: {"after": '{"_id": {"$numberLong": "2"}, "v": 5}'}}) == [
        "{",
        '{"_id": {"$numberLong": "2"}, "v": 5}',
    ]


@pytest.mark.parametrize("text", ['{"_id": 3}', '{"v": 5}'])
def test_a_correction_of_no_single_document_is_refused(text: str) -> None:
    """It is of none of them, or could be of any."""
    with pytest.raises(errors.SettingsError, match=f"{CHUNK}.after: the _id of one of the documents"):
        _after({CHUNK: {"after": text}})
