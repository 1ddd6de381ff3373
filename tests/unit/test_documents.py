"""Checks the documents against the code and against each other."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from bench import __main__ as benchmarks
from cdc_core import errors
from cdc_core.properties import source as properties
from cdc_core.properties.source import PROPERTIES
from cdc_core.schema import names as column_names
from cdc_core.settings import debezium_import
from cdc_core.settings import parse as settings
from cdc_core.tables import claims
from docs import render
from jobs import command_line
from jobs.commands import interrupts
from pipelines.bronze import shard_moves
from pipelines.gold import history, publish
from pipelines.operations import cut
from pipelines.settings import file as settings_file
from pipelines.spark import parallel
from pipelines.verify import comparison

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def _named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=_named)
def test_tables_are_what_the_code_says(path: Path) -> None:
    """Every table that is rendered from the code is current; `python docs/render.py` writes them."""
    text = path.read_text(encoding="utf-8")
    assert render.rendered(text) == text


def test_every_block_has_its_place() -> None:
    """Each table that can be rendered is in a document."""
    placed = {name for path in DOCUMENTS for name in re.findall(r"<!-- begin: ([a-z ]+) -->", path.read_text("utf-8"))}
    assert placed == set(render.BLOCKS)


@pytest.mark.parametrize("path", DOCUMENTS, ids=_named)
def test_every_link_leads_somewhere(path: Path) -> None:
    """Links inside the project point to existing files."""
    text = _FENCED.sub("", path.read_text(encoding="utf-8"))
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in target]
    assert [target for target in targets if not (path.parent / target).exists()] == []


def _anchors(path: Path) -> set[str]:
    """The anchors of a document: those that GitHub derives from its headings, and those that it sets."""
    text = _FENCED.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("path", DOCUMENTS, ids=_named)
def test_every_anchor_is_there(path: Path) -> None:
    """A link to a section names a heading or an anchor of that document."""
    text = _FENCED.sub("", path.read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([\w./-]*\.md)?#([^)\s]+)\)", text)
    assert [(to, anchor) for to, anchor in links if anchor not in _anchors(path.parent / to if to else path)] == []


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if _PYTHON.search(path.read_text("utf-8"))], ids=_named)
def test_python_that_is_shown_names_what_exists(path: Path) -> None:
    """Imported names exist, and so do their attributes that a document uses."""
    for block in _PYTHON.findall(path.read_text("utf-8")):
        tree = ast.parse(block)
        known: dict[str, object] = {}
        for node in [each for each in ast.walk(tree) if isinstance(each, (ast.Import, ast.ImportFrom))]:
            exec(ast.unparse(node), known)
        used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
        missing = [
            ast.unparse(node) for node in used if node.value.id in known and not hasattr(known[node.value.id], node.attr)
        ]
        assert missing == []


def test_every_property_is_in_the_settings_document() -> None:
    """Each property of `source` has exactly one line in docs/settings.md."""
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert {each.name for each in PROPERTIES} <= set(lines)
    assert len(lines) == len(set(lines))


def test_every_reserved_name_is_in_the_document_of_types() -> None:
    """Each column name that no field of a document gets is in docs/types.md."""
    text = (ROOT / "docs" / "types.md").read_text(encoding="utf-8")
    reserved = column_names.ENGINE | column_names.RESERVED | history.RESERVED
    assert [name for name in sorted(reserved) if f"`{name}`" not in text] == []


CONNECTOR = json.loads(render.CONNECTOR.read_text(encoding="utf-8"))
OF_CONNECTOR = {name: test for section in CONNECTOR.values() for name, test in section.items()}


def test_every_property_of_the_connector_is_in_the_properties_document() -> None:
    """Each is there once, and each is known: as supported, as without a meaning here, or as an older name."""
    lines = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "properties.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(lines) == sorted(name for section in CONNECTOR.values() for name in section)
    assert len(lines) == len(set(lines))
    strange = [name for name in OF_CONNECTOR if name not in properties.BY_NAME and not properties.describe_foreign(name)]
    assert set(strange) <= set(debezium_import.OLDER)


def test_no_property_of_ours_passes_for_one_of_the_connector() -> None:
    """Each property of `source` is either the connector's or marked as ours; none of the connector's is missing from the list."""
    ours = {each.name for each in PROPERTIES if each.ours}
    assert {each.name for each in PROPERTIES} - set(OF_CONNECTOR) == ours
    assert set(debezium_import.OLDER) <= set(OF_CONNECTOR)


def test_every_property_that_works_has_its_test() -> None:
    """Each supported property of the connector names an existing test."""
    for test in OF_CONNECTOR.values():
        path, _, function = test.partition("::")
        assert re.search(rf"^def {function}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), test


def test_every_supported_property_is_read_by_the_code() -> None:
    """Each documented property is read outside the settings, or documented as without effect."""
    files = [path for package in ("cdc_core", "pipelines") for path in (ROOT / package).rglob("*.py")]
    texts = (path.read_text(encoding="utf-8") for path in files if path.parent.name not in ("properties", "settings"))
    read = {name for text in texts for name in re.findall(r"\.(\w+)", text)}
    unread = {each.name for each in PROPERTIES if each.attribute not in read}
    assert unread == {*render.WITHOUT_EFFECT, "topic.prefix"}


def test_every_setting_of_silver_and_gold_is_in_the_settings_document() -> None:
    """The keys outside `source`, which the error for an unknown key lists, are documented too."""
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))
    unwrap = set(settings.unwrap_options.NAMES)
    known = {
        *(set(settings._COLLECTION_NAMES) - unwrap),
        *settings._LAKEHOUSE,
        *settings._GOLD,
        *settings._MAINTENANCE,
    }
    assert known <= told


def test_the_example_settings_are_valid() -> None:
    """The settings files of the repository and the example in docs/settings.md are valid."""
    for path in sorted((ROOT / "conf").glob("*.yml")):
        assert settings_file.load(path).name
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    example = re.search(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert example is not None
    document = settings_file._constructed(settings_file._composed(example[1], "docs/settings.md"), "docs/settings.md")
    assert settings.parse(document, where="docs/settings.md").name == "shop"


def test_every_error_has_advice() -> None:
    """docs/operations.md says for each error what to do, with its exit code."""
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    advised = {(name, int(code)) for name, code in re.findall(r"^\*\*`(\w+)` \((\d+)\)\.\*\*", text, re.MULTILINE)}
    assert advised == {(kind.__name__, kind.exit_code) for kind in render._leaves(errors.MedallionError)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=_named)
def test_every_command_that_is_shown_exists(path: Path) -> None:
    """Documents only show commands and options that the command line accepts."""
    for line in re.findall(r"medallion ((?:[a-z-]+)(?: +(?:--?[a-z0-9-]+|[^\s`#|]+))*)", path.read_text(encoding="utf-8")):
        verb, *rest = line.split()
        if verb not in command_line.medallion.commands:
            assert not rest or not rest[0].startswith("--"), f"medallion {line}"
            continue
        options = {o for p in command_line.medallion.commands[verb].params for o in (*p.opts, *p.secondary_opts)}
        assert {part for part in rest if part.startswith("--")} <= options, f"medallion {line}"


def test_make_bench_runs_the_listed_benchmarks() -> None:
    """The first table of docs/benchmarks.md has the benchmarks of `make bench`."""
    listed = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").partition("\n\nThese take longer")[0]
    assert re.findall(r"^\| `(\w+)`", listed, re.MULTILINE) == [*benchmarks.HOPS]


def test_every_verb_is_in_the_readme_or_the_guide() -> None:
    guide = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS if path.name != "CHANGELOG.md")
    assert [verb for verb in command_line.medallion.commands if not re.search(rf"medallion {verb}\b", guide)] == []


def test_spark_and_delta_are_the_same_everywhere() -> None:
    """The versions of the extra and of spark-submit's properties agree."""
    shipped = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    spark = re.search(r"pyspark==(\d+\.\d+)", shipped)
    delta = re.search(r"delta-spark==([\d.]+)", shipped)
    assert spark is not None and delta is not None
    properties = (ROOT / "conf" / "spark-defaults.conf").read_text(encoding="utf-8")
    assert f"io.delta:delta-spark_{spark[1]}_2.13:{delta[1]}" in properties


def test_make_knows_what_the_readme_promises() -> None:
    """The `make` commands in the documents are targets of the Makefile, which `.ci/run` uses too."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    shown = {target for path in DOCUMENTS for target in re.findall(r"^(?:\$ )?make ([a-z]+)", path.read_text("utf-8"), re.M)}
    assert {"demo", "test"} <= shown <= targets
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("document", "amount", "sentence"),
    [
        ("concepts", shard_moves.BATCHES, r"at a start the\s+last ([\d,]+) batches of bronze"),
        ("operations", parallel.LONGEST_RETRY_SECONDS / 60, r"less and less often, at least every (\d+)\s+minutes"),
        ("operations", parallel.THREADS - 1, r"beside up to (three) such collections"),
        ("operations", interrupts.STOP_SECONDS, r"a stop that takes longer than (\d+) seconds"),
        ("operations", comparison.MOST_WRONG, r"after ([\d,]+) differences were confirmed"),
        ("operations", comparison.LOOK_SECONDS / 60, r"checking the others took (\d+) minutes"),
        ("operations", claims.LEASE_MS / 1000, r"committed to the table less than (\d+) seconds ago"),
        ("gold", cut.PATIENCE_SECONDS, r"waits for the next clean cut, at most (\d+) seconds"),
        ("gold", publish.MODELS_PAUSE_SECONDS, r"runs the models (ten) seconds after"),
    ],
)
def test_amounts_are_those_of_the_code(document: str, amount: float, sentence: str) -> None:
    """A constant that is changed leaves a false sentence behind."""
    told = re.search(sentence, (ROOT / "docs" / f"{document}.md").read_text("utf-8"))
    assert told is not None and float({"three": "3", "ten": "10"}.get(told[1], told[1].replace(",", ""))) == amount
