"""What the demo plays on, and what has happened there so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cdc_core.settings.parse import Settings
from cdc_core.tables import layout as tables
from pipelines import clock
from pipelines.capture.progress import CaptureProgress
from pipelines.demo import shop
from pipelines.mongodb import client as mongodb
from pipelines.terminal import tables as report

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class DemoStage:
    """What the demo plays on."""

    folder: Path
    settings: Settings
    layout: tables.Layout
    spark: SparkSession
    client: mongodb.Client

    def gold(self, collection: str) -> tables.TableRef:
        return self.layout.gold(shop.DATABASE, collection)

    def silver(self, collection: str) -> tables.TableRef:
        return self.layout.silver(shop.DATABASE, collection)

    @property
    def bronze(self) -> tables.TableRef:
        return self.layout.bronze(self.settings.name)


@dataclass
class DemoRun:
    """What has happened so far: the shop's steps, and what the capture says of itself."""

    steps: int = 0
    last_step: str = ""
    capture: CaptureProgress = field(default_factory=CaptureProgress)
    began_ms: int = field(default_factory=lambda: clock.now_ms())
    ended_ms: int = 0
    rate: report.Rate = field(default_factory=report.Rate)
    published: int = 0

    def note(self, step: str) -> None:
        """One more step of the shop's life."""
        self.steps, self.last_step = self.steps + 1, step
