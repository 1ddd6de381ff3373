"""A headless Chromium: screenshots of a page, and the results of scripts in it."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
NAMED = "MEDALLION_TEST_CHROMIUM"
LIGHT, DARK = 1, 0
# No host name is resolved: a page must contain all that it shows.
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


def binary() -> str:
    """Its command. Raises AssertionError if there is none: the tests of the page must not be skipped."""
    found = next(filter(None, [os.environ.get(NAMED), *map(shutil.which, NAMES)]), None)
    assert found, f"no Chromium: apt-get install chromium, or name one in {NAMED}"
    return found


@dataclass(frozen=True)
class Chromium:
    """A browser with its own profile below `folder`, which prefers light or dark pages."""

    folder: Path
    scheme: int = LIGHT

    def _run(self, page: str, *options: str) -> str:
        file = self.folder / "asked.html"
        file.write_text(page, encoding="utf-8")
        profile = f"--user-data-dir={self.folder / 'profile'}"
        scheme = f"--blink-settings=preferredColorScheme={self.scheme}"
        command = [binary(), *OPTIONS, profile, scheme, *options, file.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    def screenshot(self, page: str, path: Path, *, width: int, height: int) -> None:
        """Save a screenshot of the page in a window of this size."""
        self._run(page, f"--screenshot={path}", f"--window-size={width},{height}")
        assert path.exists()

    def asked(self, page: str, script: str, *, width: int, height: int = 2000) -> Any:
        """The result of a script, through JSON. Its `page` is the page's document in a viewport of this size."""
        return self._answer(
            f'<iframe id="page" style="width:{width}px;height:{height}px;border:0" srcdoc="{html.escape(page)}"></iframe>',
            f"const page = document.getElementById('page').contentDocument; {script}",
        )

    def colours(self, picture: Path) -> dict[str, int]:
        """The number of pixels of each colour (`#rrggbb`) in a picture."""
        data = base64.b64encode(picture.read_bytes()).decode()
        return dict(
            self._answer(
                f'<img id="seen" src="data:image/png;base64,{data}">',
                """const image = document.getElementById('seen'), canvas = document.createElement('canvas');
                canvas.width = image.naturalWidth; canvas.height = image.naturalHeight;
                const pen = canvas.getContext('2d'); pen.drawImage(image, 0, 0);
                const bytes = pen.getImageData(0, 0, canvas.width, canvas.height).data, counts = {};
                for (let at = 0; at < bytes.length; at += 4) {
                    const value = bytes[at] * 65536 + bytes[at + 1] * 256 + bytes[at + 2];
                    counts[value] = (counts[value] || 0) + 1;
                }
                return Object.entries(counts).map(([value, count]) =>
                    ['#' + Number(value).toString(16).padStart(6, '0'), count]);""",
            )
        )

    def _answer(self, body: str, script: str) -> Any:
        told = self._run(
            f"<!doctype html><meta charset=utf-8>{body}<pre id=told></pre><script>addEventListener('load', () => "
            f"{{ document.getElementById('told').textContent = JSON.stringify((() => {{ {script} }})()); }})</script>",
            "--dump-dom",
            "--virtual-time-budget=20000",
        )
        found = re.search(r'<pre id="told">(.*?)</pre>', told, re.DOTALL)
        assert found is not None and found[1], told[-500:]
        return json.loads(html.unescape(found[1]))
