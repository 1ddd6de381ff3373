"""The container, the service unit and the manifest run existing commands, not as root, and stop them with SIGTERM."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs import command_line
from pipelines.settings import file
from tests.harness import captures

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "resources" / "deploy"


def _understood(arguments: list[str], tmp_path: Path) -> dict[str, Any]:
    """The command's parameters for these arguments; a copy of the example replaces any settings file."""
    settings = tmp_path / "shop.yml"
    settings.write_text((ROOT / "conf" / "shop.yml").read_text())
    verb, *rest = [str(settings) if each.startswith(("/conf/", "/etc/medallion/")) else each for each in arguments]
    return command_line.medallion.commands[verb].make_context(verb, rest).params


def _instructions(text: str) -> list[tuple[str, str]]:
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = (line for line in joined.splitlines() if line and not line.startswith("#"))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def test_the_image_runs_medallion_as_a_user_and_looks_at_the_metrics() -> None:
    """It does not run as root, signals reach the command, and the health check uses the port that the example opens."""
    instructions = _instructions((FOLDER / "Dockerfile").read_text())
    by_name = dict(instructions)
    assert by_name["USER"] == "10001" and by_name["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(by_name["ENTRYPOINT"]) == ["tini", "--", "medallion"]
    assert by_name["EXPOSE"] == "9404" and ":9404/metrics" in by_name["HEALTHCHECK"]
    copied = {word for name, rest in instructions if name == "COPY" for word in rest.split()[:-1]}
    assert all((ROOT / each).exists() for each in copied)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert copied == {line.removeprefix("!") for line in ignored if line.startswith("!")}


def _service() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read(FOLDER / "medallion-capture@.service")
    return unit["Service"]


def test_the_unit_starts_again_what_is_temporary_and_leaves_what_a_person_must_decide(tmp_path: Path) -> None:
    """Exit codes 2 and 3 need a decision, so systemd does not restart after them; SIGTERM has enough time."""
    service = _service()
    assert service["Restart"] == "on-failure" and service["RestartPreventExitStatus"].split() == ["2", "3"]
    assert service["KillSignal"] == "SIGTERM" and int(service["TimeoutStopSec"]) >= 30 and service["User"] != "root"
    command = shlex.split(service["ExecStart"])
    assert Path(command[0]).name == "medallion" and _understood(command[1:], tmp_path)["config"].exists()


def _containers(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("containers", "initContainers"):
                yield from value
            yield from _containers(value)
    elif isinstance(node, list):
        for each in node:
            yield from _containers(each)


def test_the_manifest_has_one_writer_a_table_and_commands_that_exist(tmp_path: Path) -> None:
    """There is one capture; runs of silver and gold do not overlap; nothing runs as root; no secret is literal."""
    text = (FOLDER / "kubernetes.yml").read_text()
    conf, capture, tables = yaml.safe_load_all(text)
    assert capture["kind"] == "StatefulSet" and capture["spec"]["replicas"] == 1
    assert tables["kind"] == "CronJob" and tables["spec"]["concurrencyPolicy"] == "Forbid"
    containers = [*_containers(capture), *_containers(tables)]
    commands = [containers[0]["args"], *re.findall(r"^medallion ([^;]+);", containers[1]["args"][0], re.MULTILINE)]
    commands = [shlex.split(each) if isinstance(each, str) else each for each in commands]
    assert [each[0] for each in commands] == ["capture", "silver", "gold"]
    for arguments in commands:
        assert _understood(arguments, tmp_path)["config"].exists()
        assert Path(arguments[arguments.index("--config") + 1]).name in conf["data"]
    for each in containers:
        assert "limits" in each["resources"] and each["envFrom"] == [{"secretRef": {"name": "medallion"}}]
    for pod in (capture["spec"]["template"], tables["spec"]["jobTemplate"]["spec"]["template"]):
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert not re.search(r"mongodb(\+srv)?://[^…']*@", text)


@pytest.mark.parametrize(("silver", "gold", "code"), [(0, 0, 0), (3, 0, 3), (0, 75, 75), (75, 3, 75)])
def test_gold_runs_whatever_silver_says_and_the_pod_tells_it(tmp_path: Path, silver: int, gold: int, code: int) -> None:
    """Gold runs although silver failed for one collection, and the pod ends with the exit code of the one that failed."""
    *_, tables = yaml.safe_load_all((FOLDER / "kubernetes.yml").read_text())
    (container,) = _containers(tables)
    command = tmp_path / "medallion"
    command.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/ran\n[ "$1" = silver ] && exit {silver}\nexit {gold}\n')
    command.chmod(0o755)
    shell = container["command"][container["command"].index("--") + 1 :]
    done = subprocess.run([*shell, *container["args"]], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=False)
    assert done.returncode == code and (tmp_path / "ran").read_text().split() == ["silver", "gold"]


def test_a_pod_that_is_stopped_ends_after_its_command(tmp_path: Path) -> None:
    """The shell is the container's main process: when it ended first, silver was killed, and its claims held up the next pod."""
    *_, tables = yaml.safe_load_all((FOLDER / "kubernetes.yml").read_text())
    (container,) = _containers(tables)
    command = tmp_path / "medallion"
    command.write_text(
        f"#!/bin/sh\ntrap 'sleep 1; echo released >> {tmp_path}/ran; exit 0' TERM\necho \"$1\" >> {tmp_path}/ran\n"
        "while :; do sleep 0.1; done\n"
    )
    command.chmod(0o755)
    shell = container["command"][container["command"].index("--") + 1 :]
    path = f"{tmp_path}:{os.environ['PATH']}"
    pod = subprocess.Popen([*shell, *container["args"]], env={"PATH": path}, start_new_session=True)
    captures.until((tmp_path / "ran").exists)
    os.killpg(pod.pid, signal.SIGTERM)  # as `tini -g` does
    assert pod.wait(30) == 143
    assert (tmp_path / "ran").read_text().split() == ["silver", "released"]


def test_the_manifests_probes_ask_a_port_that_its_settings_open(tmp_path: Path) -> None:
    """Otherwise Kubernetes would kill the capture every three minutes. The image contains the jars of the store that the settings name."""
    conf, capture, _ = yaml.safe_load_all((FOLDER / "kubernetes.yml").read_text())
    path = tmp_path / "shop.yml"
    path.write_text(conf["data"]["shop.yml"])
    settings = file.load(path)
    (container,) = capture["spec"]["template"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    for probe in ("startupProbe", "livenessProbe"):
        assert ports[container[probe]["httpGet"]["port"]] == settings.source.metrics_port
    scheme = str(settings.lakehouse.root).partition("://")[0]
    assert f"root='{scheme}://" in (FOLDER / "Dockerfile").read_text()


def test_a_unit_that_sees_no_home_has_a_place_for_jars() -> None:
    """The first start downloads Delta's jars."""
    service = _service()
    assert service["ProtectHome"] == "true"
    assert service["Environment"] == f"XDG_CACHE_HOME=/var/cache/{service['CacheDirectory']}"


def test_the_settings_of_the_scale_document_are_valid(tmp_path: Path) -> None:
    """Every settings example of docs/scale.md is valid."""
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "scale.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 2
    for number, block in enumerate(blocks):
        path = tmp_path / f"{number}.yml"
        path.write_text(block)
        assert file.load(path).name
