"""Runs the analysts' notebooks cell by cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PATHS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def run(path: Path) -> list[dict[str, Any]]:
    """Run all code cells in order, and return them as they are in the file."""
    cells = [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    namespace: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"{path.name}:{number}", "exec"), namespace)
    return cells
