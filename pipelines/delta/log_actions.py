"""The actions of one commit, in the form of Delta's log and of Delta's private methods."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession

from cdc_core.tables import definition
from pipelines import clock
from pipelines.delta import data_file
from pipelines.spark import jvm

DELTA = "org.apache.spark.sql.delta"
CONVERTERS = "scala.jdk.javaapi.CollectionConverters"


@dataclass(frozen=True)
class Fence:
    """One attempt at a commit: the version that it follows on, and its `userMetadata`."""

    base: int
    metadata: str

    @property
    def options(self) -> dict[str, str]:
        """The fence as write options of a statement."""
        return {"userMetadata": self.metadata, "txnAppId": definition.APP_ID, "txnVersion": str(self.base + 1)}


class ActionList:
    """The actions of one commit: a Java list, which `seq` converts to the immutable sequence of Delta's Scala methods."""

    def __init__(self, spark: SparkSession) -> None:
        self._converters = jvm.java_class(spark, CONVERTERS)
        self._action = jvm.java_class(spark, f"{DELTA}.actions.Action")
        self._actions = jvm.java_class(spark, "java.util.ArrayList")()

    def add(self, *actions: Mapping[str, Any]) -> None:
        """Add actions in the form of the log's JSON."""
        for action in actions:
            self._actions.add(self._action.fromJson(json.dumps(action)))

    def extend(self, actions: Any) -> None:
        """Add a Scala sequence of Delta's actions."""
        self._actions.addAll(self._converters.asJava(actions))

    def seq(self) -> Any:
        """The actions as an immutable Scala sequence."""
        return self._converters.asScala(self._actions).toSeq()


def fenced(spark: SparkSession, file: data_file.ParquetFile | None, base: int, *, is_change: bool = True) -> ActionList:
    """The first actions of a commit on the version `base`: its fence, and the file if there is one."""
    actions = ActionList(spark)
    # Delta applies each `txnVersion` of an `appId` once: a writer that was fenced off finds its version taken.
    actions.add({"txn": {"appId": definition.APP_ID, "version": base + 1, "lastUpdated": clock.now_ms()}})
    if file is not None:
        actions.add(added(file, is_change=is_change))
    return actions


def added(file: data_file.ParquetFile, *, is_change: bool = True) -> dict[str, Any]:
    """The action that adds a file."""
    return {
        "add": {
            "path": file.name,
            "partitionValues": {},
            "size": file.size,
            "modificationTime": clock.now_ms(),
            "dataChange": is_change,
            "stats": file.stats,
        }
    }


def removed(file: Mapping[str, Any], *, is_change: bool = True) -> dict[str, Any]:
    """The action that removes a live file, given as its `add` action."""
    fields = {name: file[name] for name in ("path", "partitionValues", "size", "deletionVector") if name in file}
    details = {"deletionTimestamp": clock.now_ms(), "dataChange": is_change, "extendedFileMetadata": True}
    return {"remove": fields | details}
