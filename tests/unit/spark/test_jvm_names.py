"""Names of the JVM are looked up once; without a JVM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from py4j import protocol
from py4j.java_gateway import JVMView

from pipelines.spark import jvm_names

FUNCTIONS = "org.apache.spark.sql.functions"


class Client:
    """Answers like a JVM that has one class, with static methods."""

    converters = None
    gateway_property = SimpleNamespace(pool=None)

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def send_command(self, command: str) -> str:
        self.asked.append(command.split("\n"))
        if self.asked[-1][1] == protocol.REFL_GET_MEMBER_SUB_COMMAND_NAME.strip():
            return protocol.SUCCESS + protocol.METHOD_TYPE
        is_there = self.asked[-1][2] == FUNCTIONS
        return f"{protocol.SUCCESS_CLASS}{FUNCTIONS}" if is_there else protocol.SUCCESS_PACKAGE


def test_a_class_and_its_methods_are_asked_for_once() -> None:
    """With and without the package. A class that the JVM lacks is looked up each time, as in py4j."""
    client = Client()
    view: Any = JVMView(client, "default", id="v")
    jvm_names.remember(view)
    asked = len(client.asked)
    for _ in range(3):
        view.functions.col, getattr(view, FUNCTIONS).col, view.functions.lit
    assert [each[3] for each in client.asked[asked:]] == ["col", "lit"]
    asked = len(client.asked)
    for _ in range(2):
        view.PythonUtils  # noqa: B018
    assert len(client.asked) == asked + 2
