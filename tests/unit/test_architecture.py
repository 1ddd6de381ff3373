"""The boundaries of design section 4, checked by what the modules import and name."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PACKAGES = ("cdc_core", "pipelines", "jobs")
LAYERS = {
    "cdc_core": {"cdc_core"},
    "pipelines": {"cdc_core", "pipelines"},
    "jobs": {"cdc_core", "pipelines", "jobs"},
}


ERRORS = {"Exception", "ValueError", "MedallionError", "DecisionNeeded", "Temporary"}
"""Base classes of errors. The name of an error says what happened."""


@dataclass(frozen=True)
class Module:
    """A module of the project, parsed and not imported."""

    path: Path
    tree: ast.Module

    @property
    def name(self) -> str:
        return self.path.relative_to(PROJECT).as_posix()

    @property
    def package(self) -> str:
        return self.path.relative_to(PROJECT).parts[0]

    def imports(self) -> tuple[str, ...]:
        """All dotted names that are imported at run time, anywhere in the module."""
        return self._imports

    def names(self) -> tuple[str, ...]:
        """All names, attributes and string constants in the code, except docstrings."""
        return self._names

    # Cached, because most tests ask for all modules, and walking their trees takes a second.

    @functools.cached_property
    def _imports(self) -> tuple[str, ...]:
        return tuple(self._imported())

    @functools.cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(self._named())

    def _imported(self) -> Iterator[str]:
        for node in _running(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    def _named(self) -> Iterator[str]:
        docstrings = {id(text) for text in _docstrings(self.tree)}
        for node in _running(self.tree):
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node, ast.Attribute):
                yield node.attr
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield node.value


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes except those under `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from _running(child)


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """The docstrings, including those of attributes: constants that are statements."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


MODULES = [
    Module(path, ast.parse(path.read_text())) for package in PACKAGES for path in sorted((PROJECT / package).rglob("*.py"))
]


def importers(*roots: str) -> set[str]:
    """The modules that import one of these packages or names."""
    return {
        module.name
        for module in MODULES
        for name in module.imports()
        if any(name == root or name.startswith(f"{root}.") for root in roots)
    }


def users(*words: str) -> set[str]:
    """The modules that contain one of these words in a name or a string constant."""
    return {module.name for module in MODULES for name in module.names() if any(word in name for word in words)}


def test_layers_import_downwards() -> None:
    """The core imports no pipeline, pipelines import no job, and none of them imports tests or benchmarks."""
    for module in MODULES:
        ours = {name.split(".")[0] for name in module.imports()} & {*PACKAGES, "tests", "bench"}
        assert ours <= LAYERS[module.package], module.name


def test_tests_and_benchmarks_stand_on_the_harness_alone() -> None:
    """No test imports another test: what several need is in `tests/harness`."""
    for path in [*(PROJECT / "tests").rglob("*.py"), *(PROJECT / "bench").rglob("*.py")]:
        names = {name for name in Module(path, ast.parse(path.read_text())).imports() if name.startswith("tests.")}
        assert all(name.startswith(("tests.harness", "tests.conftest")) for name in names), path


def test_a_test_lies_where_what_it_tests_lies() -> None:
    """`tests/unit/silver` tests `cdc_core/silver` and `pipelines/silver`. Tests of no package are directly in `tests/unit`."""
    packages = {path.name for package in PACKAGES for path in (PROJECT / package).iterdir() if path.is_dir()} | {*PACKAGES}
    for kind in ("unit", "spark", "mongo"):
        folders = {path.name for path in (PROJECT / "tests" / kind).iterdir() if path.is_dir() and list(path.glob("*.py"))}
        assert folders <= packages, kind


@pytest.mark.parametrize(
    ("packages", "only"),
    [
        (("pymongo", "gridfs"), {"pipelines/mongodb/"}),
        (("delta",), {"pipelines/spark/delta_jars.py"}),
        (("yaml",), {"pipelines/settings/file.py"}),
        (("click",), {"jobs/command_line.py", "jobs/commands/"}),
        (("great_expectations",), {"pipelines/gold/great_expectations.py"}),
        (("prometheus_client",), {"pipelines/capture/metrics.py"}),
    ],
)
def test_a_foreign_package_has_one_seam(packages: tuple[str, ...], only: set[str]) -> None:
    """Each is imported by one module, or by one package (here a name that ends in `/`).

    Of `delta` only the pip support is used: tables are SQL.
    """
    found = importers(*packages)
    assert found and all(name.startswith(tuple(only)) for name in found)


def test_only_the_spark_module_starts_spark() -> None:
    """One module takes or builds sessions, and another starts JVMs."""
    assert users("getOrCreate", "newSession") <= {"pipelines/spark/session.py", "pipelines/spark/jvm.py"}
    assert users("launch_gateway") <= {"pipelines/spark/jvm.py"}


def test_only_the_delta_modules_know_deltas_tables() -> None:
    """History, transactions and maintenance of Delta tables are only in `pipelines/delta`."""
    words = (
        "DESCRIBE HISTORY",
        "txnAppId",
        "txnVersion",
        "userMetadata",
        "DeltaTable",
        "OPTIMIZE ",
        "VACUUM ",
    )
    assert all(name.startswith("pipelines/delta/") for name in users(*words))


def test_only_the_secrets_module_resolves_references() -> None:
    """Only secrets and the start of Spark read the environment."""
    reading = {module.name for module in MODULES if "environ" in set(module.names())}
    assert {name for name in reading if not name.startswith("pipelines/spark/")} <= {"pipelines/settings/secrets.py"}
    assert users("getenv", "dbutils") <= {"pipelines/settings/secrets.py"}


def test_the_core_is_pure() -> None:
    """The core starts nothing, waits for nothing, and reads no clock, file, network or log."""
    worldly = ("os", "time", "logging", "socket", "subprocess", "threading", "random", "pathlib", "requests")
    for module in MODULES:
        if module.package == "cdc_core":
            found = {name.split(".")[0] for name in module.imports()}
            assert not found & {*worldly, "pymongo", "deltalake"}, module.name
            assert not {"SparkSession", "open", "now", "utcnow", "today", "uuid1", "uuid4"} & set(module.names()), (
                module.name
            )


def test_nothing_starts_on_import() -> None:
    """Modules only contain definitions and values at the top level: no calls as statements, no loops that wait."""
    for module in MODULES:
        for node in module.tree.body:
            if isinstance(node, ast.Expr):
                assert isinstance(node.value, ast.Constant), f"{module.name}:{node.lineno}"
            assert not isinstance(node, ast.While | ast.With), f"{module.name}:{node.lineno}"


def test_logging_is_configured_by_jobs_alone() -> None:
    """A library leaves the configuration of logging to its user."""
    assert {name.split("/")[0] for name in users("basicConfig", "dictConfig", "addHandler", "setLevel")} <= {"jobs"}


def _methods(node: ast.ClassDef) -> list[str]:
    return [each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]


TABLES_OF_DATA = {"cdc_core/properties/source.py"}
"""Files for reference, which nobody reads as a whole: the properties of the source."""


@pytest.mark.parametrize("package", PACKAGES)
def test_files_and_classes_are_small(package: str) -> None:
    """No file has more than 500 lines, except tables of data, and no class more than 20 methods."""
    for module in MODULES:
        if module.package == package:
            assert module.name in TABLES_OF_DATA or len(module.path.read_text().splitlines()) <= 500, module.name
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ClassDef):
                    assert len(_methods(node)) <= 20, f"{module.name}: {node.name}"


def test_no_two_modules_need_each_other() -> None:
    """There are no circular imports, including imports for types and inside functions."""
    ours = {_dotted(module): module for module in MODULES}
    needs = {name: set(_imported(module.tree)) & set(ours) - {name} for name, module in ours.items()}
    assert not _circle(needs)


LEVELS = (
    {"clock", "helper_processes", "memory", "new_commits", "output_file", "settings", "signs", "spark"},
    {"delta", "mongodb", "standstill", "work_progress"},
    {"bronze", "channels", "schema"},
    {"snapshot"},
    {"capture", "silver", "gold"},
    {"operations"},
    {"page", "verify"},
    {"run", "terminal"},
    {"demo"},
)
"""The packages of `pipelines/`, from the lowest level to the highest."""


def test_a_package_imports_only_lower_levels() -> None:
    """Layers communicate through tables: capture, silver and gold do not import each other.

    Packages that show or start them are on a higher level.
    """
    level = {package: number for number, packages in enumerate(LEVELS) for package in packages}
    assert set(level) == {
        path.stem for path in (PROJECT / "pipelines").iterdir() if path.stem[0] != "_" and path.name != "py.typed"
    }
    for module in MODULES:
        if module.package == "pipelines" and (own := _package(_dotted(module))):
            used = {_package(name) for name in _imported(module.tree) if name.startswith("pipelines.")} - {own}
            assert not {name for name in used if level[name] >= level[own]}, module.name


def test_packages_of_the_core_need_each_other_in_one_direction() -> None:
    """Packages of the core have no circular imports either."""
    needs: dict[str, set[str]] = {}
    for module in MODULES:
        if module.package == "cdc_core" and (own := _package(_dotted(module))):
            needs.setdefault(own, set()).update(
                {_package(name) for name in _imported(module.tree) if "cdc_core" in name} - {own, ""}
            )
    assert not _circle(needs)


def _package(name: str) -> str:
    """The package that a dotted name belongs to, or the module if it is in no package."""
    return name.split(".")[1] if name.startswith(("pipelines.", "cdc_core.")) else ""


def _circle(needs: dict[str, set[str]]) -> dict[str, set[str]]:
    """The modules that remain after those without dependencies have been removed repeatedly."""
    while free := {name for name, needed in needs.items() if not needed}:
        needs = {name: needed - free for name, needed in needs.items() if name not in free}
    return needs


@pytest.mark.parametrize(
    ("package", "steps"),
    [
        (
            "cdc_core/schema",
            (
                ("names", "kinds"),
                ("shape", "column_types"),
                ("document_schema", "pins"),
                ("cast",),
                ("evolution",),
                ("retype",),
            ),
        ),
        ("cdc_core/typed", (("exact", "lessons"), ("readers",), ("document_readers",), ("decoding",), ("plan",))),
        (
            "cdc_core/extended_json",
            (
                ("wrappers", "raw_bson", "query", "field_order", "text_columns"),
                ("dialects", "bson_to_json", "json_to_bson"),
                ("keys", "batch_walk"),
                ("batch_encoder",),
            ),
        ),
        ("cdc_core/settings", (("section_reader",), ("source_section",), ("parse",), ("debezium_import",))),
    ],
)
def test_a_step_imports_only_earlier_steps(package: str, steps: tuple[tuple[str, ...], ...]) -> None:
    """The modules of these packages are ordered in steps; none imports a module of its own or a later step."""
    rank = {f"{package}/{name}.py": number for number, step in enumerate(steps) for name in step}
    modules = {module.name: module for module in MODULES if module.path.parent == PROJECT / package}
    assert set(rank) == {name for name in modules if not name.endswith("/__init__.py")}
    for name, number in rank.items():
        later = {_dotted(modules[other]) for other, its in rank.items() if its >= number}
        assert not set(_imported(modules[name].tree)) & later, name


def test_no_two_classes_have_one_name() -> None:
    """A class can be recognized without its module: no other class of the product has its name."""
    homes: dict[str, list[str]] = {}
    for module in MODULES:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module.name)
    assert not {name: where for name, where in homes.items() if len(where) > 1}


def test_a_type_is_a_noun() -> None:
    """The name of a class says what it is, and not what was done to it, as `Settled` or `Repaired` would. Errors are excepted."""
    last_words = {
        node.name: re.findall("[A-Z][a-z]*", node.name)[-1]
        for module in MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
        and not any(isinstance(base, ast.Name) and base.id in ERRORS for base in node.bases)
    }
    assert {name for name, word in last_words.items() if re.search("(ed|ught|ept|aken)$", word)} <= {
        "Undefined"
    }  # a BSON type


def test_a_module_has_one_name_wherever_it_is_imported() -> None:
    """`from pipelines.bronze import log as bronze_log` is `bronze_log` in every module that imports it."""
    names: dict[str, set[str]] = {}
    ours = {_dotted(module) for module in MODULES}
    for module in MODULES:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (full := f"{node.module}.{alias.name}") in ours:
                        names.setdefault(full, set()).add(alias.asname or alias.name)
    assert not {full: aliases for full, aliases in names.items() if len(aliases) > 1}


def _dotted(module: Module) -> str:
    return module.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imported(tree: ast.Module) -> Iterator[str]:
    """All modules that are imported, at run time or for types."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
