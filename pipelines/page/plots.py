"""Plots as inline SVG with colours from the page's CSS variables, for light and dark mode."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pygal
from pygal.style import Style

# pygal installs an import finder without find_spec: every later import would warn.
sys.meta_path[:] = [each for each in sys.meta_path if type(each).__name__ != "PluginImportFixer"]

_STYLE = Style(
    background="transparent",
    plot_background="transparent",
    foreground="var(--ink)",
    foreground_strong="var(--ink)",
    foreground_subtle="var(--faint)",
    colors=("var(--first)", "var(--second)", "var(--third)"),
    font_family="inherit",
    label_font_size=13,
    major_label_font_size=13,
    legend_font_size=14,
)
_NEEDLESS = re.compile(r"<!--.*?-->|<script.*?</script>", re.DOTALL)


@dataclass(frozen=True)
class Series:
    """A named series with one value per label; None leaves a gap."""

    name: str
    values: Sequence[float | None]


def columns(labels: Sequence[str], series: Sequence[Series], *, unit: str) -> str:
    """A column chart; shows a few of the labels."""
    return _over(pygal.Bar(**_shape(), show_minor_x_labels=False), labels, series, unit)


def lines(labels: Sequence[str], series: Sequence[Series], *, unit: str) -> str:
    """A line chart, with gaps for None; shows a few of the labels."""
    return _over(pygal.Line(**_shape(), show_minor_x_labels=False), labels, series, unit)


def _over(chart: Any, labels: Sequence[str], series: Sequence[Series], unit: str) -> str:
    chart.x_labels_major = list(labels[:: max(1, len(labels) // 4)])
    return _inline(chart, labels, series, unit)


def bars(names: Sequence[str], series: Sequence[Series], *, unit: str) -> str:
    """A chart of horizontal bars, one for each name and series."""
    height = 70 + 30 * max(1, len(names)) * len(series)
    return _inline(pygal.HorizontalBar(**(_shape() | {"height": height})), [*map(_label, names)], series, unit)


LABEL = 28
"""Characters of a name that leave room for its bar on a phone; the tables of the page have the whole name."""


def _label(name: str) -> str:
    """A name as a label: shortened in the middle, without characters that SVG forbids."""
    text = "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in name)
    return text if len(text) <= LABEL else f"{text[: LABEL // 2]}…{text[1 - LABEL // 2 :]}"


def _shape() -> dict[str, object]:
    return {
        "style": _STYLE,
        "js": [],
        "disable_xml_declaration": True,
        "width": 480,
        "height": 240,
        "explicit_size": False,
        "dots_size": 2,
        "show_legend": False,
        "truncate_label": -1,
        "include_x_axis": True,
        "margin": 8,
        "margin_right": 24,
        "show_y_guides": True,
        "show_x_guides": False,
        "max_scale": 4,
    }


def _inline(chart: Any, labels: Sequence[str], series: Sequence[Series], unit: str) -> str:
    """The chart of the series as SVG without external references; it scales to the page."""
    chart.value_formatter = lambda value: f"{value:,.4g} {unit}".strip()
    chart.x_labels = list(labels)
    for each in series:
        chart.add(each.name, list(each.values))
    return _NEEDLESS.sub("", chart.render(is_unicode=True)).replace("stroke:black", "stroke:var(--faint)")
