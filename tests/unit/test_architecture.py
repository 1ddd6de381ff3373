"""The seams of design section 4, held by what the modules import and name."""

from __future__ import annotations

import ast
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


@dataclass(frozen=True)
class Module:
    """One module of the project, read and not imported."""

    path: Path
    tree: ast.Module

    @property
    def name(self) -> str:
        return self.path.relative_to(PROJECT).as_posix()

    @property
    def package(self) -> str:
        return self.path.relative_to(PROJECT).parts[0]

    def imports(self) -> Iterator[str]:
        """Every dotted name that is imported at run time, wherever in the module."""
        for node in _running(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    def names(self) -> Iterator[str]:
        """Every name and attribute that the code uses, and every text in it but docstrings."""
        docstrings = {id(text) for text in _docstrings(self.tree)}
        for node in _running(self.tree):
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node, ast.Attribute):
                yield node.attr
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield node.value


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from _running(child)


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """The docstrings, those of attributes too: texts that are statements."""
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
    """The modules whose code names one of these words, or holds it in a text."""
    return {module.name for module in MODULES for name in module.names() if any(word in name for word in words)}


def test_layers_import_downwards() -> None:
    """The core knows no pipeline, pipelines know no job, and nothing but tests imports tests."""
    for module in MODULES:
        ours = {name.split(".")[0] for name in module.imports()} & {*PACKAGES, "tests", "bench"}
        assert ours <= LAYERS[module.package], module.name


@pytest.mark.parametrize(
    ("packages", "only"),
    [
        (("pymongo", "gridfs"), {"pipelines/mongodb/client.py"}),
        (("delta",), {"pipelines/spark/session.py"}),
        (("yaml",), {"pipelines/settings/file.py"}),
        (("click",), {"jobs/command_line.py"}),
        (("great_expectations",), {"pipelines/gold/great_expectations.py"}),
        (("prometheus_client",), {"pipelines/capture/metrics.py"}),
    ],
)
def test_a_foreign_package_has_one_seam(packages: tuple[str, ...], only: set[str]) -> None:
    """One module imports each foreign package (`delta` is its pip support: tables are SQL)."""
    assert importers(*packages) <= only


def test_only_the_spark_module_starts_spark() -> None:
    """Sessions are built in one place."""
    assert users("getOrCreate", "launch_gateway", "newSession") <= {"pipelines/spark/session.py"}


def test_only_the_delta_modules_know_deltas_tables() -> None:
    """History, transactions and maintenance of tables are named in one place, what logs say plainly in another."""
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
    """The environment is read where secrets are resolved and where Spark is started, and nowhere else."""
    reading = {module.name for module in MODULES if "environ" in set(module.names())}
    assert reading <= {"pipelines/settings/secrets.py", "pipelines/spark/session.py"}
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
    """At the top of a module stand definitions and values: no bare call, no waiting, no work."""
    for module in MODULES:
        for node in module.tree.body:
            if isinstance(node, ast.Expr):
                assert isinstance(node.value, ast.Constant), f"{module.name}:{node.lineno}"
            assert not isinstance(node, ast.While | ast.With), f"{module.name}:{node.lineno}"


def test_logging_is_configured_by_jobs_alone() -> None:
    """What is importable leaves the log to its user."""
    assert {name.split("/")[0] for name in users("basicConfig", "dictConfig", "addHandler", "setLevel")} <= {"jobs"}


def _methods(node: ast.ClassDef) -> list[str]:
    return [each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_the_capture_is_made_of_small_parts() -> None:
    """No class of the capture does everything, and no file of it is longer than a person reads at once."""
    for module in MODULES:
        if module.name.startswith("pipelines/capture/"):
            assert len(module.path.read_text().splitlines()) <= 500, module.name
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ClassDef):
                    assert len(_methods(node)) <= 20, f"{module.name}: {node.name}"


def test_the_parts_of_the_capture_import_in_one_direction() -> None:
    """No two modules of the capture need each other, not for types alone, and no package below knows one of its modules."""
    ours = {_dotted(module): module for module in MODULES if module.name.startswith("pipelines/capture/")}
    needs = {name: {each for each in ours if each in set(_imported(module.tree))} for name, module in ours.items()}
    while free := {name for name, needed in needs.items() if not needed}:
        needs = {name: needed - free for name, needed in needs.items() if name not in free}
    assert not needs, f"a circle: {needs}"
    for module in MODULES:
        if module.name.startswith(("pipelines/bronze/", "pipelines/snapshot/", "pipelines/channels/", "pipelines/mongodb/")):
            assert not set(_imported(module.tree)) & set(ours), module.name


def _dotted(module: Module) -> str:
    return module.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imported(tree: ast.Module) -> Iterator[str]:
    """Every module that is imported, at run time or for types."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
