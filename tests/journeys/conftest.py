"""All tests of this folder are journeys: they take minutes each."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what was collected here; the hook is given the tests of other folders, too."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.journey)
