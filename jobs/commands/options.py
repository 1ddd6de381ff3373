"""Options that commands share, and the settings file with what the deployment lays over it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from cdc_core.settings.parse import Settings

_config = click.option(
    "--config",
    required=True,
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The pipeline's settings, for example conf/shop.yml.",
)


debug = click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks. They may hold data of documents.")


take_over = click.option(
    "--take-over", is_flag=True, help="Claim a table whose owner you know to be gone (or stopped for good)."
)

_catalog = click.option("--catalog", metavar="NAME", help="Keep the tables in this catalog, whatever the file says.")

_schema_prefix = click.option("--schema-prefix", metavar="TEXT", help="What the names of its schemas begin with.")


collection = click.option("--collection", metavar="DB.COLL", help="Only this collection, as database.collection.")


as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, for machines.")


_root = click.option("--root", metavar="FOLDER", help="Keep the tables below this folder or URL, whatever the file says.")

_conf = click.option(
    "--conf",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting of the Spark that is started here, as spark-submit takes it.",
)

_packages = click.option(
    "--packages", metavar="GROUP:NAME:VERSION,…", help="Maven packages for it, as spark-submit takes them."
)


def _spark_conf(pairs: Sequence[str], packages: str | None) -> dict[str, str]:
    wrong = [pair.partition("=")[0] for pair in pairs if "=" not in pair]
    # Only the key: a value may be a secret.
    if wrong:
        raise click.UsageError(f"--conf {wrong[0]}: KEY=VALUE is expected")
    conf = {key.strip(): value for key, _, value in (pair.partition("=") for pair in pairs)}
    return {**conf, "spark.jars.packages": packages} if packages else conf


@dataclass(frozen=True)
class SettingsFile:
    """A settings file, and where the deployment keeps its tables, which wins over what the file says."""

    path: Path
    catalog: str | None
    schema_prefix: str | None
    root: str | None
    conf: Mapping[str, str]

    def load(self) -> Settings:
        from cdc_core.tables import layout as tables
        from pipelines.settings import file as settings_file

        if "" in (self.root, self.catalog):
            # Of an empty variable: what the file says is then another place than the one that was meant.
            raise click.UsageError("--root and --catalog, where they are given, name a place")
        if self.root and self.catalog or self.schema_prefix and not self.catalog:
            raise click.UsageError("the tables lie below --root, or in --catalog with --schema-prefix")
        if wrong := tables.unusable(self.root or "/"):
            raise click.UsageError(f"--root {self.root}: {wrong}")
        settings = settings_file.load(self.path)
        if self.catalog:
            return replace(
                settings,
                lakehouse=replace(
                    settings.lakehouse, root=None, catalog=self.catalog, schema_prefix=self.schema_prefix or "", store={}
                ),
            )
        return (
            replace(settings, lakehouse=replace(settings.lakehouse, root=self.root, catalog=None, schema_prefix=""))
            if self.root
            else settings
        )


def with_settings(*own: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options of a command that reads a settings file, given to it as one `SettingsFile`, with its `own` among them."""

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_file(
            *,
            config: Path,
            catalog: str | None,
            schema_prefix: str | None,
            root: str | None,
            conf: tuple[str, ...],
            packages: str | None,
            **given: Any,
        ) -> Any:
            return command(SettingsFile(config, catalog, schema_prefix, root, _spark_conf(conf, packages)), **given)

        # Decorators apply from the last to the first, and `--help` shows the first on top.
        options = (_config, *own, _catalog, _schema_prefix, _root, _conf, _packages, debug)
        return functools.reduce(lambda command, option: option(command), reversed(options), with_file)

    return decorated


def once(*, default: bool) -> Callable[[Any], Any]:
    usual = "--once" if default else "--continuous"
    return click.option(
        "--once/--continuous",
        default=default,
        help=f"Stop when all that was there at the start is done, or go on until stopped. [default: {usual}]",
    )
