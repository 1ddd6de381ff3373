"""Options that commands share, and the settings file with overrides of the deployment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from cdc_core.settings.parse import Lakehouse, Settings

_config = click.option(
    "--config",
    envvar="MEDALLION_CONFIG",
    show_envvar=True,
    required=True,
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The pipeline's settings file, for example conf/shop.yml.",
)


debug = click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks. They may contain document data.")


take_over = click.option(
    "--take-over", is_flag=True, help="Claim tables whose writer you know to be gone, without waiting for its lease."
)

_catalog = click.option("--catalog", metavar="NAME", help="The catalog of the tables; overrides the file.")

_schema_prefix = click.option("--schema-prefix", metavar="TEXT", help="Prefix of the schema names in the catalog.")


collection = click.option("--collection", metavar="DB.COLL", help="Only this collection, as database.collection.")


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


_root = click.option("--root", metavar="FOLDER", help="The folder or URL of the tables; overrides the file.")

_conf = click.option(
    "--conf",
    multiple=True,
    metavar="KEY=VALUE",
    help="A Spark setting, as for spark-submit (repeatable).",
)

_packages = click.option(
    "--packages", metavar="GROUP:NAME:VERSION,…", help="Maven packages to add to Spark, separated by commas."
)


def _spark_conf(pairs: Sequence[str], packages: str | None) -> dict[str, str]:
    malformed_keys = [key for key, sign, _ in (pair.partition("=") for pair in pairs) if not (key.strip() and sign)]
    # Show only the key: the value may be a secret.
    if malformed_keys:
        raise click.UsageError(f"--conf {malformed_keys[0]}: expected KEY=VALUE")
    conf = {key.strip(): value for key, _, value in (pair.partition("=") for pair in pairs)}
    return {**conf, "spark.jars.packages": packages} if packages else conf


def refuse_unusable(root: str) -> None:
    """Refuse a root that no tables can be below."""
    from cdc_core.tables import layout as tables

    if reason := tables.unusable(root):
        raise click.UsageError(f"--root {tables.without_login(root)}: {reason}")


@dataclass(frozen=True)
class SettingsFile:
    """A settings file, with the deployment's place for tables, which overrides the file's."""

    path: Path
    catalog: str | None
    schema_prefix: str | None
    root: str | None
    conf: Mapping[str, str]

    def load(self) -> Settings:
        from cdc_core.tables import layout as tables
        from pipelines.settings import file as settings_file

        if "" in (self.root, self.catalog):
            # Probably an empty shell variable: the file's place would be the wrong one.
            raise click.UsageError("--root and --catalog must not be empty")
        if self.root and self.catalog or self.schema_prefix and not self.catalog:
            raise click.UsageError("use either --root, or --catalog with --schema-prefix")
        refuse_unusable(self.root or "/")
        if not tables.SCHEMA_PREFIX.fullmatch(self.schema_prefix or ""):
            raise click.UsageError(f"--schema-prefix {self.schema_prefix}: letters, digits and _ are expected")
        return settings_file.load(self.path, placed=self._placed)

    def _placed(self, lakehouse: Lakehouse) -> Lakehouse:
        """The lakehouse of the file, in the deployment's place."""
        if self.catalog:
            return replace(lakehouse, root=None, catalog=self.catalog, schema_prefix=self.schema_prefix or "", store={})
        if not self.root:
            return lakehouse
        # A folder of this machine needs no settings of a store, whose references this machine may not resolve.
        store = lakehouse.store if "://" in self.root else {}
        return replace(lakehouse, root=self.root, catalog=None, schema_prefix="", store=store)


def with_settings(*own: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a command that reads a settings file: adds the shared options, passed as one `SettingsFile`, and its `own`."""

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

        # Decorators apply in reverse order; `--help` shows options in this order.
        options = (_config, *own, _catalog, _schema_prefix, _root, _conf, _packages, debug)
        return functools.reduce(lambda command, option: option(command), reversed(options), with_file)

    return decorated


def once(*, default: bool) -> Callable[[Any], Any]:
    usual = "--once" if default else "--continuous"
    return click.option(
        "--once/--continuous",
        default=default,
        help=f"Stop after processing what is there at the start, or run until stopped. [default: {usual}]",
    )
