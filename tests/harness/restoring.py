"""Runs RESTORE in the session of a command: python -m tests.harness.restoring LAYER DB.COLL VERSION --config …"""

from __future__ import annotations

import click

from jobs.commands import application, options
from pipelines.delta import tables as delta
from pipelines.spark import session as sparks


@click.command()
@options.with_settings(
    click.argument("layer", type=click.Choice(["silver", "gold"])),
    click.argument("collection"),
    click.argument("version", type=int),
)
def restore(file: options.SettingsFile, layer: str, collection: str, version: int) -> None:
    settings, spark = application.opened(file, layer)
    table = getattr(delta.layout(settings.lakehouse), layer)(*collection.split(".", 1))
    spark.sql(f"RESTORE TABLE {table} TO VERSION AS OF {version}").collect()
    sparks.stop()


if __name__ == "__main__":
    restore()
