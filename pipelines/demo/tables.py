"""The demo's report: rows of gold, changes, lag and throughput, and how to query the tables."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cdc_core.tables import layout as tables
from pipelines.delta import local_log, table_history
from pipelines.demo import shop

if TYPE_CHECKING:
    from pipelines.demo.stage import DemoRun, DemoStage

LATEST = "__source_ts_ms"
ROWS, WIDTH = 3, 24
SHOWN = {
    "customers": ("name_first", "name_last", "address_city", "tags", "orders", "last_order"),
    "orders": ("_id", "status", "placed", "pieces", "total", "lines"),
    "products": ("_id", "title", "price", "stock", "weight", "size", "__rescued"),
    "lost_and_found": ("__key", "shelf", "array", "date", "regex", "__rescued"),
}


def show(stage: DemoStage, played: DemoRun, *, screen: Console) -> None:
    """Show the whole report."""
    for collection in shop.COLLECTIONS:
        screen.print(_rows(stage, collection))
    screen.print(_changes(stage))
    screen.print(_one_order(stage))
    screen.print(_passage(stage, played))
    screen.print(_equality(stage))
    _show_how_to_query(stage, screen=screen)


def _rows(stage: DemoStage, collection: str) -> Table:
    """The last changed rows of one gold table."""
    df = stage.spark.table(str(stage.gold(collection)))
    columns = [name for name in SHOWN[collection] if name in df.columns]
    newest_first = df.orderBy(df[LATEST].desc()) if LATEST in df.columns else df
    title = f"gold: {shop.DATABASE}.{collection}, last changed rows ({len(columns)} of {len(df.columns)} columns)"
    table = _table(title, *columns)
    for row in newest_first.select(*(f"`{name}`" for name in columns)).limit(ROWS).collect():
        table.add_row(*map(_cell, row))
    return table


def _table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True, max_width=WIDTH + 36)
    return table


def _cell(value: object) -> Text:
    """One value, cut to the column's width."""
    if hasattr(value, "asDict"):
        value = value.asDict(recursive=True)
    match value:
        case None:
            return Text("null", style="dim")
        case dict():
            text = "{" + ", ".join(f"{key}: {_cell(item)}" for key, item in value.items()) + "}"
        case list():
            text = f"[{len(value)}] " + ", ".join(str(_cell(item)) for item in value)
        case bytes() | bytearray():
            text = f"{len(value)} bytes"
        case float():
            text = f"{value:.6g}"
        case _:
            text = str(value)
    return Text(text if len(text) <= WIDTH else text[: WIDTH - 1] + "…")


def _changes(stage: DemoStage) -> Table:
    """The number of events in bronze, by collection and operation."""
    rows = stage.spark.sql(
        f"SELECT collection, op, count(*) AS events FROM {stage.bronze} WHERE op IS NOT NULL GROUP BY collection, op"
    ).collect()
    counts = {(row.collection, row.op): row.events for row in rows}
    operations = {"r": "snapshot", "c": "inserts", "u": "updates", "d": "deletes"}
    table = _table("bronze: number of events", "collection", *operations.values(), right=tuple(operations.values()))
    for collection in shop.COLLECTIONS:
        table.add_row(collection, *(f"{counts.get((collection, op), 0):,}" for op in operations))
    return table


def _one_order(stage: DemoStage) -> Table:
    """The last events of the order with the most changes."""
    events = f"{stage.bronze} WHERE collection = 'orders' AND op IS NOT NULL"
    rows = stage.spark.sql(
        f"""SELECT key, op, source.ts_ms AS at, updateDescription.updatedFields AS updated,
                   updateDescription.removedFields AS removed
            FROM {events} AND key = (SELECT key FROM {events} GROUP BY key ORDER BY count(*) DESC, key LIMIT 1)
            ORDER BY sequence DESC LIMIT 6"""
    ).collect()
    words = {"r": "read by the snapshot", "c": "inserted", "u": "updated", "d": "deleted"}
    key = rows[0].key if rows else "?"
    table = _table(f"bronze: last events of order {key}", "when", "what", "fields")
    for row in reversed(rows):
        moment = time.strftime("%H:%M:%S", time.gmtime((row.at or 0) / 1000))
        fields = [*_names(row.updated), *(f"-{name}" for name in row.removed or ())]
        table.add_row(moment, words[row.op], ", ".join(fields)[:60])
    return table


def _names(updated: str | None) -> list[str]:
    return list(orjson.loads(updated)) if updated else []


def _passage(stage: DemoStage, played: DemoRun) -> Table:
    """The lag of this run's events in each layer, and each layer's throughput."""
    numbers = ("commits", "events", "events/s", "lag p50", "p95")
    table = _table("lag and throughput of each layer, after the snapshot", "layer", *numbers, right=numbers)
    for passage in passages(stage, since_ms=played.began_ms, until_ms=played.ended_ms):
        lags = (f"{_quantile(passage.lags, part):.1f} s" for part in (0.5, 0.95)) if passage.lags else ("", "")
        table.add_row(passage.layer, f"{passage.commits:,}", f"{len(passage.lags):,}", f"{passage.rate:,.0f}", *lags)
    return table


@dataclass(frozen=True)
class LayerLag:
    """One layer: its number of commits, events per second, and each event's lag behind its operation in seconds, ascending."""

    layer: str
    commits: int
    rate: float
    lags: Sequence[float]


Arrivals = Sequence[tuple[int, int]]
"""The commits of a table in order: the batch of each, and its time in milliseconds since 1970."""


def passages(stage: DemoStage, *, since_ms: int, until_ms: int) -> list[LayerLag]:
    """The lag of the operations in a time span, from the times and positions of the tables' commits."""
    events = stage.spark.sql(
        f"""SELECT collection, batch, coalesce(source.wallTime, source.ts_ms) AS at FROM {stage.bronze}
            WHERE kind = 'change' AND coalesce(source.wallTime, source.ts_ms) BETWEEN {since_ms} AND {until_ms}"""
    ).collect()
    bronze_arrivals = _arrivals(stage, stage.bronze, position="batch", since_ms=since_ms)
    arrivals = {"bronze": dict.fromkeys(shop.COLLECTIONS, bronze_arrivals)} | {
        layer: {name: _arrivals(stage, table(name), position="to", since_ms=since_ms) for name in shop.COLLECTIONS}
        for layer, table in (("silver", stage.silver), ("gold", stage.gold))
    }
    return [
        _passage_of(layer, by_name, [(row.collection, row.batch, row.at) for row in events], since_ms=since_ms)
        for layer, by_name in arrivals.items()
    ]


def _passage_of(
    layer: str, arrivals: Mapping[str, Arrivals], events: Sequence[tuple[str, int, int]], *, since_ms: int
) -> LayerLag:
    arrival_times = [(_arrival(arrivals[collection], batch), event_ms) for collection, batch, event_ms in events]
    lags = sorted(max(0, arrived_ms - event_ms) / 1000 for arrived_ms, event_ms in arrival_times if arrived_ms is not None)
    last_arrival = max((arrived_ms for arrived_ms, _ in arrival_times if arrived_ms is not None), default=since_ms)
    commits = len({arrived_ms for table_arrivals in arrivals.values() for arrived_ms in table_arrivals})
    return LayerLag(layer, commits, len(lags) / max(1.0, (last_arrival - since_ms) / 1000), lags)


def _arrival(arrivals: Arrivals, batch: int) -> int | None:
    """The time of a table's first commit at or after a batch."""
    return next((arrived_ms for position, arrived_ms in arrivals if position >= batch), None)


def _arrivals(stage: DemoStage, table: tables.TableRef, *, position: str, since_ms: int) -> Arrivals:
    commits = sorted(table_history.newest_first(stage.spark, table), key=lambda commit: commit.version)
    return [
        (int(commit.metadata[position]), commit.timestamp_ms)
        for commit in commits
        if commit.metadata and isinstance(commit.metadata.get(position), int)
        if commit.timestamp_ms >= since_ms
    ]


def _quantile(ordered: Sequence[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def _equality(stage: DemoStage) -> Table:
    """The numbers of documents in MongoDB and of rows in gold."""
    table = _table("source and gold", "collection", "documents", "gold rows", "", right=("documents", "gold rows"))
    for collection in shop.COLLECTIONS:
        documents = stage.client[shop.DATABASE][collection].count_documents({})
        rows = stage.spark.table(str(stage.gold(collection))).count()
        same = "[green]equal[/]" if documents == rows else "[red]differ[/]"
        table.add_row(collection, f"{documents:,}", f"{rows:,}", same)
    return table


def queries(table: tables.TableRef) -> dict[str, str]:
    """One line of Python for each reader. Spark SQL needs the table's absolute path."""
    sql = "SELECT status, count(*) AS orders, sum(total) AS total FROM {} GROUP BY status"
    path = _text(near(table.label))
    return {
        "Spark SQL": f'from pipelines.spark import session; session.session("ask").sql({_text(sql.format(table))}).show()',
        "Polars": f'import polars as pl; print(pl.read_delta({path}).group_by("status").agg(pl.len(), pl.sum("total")))',
        "DuckDB": f"import duckdb, polars as pl; orders = pl.read_delta({path}); "
        f"duckdb.sql({_text(sql.format('orders'))}).show()",
    }


def _text(value: str) -> str:
    """A Python string literal in double quotes, for use inside a shell's single quotes."""
    return orjson.dumps(value).decode()


def _show_how_to_query(stage: DemoStage, *, screen: Console) -> None:
    intro = f"[bold]The tables[/] are in {escape(near(stage.layout.root or ''))}: bronze/shop, silver/shop/*, gold/shop/*."
    if local_log.folder(stage.bronze) is None:
        screen.print(f"{intro} They are gone when the emulator ends; shop.yml shows the settings for your own store.")
        return
    screen.print(f"{intro} Query them:")
    for name, line in queries(stage.gold("orders")).items():
        screen.print(f"\n[bold]{name}[/]")
        screen.out(f"{near(sys.executable)} -c {shlex.quote(line)}", highlight=False)
    screen.print()


def near(path: str) -> str:
    """A path for display: relative if that is shorter."""
    return path if "://" in path else min(os.path.relpath(path), path, key=len)
