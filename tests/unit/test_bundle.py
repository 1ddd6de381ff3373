"""Checks the Databricks bundle against the platform's models and against the project."""

from __future__ import annotations

import configparser
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from databricks.bundles.jobs import Job

from jobs import command_line
from pipelines.settings import file as settings_file

ROOT = Path(__file__).resolve().parents[2]
BUNDLE: dict[str, Any] = yaml.safe_load((ROOT / "databricks.yml").read_text())
JOBS: dict[str, tuple[Path, dict[str, Any]]] = {
    name: (path, job)
    for pattern in BUNDLE["include"]
    for path in sorted(ROOT.glob(pattern))
    for name, job in yaml.safe_load(path.read_text())["resources"]["jobs"].items()
}
PLATFORM = ("workspace.file_path", "workspace.current_user.short_name", "bundle.name", "bundle.target")


def _texts(node: object) -> Iterator[str]:
    """All strings below a node, keys included."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from (*_texts(key), *_texts(value))
    elif isinstance(node, list):
        for each in node:
            yield from _texts(each)
    elif isinstance(node, str):
        yield node


def _references(node: object) -> set[str]:
    return {name for text in _texts(node) for name in re.findall(r"\$\{([^}]*)\}", text)}


def _resolved(node: Any, target: str) -> Any:
    """The node with the bundle's variables replaced, as the platform does; a variable without a value gives its own name."""
    declared = {name: each.get("default", name) for name, each in BUNDLE["variables"].items()}
    values = declared | BUNDLE["targets"][target].get("variables", {})
    if isinstance(node, dict):
        return {key: _resolved(value, target) for key, value in node.items()}
    if isinstance(node, list):
        return [_resolved(each, target) for each in node]
    if isinstance(node, str) and (whole := re.fullmatch(r"\$\{var\.(\w+)\}", node)):
        return values[whole[1]]
    if isinstance(node, str):
        return re.sub(r"\$\{var\.(\w+)\}", lambda found: str(values[found[1]]), node)
    return node


@pytest.mark.parametrize("target", ("dev", "prod"))
@pytest.mark.parametrize("name", JOBS)
def test_every_job_is_one_that_the_platform_knows(name: str, target: str) -> None:
    """The platform's own model accepts each job in each target: no unknown field, no wrong type."""
    job = Job.from_dict(_resolved(JOBS[name][1], target))
    assert job.tasks


@pytest.mark.parametrize("name", JOBS)
def test_no_job_runs_beside_itself(name: str) -> None:
    """Each table has one writer, so each job has at most one run."""
    assert JOBS[name][1]["max_concurrent_runs"] == 1


def test_capture_is_continuous_and_the_tables_are_scheduled() -> None:
    """Capture is continuous; silver and gold are scheduled, gold after silver; maintenance has its own schedule."""
    capture, tables, maintenance = (JOBS[name][1] for name in ("capture", "tables", "maintenance"))
    assert "continuous" in capture and "schedule" not in capture
    assert tables["schedule"]["quartz_cron_expression"] == "${var.schedule}" and "continuous" not in tables
    assert maintenance["schedule"]["quartz_cron_expression"] == "${var.maintenance_schedule}"


def test_gold_runs_whatever_silver_says_and_the_run_tells_it() -> None:
    """Silver may fail for one collection that needs a decision, and gold still runs for the others.

    The result of a run is that of its last tasks, so one of them repeats silver's.
    """
    by_key = {task["task_key"]: task for task in JOBS["tables"][1]["tasks"]}
    assert by_key["gold"]["depends_on"] == [{"task_key": "silver"}] and by_key["gold"]["run_if"] == "ALL_DONE"
    last = by_key.keys() - {each["task_key"] for task in by_key.values() for each in task.get("depends_on", ())}
    assert last == {"gold", "silver_succeeded"}
    assert (
        by_key["silver_succeeded"]["depends_on"] == [{"task_key": "silver"}] and "run_if" not in by_key["silver_succeeded"]
    )


def _commands(job: dict[str, Any]) -> list[dict[str, Any]]:
    return [task for task in job["tasks"] if "condition_task" not in task]


@pytest.mark.parametrize(("target", "status"), (("dev", "PAUSED"), ("prod", "UNPAUSED")))
def test_dev_is_deployed_paused_and_prod_runs(target: str, status: str) -> None:
    """The platform keeps a status that is set explicitly, in development mode too, so each target sets its own."""
    jobs = [_resolved(job, target) for _, job in JOBS.values()]
    assert {job.get("continuous", job.get("schedule"))["pause_status"] for job in jobs} == {status}


def test_production_lies_where_only_its_own_principal_writes() -> None:
    """In a folder that every user can write, each of them could change what the service principal runs."""
    prod = _resolved(BUNDLE["targets"]["prod"], "prod")
    principal = prod["run_as"]["service_principal_name"]
    assert prod["workspace"]["root_path"].startswith(f"/Workspace/Users/{principal}/")


def test_the_example_of_permissions_only_has_to_be_uncommented() -> None:
    """Its lines are then a part of the target for production, in which nobody but the service principal changes what runs."""
    example = re.sub(r"(?m)^    # (permissions:|  .*)$", r"    \1", (ROOT / "databricks.yml").read_text())
    prod = yaml.safe_load(example)["targets"]["prod"]
    assert {key: value for key, value in prod.items() if key != "permissions"} == BUNDLE["targets"]["prod"]
    assert [each.keys() for each in prod["permissions"]] == [{"group_name", "level"}]
    assert {each["level"] for each in prod["permissions"]} <= {"CAN_VIEW", "CAN_RUN"}


def test_what_does_not_run_is_not_uploaded() -> None:
    """Tests, benchmarks and documents are not uploaded; settings, jobs and notebooks are."""
    excluded = {pattern.partition("/")[0] for pattern in BUNDLE["sync"]["exclude"]}
    assert {"tests", "bench", "docs"} <= excluded
    assert not excluded & {"conf", "jobs", "notebooks", "cdc_core", "pipelines", "resources"}


@pytest.mark.parametrize("target", ("dev", "prod"))
@pytest.mark.parametrize("name", JOBS)
def test_every_task_runs_a_file_with_arguments_that_it_takes(name: str, target: str) -> None:
    """The files exist, and their commands accept the parameters."""
    path, job = JOBS[name]
    verbs = {
        "bronze_capture.py": "capture",
        "silver_merge.py": "silver",
        "gold_current.py": "gold",
        "maintain.py": "maintain",
    }
    for task in _commands(_resolved(job, target)):
        file = (path.parent / task["spark_python_task"]["python_file"]).resolve()
        assert file.is_file() and file.parent == ROOT / "jobs"
        arguments = [each.replace("${workspace.file_path}", str(ROOT)) for each in task["spark_python_task"]["parameters"]]
        command = command_line.medallion.commands[verbs[file.name]]
        given = command.make_context(file.name, arguments).params
        assert given["config"].is_file() and given["catalog"] and given["schema_prefix"]


@pytest.mark.parametrize("name", JOBS)
def test_every_task_has_the_wheel_and_a_cluster_of_its_job(name: str) -> None:
    """Each task uses the artifact's wheel and a job cluster that its job declares."""
    path, job = JOBS[name]
    clusters = {each["job_cluster_key"] for each in job["job_clusters"]}
    built_into = re.search(r"--wheel-dir (\S+)", BUNDLE["artifacts"]["wheel"]["build"])
    assert built_into is not None
    for task in _commands(job):
        assert task["job_cluster_key"] in clusters
        wheels = [library["whl"] for library in task["libraries"]]
        assert [(path.parent / wheel).resolve() for wheel in wheels] == [ROOT / built_into[1] / "*.whl"]


def test_the_wheel_holds_nothing_of_an_earlier_build() -> None:
    """Pip builds in the checkout, so a deleted module would stay in the wheel, and wheels of earlier versions would be deployed too."""
    cleaned = re.match(r"rm -rf (.+?) && ", BUNDLE["artifacts"]["wheel"]["build"])
    assert cleaned and {"build", "dist"} <= set(cleaned[1].split())


def test_the_wheel_holds_every_package() -> None:
    """The artifact contains the project's packages, without Spark, which the platform provides."""
    shipped = configparser.ConfigParser()
    shipped.read(ROOT / "setup.cfg")
    included = set(shipped["options.packages.find"]["include"].split())
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "bench"}
    assert packages == {name for name in included if "." not in name}
    assert (ROOT / BUNDLE["artifacts"]["wheel"]["path"] / "setup.cfg").is_file()
    required = shipped["options"]["install_requires"]
    assert "pyspark" not in required and "delta" not in required


def test_every_variable_is_declared_and_used() -> None:
    """Every reference has a variable or is one of the platform's, and every variable is used."""
    references = _references([BUNDLE, *(job for _, job in JOBS.values())])
    variables = {name.removeprefix("var.") for name in references if name.startswith("var.")}
    assert variables == set(BUNDLE["variables"])
    assert {name for name in references if not name.startswith("var.")} <= set(PLATFORM)
    assert all(each["description"] for each in BUNDLE["variables"].values())


def test_each_target_gives_what_has_no_default() -> None:
    """Whoever deploys chooses the catalog, node type and service principal; no file names a catalog."""
    open_ = {name for name, each in BUNDLE["variables"].items() if "default" not in each}
    left = {target: open_ - set(each["variables"]) for target, each in BUNDLE["targets"].items()}
    assert left == {"dev": {"catalog", "node_type"}, "prod": {"catalog", "node_type", "service_principal"}}
    for _, job in JOBS.values():
        for task in _commands(job):
            parameters = task["spark_python_task"]["parameters"]
            assert parameters[parameters.index("--catalog") + 1] == "${var.catalog}"


def test_dev_is_the_default_and_prod_is_production() -> None:
    """A deployment without a target is one for development, which is paused."""
    targets = BUNDLE["targets"]
    assert targets["dev"]["mode"] == "development" and targets["dev"]["default"] is True
    assert targets["prod"]["mode"] == "production" and "default" not in targets["prod"]


def test_the_connection_string_comes_from_the_secret_scope_alone() -> None:
    """The settings name an environment variable, and only the capture job sets it, from a secret."""
    settings = settings_file.load(ROOT / BUNDLE["variables"]["config"]["default"])
    assert str(settings.source.mongodb_connection_string) == "${env:MONGODB_URI}"
    with_it = {
        name: cluster["new_cluster"].get("spark_env_vars")
        for name, (_, job) in JOBS.items()
        for cluster in job["job_clusters"]
    }
    secret = {"MONGODB_URI": "{{secrets/${var.secret_scope}/mongodb-uri}}"}
    assert with_it == {"capture": secret, "tables": None, "maintenance": None}
    assert not any("mongodb://" in text or "mongodb+srv://" in text for _, job in JOBS.values() for text in _texts(job))
