"""Repairs differing documents by reading them again from the source into bronze, from which all other tables are made.

A signal starts an incremental snapshot of single keys (`cdc_core.snapshot.key_filter`): documents become snapshot rows, keys that the
source lacks become deletes, both at the cluster time of the read, so that later changes win. A running pipeline handles the signal; if no
capture is running, each layer is run once here.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Sequence

from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.settings.parse import Settings
from cdc_core.snapshot import key_filter
from cdc_core.snapshot import state as snapshot_state
from cdc_core.stream import patterns
from cdc_core.tables.layout import Layer
from pipelines import clock
from pipelines.bronze import log as bronze_log
from pipelines.bronze import registry
from pipelines.channels import signals as channels
from pipelines.delta import owners
from pipelines.delta import tables as delta
from pipelines.spark import session as sparks

log = logging.getLogger(__name__)

KEYS = 1000
"""The most documents per signal: a capture writes them to bronze in one commit."""
SIGNAL_SECONDS = 300.0
PAUSE = 0.5


def through_bronze(
    spark: SparkSession,
    settings: Settings,
    namespace: registry.Namespace,
    keys: Sequence[str],
    *,
    layer: Layer,
    take_over: bool = False,
    since_ms: int = 0,
    stop: threading.Event,
) -> None:
    """Read these keys from the source into bronze; without a running capture also apply them, up to the layer's table.

    Raises `SettingsError` if the capture does not read `ops/signals`, and `Temporary` if a running capture does not finish the next signal
    in `SIGNAL_SECONDS`.
    """
    channels.check_table_channel(settings)
    # All signals are sent before the wait: the capture handles them one after the other.
    ids = [_send(spark, settings, namespace, portion) for portion in key_filter.portions(keys, most=KEYS)]
    bronze = delta.layout(settings.lakehouse).bronze(settings.name)
    if owners.is_held(spark, bronze, take_over=take_over, since_ms=since_ms):
        # The running pipeline's silver and gold claim tables only when there is something to write: a run here could stop them.
        _wait(spark, settings, ids, stop=stop)
        return
    _run(spark, settings, ids, layer=layer, take_over=take_over, stop=stop)


def _send(spark: SparkSession, settings: Settings, namespace: registry.Namespace, keys: Sequence[str]) -> str:
    name = patterns.literal(str(namespace)).text
    data = {
        "data-collections": [name],
        "type": "incremental",
        "additional-conditions": [{"data-collection": name, "filter": key_filter.filter_of(keys)}],
    }
    id_ = f"repair-{uuid.uuid4().hex[:8]}"
    channels.send(spark, settings, type_="execute-snapshot", data=data, id_=id_, ts_ms=clock.now_ms())
    return id_


def _wait(spark: SparkSession, settings: Settings, ids: Sequence[str], *, stop: threading.Event) -> None:
    """Wait until the running capture has read the keys of these signals again, or has planned nothing for them."""
    table = delta.layout(settings.lakehouse).bronze(settings.name)
    end = time.monotonic() + SIGNAL_SECONDS
    pending = set(ids)
    while not stop.wait(PAUSE):
        # Before the states: a signal's row is committed with the plan that it leads to.
        handled = bronze_log.handled_signal_ids(spark, table)
        states = snapshot_state.states(bronze_log.snapshot_heartbeats(spark, table))
        unplanned = handled.intersection(ids) - {state.signal for state in states}
        remaining = pending - unplanned - {state.signal for state in states if state.is_done}
        if len(remaining) < len(pending):  # the time is per signal: they are handled one after the other
            pending, end = remaining, time.monotonic() + SIGNAL_SECONDS
        if not remaining:
            if unplanned:
                log.warning(
                    "%s: the capture does not read %s again; see its log for the reason", table.label, ", ".join(unplanned)
                )
            return
        if time.monotonic() > end:
            raise errors.Temporary(
                f"{table.label}: the capture did not read the differing documents again in {SIGNAL_SECONDS:.0f} s; the "
                f"signals {', '.join(sorted(pending)[:3])} are still waiting. Check whether it is paused or behind"
            )


def _run(
    spark: SparkSession,
    settings: Settings,
    ids: Sequence[str],
    *,
    layer: Layer,
    take_over: bool = False,
    stop: threading.Event,
) -> None:
    """Run each layer once, up to the one that is compared."""
    # Imported here: only a repair without a running pipeline needs the layers.
    from pipelines.capture import service as capture
    from pipelines.gold import publish
    from pipelines.silver import run as silver

    sessions = sparks.sessions(spark)
    # In this order: each layer applies what the one before has committed.
    capture.run(sessions(), settings, once=True, take_over=take_over, stop=stop, sessions=sessions)
    table = delta.layout(settings.lakehouse).bronze(settings.name)
    states = snapshot_state.states(bronze_log.snapshot_heartbeats(spark, table))
    # A run ends without a paused snapshot.
    if not stop.is_set() and any(state.signal in ids and not state.is_done for state in states):
        log.warning(
            "%s: the differing documents are not read again, because a snapshot is paused: run medallion signal "
            "resume-snapshot",
            table.label,
        )
    if layer is not Layer.BRONZE:
        silver.run(sessions(), settings, once=True, take_over=take_over, stop=stop, sessions=sessions)
    if layer is Layer.GOLD:
        publish.run(sessions(), settings, once=True, take_over=take_over, stop=stop, sessions=sessions)
