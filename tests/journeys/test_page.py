"""The page, as a browser draws it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.page import page
from tests.harness import chromium, page_content

COLOURS = {
    chromium.LIGHT: {"paper": "#fbfaf8", "card": "#ffffff", "plots": "#2f6f8f", "met": "#2e7d4f", "refused": "#b3362b"},
    chromium.DARK: {"paper": "#15181b", "card": "#1e2226", "plots": "#6fb3d2", "met": "#6cc492", "refused": "#ee7a6e"},
}
LOOK = """
const seen = (each) => { const box = each.getBoundingClientRect(); return box.width > 20 && box.height > 20; };
return {
    text: page.body.innerText,
    wide: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    plots: [...page.querySelectorAll('figure svg')].filter(seen).length,
    bars: [...page.querySelectorAll('figure svg rect.rect')].filter((each) => each.getBoundingClientRect().height > 0).length,
    cards: [...page.querySelectorAll('.card')].map((each) => each.getBoundingClientRect().right),
    small: [...page.querySelectorAll('td, .card span')].filter((each) => parseFloat(getComputedStyle(each).fontSize) < 11).length,
    strips: [...page.querySelectorAll('td.strip')].map((each) => [...each.children].map((run) => run.className).join(' ')),
};
"""


def is_mixed(colour: str, ink: str, ground: str) -> bool:
    """Whether a colour is `ink` drawn over `ground` with an opacity of at least a half."""
    channels = [[int(each[at : at + 2], 16) for at in (1, 3, 5)] for each in (colour, ink, ground)]
    return any(
        all(abs(seen - (over * part + under * (100 - part)) / 100) <= 2 for seen, over, under in zip(*channels))
        for part in range(50, 101, 2)
    )


@pytest.mark.parametrize("scheme", (chromium.LIGHT, chromium.DARK))
def test_a_browser_draws_all_of_it(tmp_path: Path, scheme: int) -> None:
    """In the light and the dark scheme the background, the plots, and the verdicts of expectations have their colours."""
    browser, picture = chromium.Chromium(tmp_path, scheme), tmp_path / "page.png"
    browser.screenshot(page.rendered(page_content.seen()), picture, width=1280, height=2600)
    counts = browser.colours(picture)
    colours = COLOURS[scheme]
    drawn = {name: counts.get(colour, 0) for name, colour in colours.items()}
    # Columns are drawn on the card, partly transparent.
    drawn["plots"] = sum(count for seen, count in counts.items() if is_mixed(seen, colours["plots"], colours["card"]))
    assert drawn["paper"] > 400_000 and drawn["plots"] > 10_000, drawn
    assert drawn["met"] > 50 and drawn["refused"] > 50, drawn
    other = COLOURS[chromium.DARK if scheme == chromium.LIGHT else chromium.LIGHT]
    assert counts.get(other["paper"], 0) < 1_000


@pytest.mark.parametrize("width", (1280, 390))
def test_it_can_be_read_on_a_screen_and_a_phone(tmp_path: Path, width: int) -> None:
    """Nothing is wider than the screen, every plot is drawn, no text is tiny, and the pipeline's state can be read."""
    found = chromium.Chromium(tmp_path).asked(page.rendered(page_content.seen()), LOOK, width=width)
    assert found["wide"] <= 0 and max(found["cards"]) <= width
    assert (found["plots"], found["small"]) == (4, 0)
    assert found["bars"] > 90
    assert found["strips"] == ["met met wrong", "met met met", "look"]
    for text in ("shop.<orders>", "12,345", "7 of 900", "not published; the last good version stays", "total INT → DOUBLE"):
        assert text in found["text"], text
