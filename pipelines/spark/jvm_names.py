"""Caches classes of the JVM and their static methods, which Py4J otherwise looks up at each use.

Each function or operator of columns looks up a class and then a method. For a name without a package, the JVM searches all of Spark's jars,
once per possible package. This takes milliseconds, a thousand times per batch.
"""

from __future__ import annotations

from typing import Any

from py4j.java_gateway import JavaClass, JavaMember

CLASSES = (
    "org.apache.spark.sql.functions",
    "org.apache.spark.api.python.PythonUtils",
    "org.apache.spark.sql.api.python.PythonSQLUtils",
)
"""The classes with which PySpark creates columns and passes lists to the JVM. PySpark names them with and without their packages."""


class KnownClass(JavaClass):
    """A class of the JVM that caches its static methods."""

    def __getattr__(self, name: str) -> Any:
        member = super().__getattr__(name)
        if isinstance(member, JavaMember):
            setattr(self, name, member)
        return member


def known(view: Any, name: str) -> Any:
    """A class of a JVM view by its full name, cached in the view; where there is none, the Py4J package of that name."""
    java_class = getattr(view, name)
    if type(java_class) is JavaClass:
        java_class = KnownClass(java_class._fqn, java_class._gateway_client)
        setattr(view, name, java_class)
    return java_class


def remember(view: Any) -> None:
    """Cache the classes of `CLASSES` in a JVM view, under both of their names."""
    for name in CLASSES:
        java_class = known(view, name)
        if isinstance(java_class, KnownClass):
            setattr(view, name.rpartition(".")[2], java_class)
