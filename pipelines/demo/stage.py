"""The demo's environment and its progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pyspark.sql import SparkSession

from cdc_core.settings.parse import Settings
from cdc_core.tables import layout as tables
from pipelines import clock
from pipelines.capture.progress import CaptureProgress
from pipelines.demo import shop
from pipelines.mongodb import client as mongodb
from pipelines.terminal import live_lines


@dataclass(frozen=True)
class DemoStage:
    """The demo's environment."""

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
    """The progress of a run: the shop's operations, and the capture's progress."""

    steps: int = 0
    last_step: str = ""
    capture: CaptureProgress = field(default_factory=CaptureProgress)
    began_ms: int = field(default_factory=clock.now_ms)
    ended_ms: int = 0
    rate: live_lines.Rate = field(default_factory=live_lines.Rate)
    published: int = 0

    def note(self, step: str) -> None:
        """Count an operation."""
        self.steps, self.last_step = self.steps + 1, step
