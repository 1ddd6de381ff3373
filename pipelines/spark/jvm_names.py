"""Classes of the JVM and their methods, which PySpark and Py4J ask for by name at each use, asked for once.

A function or an operator of columns asks which class is behind its name, and whether that class has such a method. A name without its package the
JVM looks for in every jar of Spark, once for each package that it may be of: milliseconds, a thousand times a batch.
"""

from __future__ import annotations

from typing import Any

from py4j.java_gateway import JavaClass, JavaMember

CLASSES = (
    "org.apache.spark.sql.functions",
    "org.apache.spark.api.python.PythonUtils",
    "org.apache.spark.sql.api.python.PythonSQLUtils",
)
"""Those whose methods make columns and give lists to the JVM; PySpark names them with their packages or without."""


class KnownClass(JavaClass):
    """A class of the JVM whose static methods, once asked for, are known."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if isinstance(found, JavaMember):
            setattr(self, name, found)
        return found


def known(view: Any, name: str) -> Any:
    """What a view of the JVM has under a full name: a class that it need not be asked for again, or what comes where there is none."""
    found = getattr(view, name)
    if type(found) is JavaClass:
        found = KnownClass(found._fqn, found._gateway_client)
        setattr(view, name, found)
    return found


def remember(view: Any) -> None:
    """Let a view of the JVM know the classes of PySpark, under both of their names."""
    for name in CLASSES:
        found = known(view, name)
        if isinstance(found, KnownClass):
            setattr(view, name.rpartition(".")[2], found)
