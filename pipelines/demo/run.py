"""Runs the demo: changes a shop's data in MongoDB while the pipeline runs, and shows the tables.

MongoDB's data, the settings and the lakehouse are in one folder; the next run continues from there.
"""

from __future__ import annotations

import contextlib
import io
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table

from cdc_core import errors
from cdc_core.properties.types import Reference
from cdc_core.settings.parse import Settings
from cdc_core.tables import layout as tables
from pipelines import clock
from pipelines import run as layers
from pipelines.capture.progress import CaptureProgress
from pipelines.delta import table_history
from pipelines.delta import tables as delta
from pipelines.demo import embedded_mongodb, emulated_s3, quality, shop
from pipelines.demo import tables as demo_report
from pipelines.demo.emulated_s3 import EmulatedS3
from pipelines.demo.stage import DemoRun, DemoStage
from pipelines.mongodb import client as mongodb
from pipelines.mongodb import server as mongodb_server
from pipelines.page import page as pages
from pipelines.settings import file as settings_file
from pipelines.spark import conf as spark_conf
from pipelines.spark import delta_jars
from pipelines.spark import session as sparks
from pipelines.terminal import live_lines
from pipelines.terminal import tables as report
from pipelines.verify import run as verify

BUCKET = "demo"

SETTINGS_HEAD = "# The demo's settings, written by `medallion demo`."

SETTINGS = """\
{head} Try:  medallion status --config {directory}/shop.yml
name: shop

lakehouse:
  {lakehouse}

source:
  mongodb.connection.string: ${{env:MONGODB_URI}}
  collection.include.list: shop\\..*
  snapshot.mode: initial
  commit.interval.ms: {interval}

silver:
  defaults:
    add.fields: op,source.ts_ms
  collections:
    shop.customers: {{flatten.struct: true}}
    shop.orders: {{schema: {{total: "decimal(18,2)"}}}}
    shop.products: {{schema: {{price: "decimal(12,2)"}}}}
"""


def run(directory: Path, *, mongodb_uri: str | None, seconds: int, on_s3: bool = False, stop: threading.Event) -> None:
    """Change data, capture it, and show the result; ends early and cleanly when `stop` is set.

    Writes a settings file and uses it, with the server's URI instead of the reference. Raises `SettingsError` if the folder cannot be
    created, or has a file of that name which no demo wrote.
    """
    screen = report.console(markup=True)
    folder = _prepared(directory.absolute())
    started_at = time.monotonic()
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(emulated_s3.running(BUCKET)) if on_s3 else None
        stage = _opened(folder, mongodb_uri=mongodb_uri, store=store, screen=screen, stack=stack)
        demo_run = _played(stage, seconds=seconds, stop=stop, screen=screen)
        steps = (
            lambda: demo_report.show(stage, demo_run, screen=screen),
            lambda: _show_quality(stage, folder, screen),
            lambda: _verify(stage, screen, stop),
        )
        with sparks.cancelling(stage.spark, stop):
            for step in steps:
                if not stop.is_set():
                    step()
        if stop.is_set():
            screen.print("Stopped. Run the demo again to continue from here.")
            return
    screen.print(f"[dim]Done in {time.monotonic() - started_at:.0f} s. Run the demo again to continue from here.[/]")


def _prepared(folder: Path) -> Path:
    """The demo's folder, which may be a folder with other files, but not one with settings of someone else."""
    settings = folder / "shop.yml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_foreign = settings.exists() and not settings.read_bytes().startswith(SETTINGS_HEAD.encode())
    except PermissionError:
        raise  # a right is missing, which is no mistake
    except OSError as error:
        raise errors.of_file(error, errors.Problem("--directory", f"{error.filename}: {error.strerror}")) from error
    if is_foreign:
        hint = "choose another folder: this one would be overwritten"
        raise errors.SettingsError(errors.Problem("--directory", f"{settings} is not of a demo", hint))
    return folder


def _show_quality(stage: DemoStage, folder: Path, screen: Console) -> None:
    with screen.status("Building SQL models and checking their expectations"):
        quality.show(stage.spark, stage.settings, folder, screen=screen)


def _verify(stage: DemoStage, screen: Console, stop: threading.Event) -> None:
    """Verify every collection, and write the HTML page."""
    with screen.status("Comparing gold with MongoDB, document by document"):
        result = verify.run(stage.spark, stage.settings, verify.VerifyOptions(), stop=stop)
        if stop.is_set():
            return
        screen.print("\n[bold]Does gold match MongoDB?[/]  medallion verify")
        report.verified(result)
        path = stage.folder / "status.html"
        pages.write(path, pages.text(stage.spark, stage.settings))
        screen.print(f"The same as an HTML page: {escape(demo_report.near(str(path)))}")


def _opened(
    folder: Path,
    *,
    mongodb_uri: str | None,
    store: EmulatedS3 | None,
    screen: Console,
    stack: contextlib.ExitStack,
) -> DemoStage:
    """Start MongoDB and Spark in parallel; the server ends with `stack`, Spark with the process."""
    goes_on = store is None and (folder / "lakehouse").exists()
    screen.print(
        f"[bold]mongo-medallion demo[/]  in {escape(demo_report.near(str(folder)))}"
        + ("  [dim](continues from the last run)[/]" if goes_on else "")
        + (f"  [dim](tables in an S3 emulator at {store.url}, new in each run)[/]" if store is not None else "")
    )
    root = str(folder / "lakehouse") if store is None else f"s3a://{BUCKET}/lakehouse"
    with telling(screen) as tell:
        has_started = threading.Event()
        with ThreadPoolExecutor(2) as pool:
            server = pool.submit(_server, folder / "mongodb", mongodb_uri, stack)
            pool.submit(_tell_of_start, has_started, tell)
            try:
                hadoop = {} if store is None else store.hadoop
                spark = sparks.session("medallion demo", conf=spark_conf.SHORT_RUN, root=root, hadoop=hadoop)
                uri = server.result()
            finally:
                has_started.set()
        client = mongodb.client(uri)
        stack.callback(client.close)
        mongodb_server.check_suitable(mongodb_server.server_info(client))
        tell("Inserting the shop's first documents")
        shop.stock(client)

    # A commit to the emulated S3 takes seconds.
    text = SETTINGS.format(
        head=SETTINGS_HEAD, directory=folder, lakehouse=_lakehouse(root, store), interval=10_000 if store else 2000
    )
    (folder / "shop.yml").write_text(text, encoding="utf-8")
    settings = _connected(settings_file.load(folder / "shop.yml"), uri)
    return DemoStage(folder, settings, delta.layout(settings.lakehouse), spark, client)


def _lakehouse(root: str, store: EmulatedS3 | None) -> str:
    """The lakehouse section of the settings, as YAML."""
    lines = [f"root: {json.dumps(root)}"]
    if store is not None:
        keys = {
            "fs.s3a.access.key": "${env:AWS_ACCESS_KEY_ID}",
            "fs.s3a.secret.key": "${env:AWS_SECRET_ACCESS_KEY}",
        }
        lines += ["store:", *(f"  {name}: {json.dumps(value)}" for name, value in {**store.store, **keys}.items())]
    return "\n  ".join(lines)


PLAIN_EVERY = 10.0
"""Seconds between two lines of output without a terminal."""


@contextlib.contextmanager
def telling(screen: Console) -> Iterator[Callable[[RenderableType], None]]:
    """Yields a function that shows progress: live on a terminal, else as a plain line every `PLAIN_EVERY` seconds."""
    if screen.is_terminal:
        with Live(console=screen, refresh_per_second=4, transient=True) as live:
            yield lambda now: live.update(Spinner("dots", now))
        return
    started_at, told_at = time.monotonic(), -PLAIN_EVERY

    def tell(now: RenderableType) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= PLAIN_EVERY:
            told_at = time.monotonic()
            screen.out(f"{told_at - started_at:4.0f} s  {_plain(now)}", highlight=False)
            screen.file.flush()

    yield tell


def _plain(now: RenderableType) -> str:
    """A renderable as one line of text."""
    with io.StringIO() as text:
        Console(file=text, width=400, color_system=None).print(now)
        return "; ".join(" ".join(line.split()) for line in text.getvalue().splitlines() if line.strip())


def _tell_of_start(is_there: threading.Event, tell: Callable[[RenderableType], None]) -> None:
    """Show progress until Spark and MongoDB have started, with the size of the download in the first run."""
    while not is_there.wait(0.5):
        megabytes = delta_jars.downloaded_megabytes()
        note = (
            ""
            if megabytes is None
            else f"; downloading Delta's jars from Maven Central, the first time only: {megabytes:.0f} MB so far"
        )
        tell(f"Starting MongoDB and Spark{note}")


def _connected(settings: Settings, uri: str) -> Settings:
    return replace(settings, source=replace(settings.source, mongodb_connection_string=Reference(uri)))


def _server(data: Path, mongodb_uri: str | None, stack: contextlib.ExitStack) -> str:
    if mongodb_uri is not None:
        return mongodb_uri
    return stack.enter_context(embedded_mongodb.EmbeddedMongoDB(data)).uri


def _played(stage: DemoStage, *, seconds: int, stop: threading.Event, screen: Console) -> DemoRun:
    """Change data while the pipeline runs: until the snapshot is in gold, and `seconds` more; then wait until all changes are in gold."""
    demo_run = DemoRun()
    pipeline_stop, shop_stop = threading.Event(), threading.Event()

    def hear(now: CaptureProgress) -> None:
        demo_run.capture = now

    def capture() -> None:
        layers.run(stage.spark, stage.settings, once=False, stop=pipeline_stop, progress=hear)

    def trade() -> None:
        shop.open_for_business(stage.client, stop=shop_stop, each=demo_run.note)

    with telling(screen) as tell, ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(capture), pool.submit(trade)]

        def watch(doing: Callable[[], str], *, until: Callable[[], bool]) -> None:
            while not (stop.is_set() or any(future.done() for future in futures[:1])):
                tell(_picture(demo_run, doing()))  # before the check, which takes Spark seconds the first time
                if until():
                    break
                time.sleep(0.25)

        try:
            watch(
                lambda: "Taking the snapshot and loading it into gold, while the data changes",
                until=_PublishedCheck(stage, demo_run),
            )
            demo_run.began_ms = clock.now_ms()
            end = time.monotonic() + seconds
            watch(
                lambda: f"Changing the data for {end - time.monotonic():.0f} s more", until=lambda: time.monotonic() >= end
            )
            shop_stop.set()
            futures[1].result()
            demo_run.ended_ms = clock.now_ms()
            caught_up = _PublishedCheck(stage, demo_run, sequence=shop.close(stage.client))
            watch(lambda: "Waiting until the last changes are in gold", until=caught_up)
        finally:
            shop_stop.set()
            pipeline_stop.set()
        tell(_picture(demo_run, "Stopping the pipeline"))
        futures[0].result()
    return demo_run


@dataclass
class _PublishedCheck:
    """Whether gold has everything that bronze had when it first had every collection, and all events up to `sequence`."""

    stage: DemoStage
    played: DemoRun
    sequence: str = ""
    wanted: Mapping[str, int] = field(default_factory=dict)
    asked_at: float = 0.0

    def __call__(self) -> bool:
        if time.monotonic() - self.asked_at < 1 or not delta.exists(self.stage.spark, self.stage.bronze):
            return False
        self.wanted = self.wanted or self._landed()
        self.played.published = sum(self._is_published(name, batch) for name, batch in self.wanted.items())
        self.asked_at = time.monotonic()
        return bool(self.wanted) and self.played.published == len(self.wanted)

    def _is_published(self, collection: str, batch: int) -> bool:
        gold = self.stage.gold(collection)
        return delta.exists(self.stage.spark, gold) and self._batch(gold) >= batch

    def _landed(self) -> Mapping[str, int]:
        """The last batch of each collection; empty until bronze has all collections and the sequence."""
        rows = self.stage.spark.sql(
            f"SELECT collection, max(batch) AS batch, max(sequence) AS sequence FROM {self.stage.bronze} "
            "WHERE kind IN ('change', 'snapshot') GROUP BY collection"
        ).collect()
        is_all = {row.collection for row in rows} >= set(shop.COLLECTIONS)
        is_there = is_all and max(row.sequence for row in rows) >= self.sequence
        return {row.collection: row.batch for row in rows} if is_there else {}

    def _batch(self, table: tables.TableRef) -> int:
        commit = table_history.last_commit(self.stage.spark, table)
        batch = commit.metadata.get("to") if commit is not None and commit.metadata is not None else None
        return batch if isinstance(batch, int) else 0


def _picture(played: DemoRun, doing: str) -> Group:
    """The demo's progress: operations on the source, the capture, and the collections in gold."""
    last_step = f"[dim], last: {played.last_step}[/]" if played.steps else ""
    grid = Table.grid(padding=(0, 2))
    grid.add_row("MongoDB", f"{played.steps:,} operations{last_step}")
    grid.add_row("bronze", live_lines.described(played.capture, rate=played.rate.of(played.capture.events)))
    grid.add_row("gold", f"{played.published} of {len(shop.COLLECTIONS)} collections up to date")
    return Group(doing, grid)
