"""Commands without an existing pipeline: the demo, and Debezium's files."""

from __future__ import annotations

from pathlib import Path

import click

from jobs.commands import application, interrupts, options


@click.command()
@click.option(
    "--directory",
    default="demo",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the demo's MongoDB and lakehouse. A second run continues from there.",
)
@click.option("--mongodb-uri", metavar="URI", help="Use this replica set instead of the embedded MongoDB.")
@click.option(
    "--seconds",
    default=5,
    show_default=True,
    type=click.IntRange(1, 3600),
    help="How long to keep changing the data after the snapshot.",
)
@click.option("--s3", "on_s3", is_flag=True, help="Keep the lakehouse in an S3 emulator, which ends with the demo.")
@options.debug
def demo(directory: Path, mongodb_uri: str | None, seconds: int, on_s3: bool) -> None:
    """Watch changes go from MongoDB to gold tables.

    Starts an embedded MongoDB with a shop's data, changes it while the pipeline runs, and shows the tables, what changed, the
    lag of each layer, and how to query the result. With --s3 the tables are in s3a://, as in production, in an S3 emulator.
    """
    from pipelines.demo import run as demo

    application.quiet_log()
    with interrupts.stopping() as stop:
        demo.run(directory, mongodb_uri=mongodb_uri, seconds=seconds, on_s3=on_s3, stop=stop)


@click.command()
@click.option(
    "--options",
    required=True,
    metavar="FILE",
    help="A JSON object with options of ExtractNewDocumentState, or a connector's whole JSON.",
)
@click.option("--in", "source", required=True, metavar="FILE", help="Debezium change events, one per line; - for stdin.")
@click.option("--out", "target", required=True, metavar="FILE", help="The resulting rows, one per line; - for stdout.")
@options.debug
def unwrap(options: str, source: str, target: str) -> None:
    """Apply unwrap options to Debezium change events in a file, to try them out.

    \b
    In:  {"key": …, "value": …}
    Out: {"key": …, "value": …, "headers": …}  or  {"dropped": true}
    """
    from pipelines.operations import unwrap as unwrap_files

    click.echo(str(unwrap_files.run(options, source, target)), err=True)


@click.command("import-debezium")
@click.argument("connector", metavar="CONNECTOR", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--out",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The settings file to create; stdout by default.",
)
@click.option(
    "--root",
    metavar="FOLDER",
    default="./lakehouse",
    show_default=True,
    help="The folder or URL for the tables.",
)
@options.debug
def import_debezium(connector: Path, out: Path | None, root: str) -> None:
    """Convert a Debezium connector's JSON or .properties into a settings file.

    Reads the flat map of properties, the document of Kafka Connect's REST API, the .properties of a standalone worker, or
    Debezium Server's application.properties. Older names are translated and passwords become environment variables. Properties
    that are left out are listed with the reason, in the file and on stderr.
    """
    from pipelines import signs
    from pipelines.settings import debezium_import as debezium_connector
    from pipelines.settings import file as settings_file

    # References are resolved, and the root is checked again, when the settings are loaded.
    if "${" not in root:
        options.refuse_unusable(root)
    conversion = debezium_connector.read(connector, root=root)
    click.echo(conversion.text, nl=False) if out is None else settings_file.write(out, conversion.text)
    for line in (*conversion.notes, *(f"set {variable}" for variable in conversion.variables)):
        click.echo(signs.escaped(line), err=True)
