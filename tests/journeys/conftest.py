"""All tests in this folder are journeys: each takes minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; the hook also gets those of other folders."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.journey)
