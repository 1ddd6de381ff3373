"""The jobs with `spark-submit`, and executors in separate processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyspark
import pytest

from tests.harness import oracle

ROOT = Path(__file__).parents[2]
SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"
MASTER = "local-cluster[2,1,1024]"


def submitted(job: str, config: Path) -> None:
    """Run one job to its end; a failure shows its output."""
    command = [
        str(SUBMIT), "--master", MASTER, "--properties-file", str(ROOT / "conf/spark-defaults.conf"),
        "--conf", "spark.executor.memory=1g", "--conf", "spark.driver.bindAddress=127.0.0.1",
        "--conf", "spark.driver.host=127.0.0.1", str(ROOT / "jobs" / job), "--config", str(config), "--once",
    ]  # fmt: skip
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, cwd=config.parent, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{job} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.timeout(600)
def test_jobs_run_with_executors_of_their_own(tmp_path: Path, mongodb_uri: str, database: Any) -> None:
    """Capture, silver and gold bring a collection to gold on a cluster whose executors share no memory with the driver."""
    database.orders.insert_many([{"_id": number, "total": number * 0.5} for number in range(500)])
    config = tmp_path / "shop.yml"
    config.write_text(
        f"name: shop\nlakehouse: {{root: {tmp_path}/lakehouse}}\nsource:\n"
        f"  mongodb.connection.string: {mongodb_uri}\n  database.include.list: {database.name}\n"
    )
    for job in ("bronze_capture.py", "silver_merge.py", "gold_current.py"):
        submitted(job, config)
    gold = oracle.read(tmp_path / "lakehouse" / "gold" / database.name / "orders")
    assert sorted(gold.column("_id").to_pylist()) == list(range(500))
