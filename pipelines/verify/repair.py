"""A repair: what differs is read again from the source, through a signal, so that bronze stays the truth of every table.

The signal asks the capture for an incremental snapshot of single keys (`cdc_core.snapshot.key_filter`): documents land as
snapshot rows, keys that the source does not hold as deletes, both at the cluster time of the read, so that what changes
meanwhile wins. A pipeline that runs takes it up; where no capture runs, one run of each layer is done here.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cdc_core import errors
from cdc_core.properties.source import SignalChannel
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

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc_core.settings.parse import Settings

log = logging.getLogger(__name__)

KEYS = 1000
"""So many documents are named by one signal: a capture writes them to bronze in one commit."""
SIGNAL_SECONDS = 300.0
PAUSE = 0.5


def through_bronze(
    spark: SparkSession,
    settings: Settings,
    namespace: registry.Namespace,
    keys: Sequence[str],
    *,
    layer: Layer,
    stop: threading.Event,
) -> None:
    """Bring these keys to bronze as the source holds them now, and to the layer's table where nobody else does.

    Raises `SettingsError` where the capture does not listen to `ops/signals`, and `Temporary` where a running capture does
    not take the next signal up in five minutes.
    """
    if SignalChannel.TABLE not in settings.source.signal_enabled_channels:
        raise errors.SettingsError(
            errors.Problem(
                "source.signal.enabled.channels",
                "the capture does not listen to table",
                "add table to signal.enabled.channels",
            )
        )
    # All signals are sent before any is waited for: the capture takes them up one after the other.
    ids = [_send(spark, settings, namespace, some) for some in key_filter.portions(keys, most=KEYS)]
    if owners.is_held(spark, delta.layout(settings.lakehouse).bronze(settings.name)):
        # Its silver and gold claim their tables when there is something to write: to run them here could end them.
        _wait(spark, settings, ids, stop=stop)
        return
    _run(spark, settings, ids, layer=layer, stop=stop)


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
    """Wait until the running capture has read the keys of these signals again, or has said that there is nothing to read."""
    table = delta.layout(settings.lakehouse).bronze(settings.name)
    end = time.monotonic() + SIGNAL_SECONDS
    waiting = set(ids)
    while not stop.wait(PAUSE):
        # Read first: a signal's row is committed with the plan that it leads to.
        handled = bronze_log.handled_signal_ids(spark, table)
        states = snapshot_state.states(bronze_log.snapshot_heartbeats(spark, table))
        unplanned = handled.intersection(ids) - {state.signal for state in states}
        left = waiting - unplanned - {state.signal for state in states if state.is_done}
        if len(left) < len(waiting):  # one after the other: of many, the last one waits for all before it
            waiting, end = left, time.monotonic() + SIGNAL_SECONDS
        if not left:
            if unplanned:
                log.warning(
                    "%s: the capture does not read %s again; see its log for the reason", table.label, ", ".join(unplanned)
                )
            return
        if time.monotonic() > end:
            raise errors.Temporary(
                f"{table.label}: the capture did not read the differing documents again in {SIGNAL_SECONDS:.0f} s; the "
                f"signals {', '.join(sorted(waiting)[:3])} are still waiting. Check whether it is paused or behind"
            )


def _run(spark: SparkSession, settings: Settings, ids: Sequence[str], *, layer: Layer, stop: threading.Event) -> None:
    """One run of each layer up to the one that is compared."""
    # Only a repair without a running pipeline needs the layers; a comparison does not load them.
    from pipelines.capture import service as capture
    from pipelines.gold import publish
    from pipelines.silver import run as silver

    sessions = sparks.sessions(spark)
    # In the order of the layers: each applies what the one before it has committed.
    capture.run(sessions(), settings, once=True, stop=stop, sessions=sessions)
    table = delta.layout(settings.lakehouse).bronze(settings.name)
    states = snapshot_state.states(bronze_log.snapshot_heartbeats(spark, table))
    # A run ends where nothing is left to read but what a pause holds back.
    if not stop.is_set() and any(state.signal in ids and not state.is_done for state in states):
        log.warning(
            "%s: the differing documents are not read again, because a snapshot is paused: run medallion signal "
            "resume-snapshot",
            table.label,
        )
    if layer is not Layer.BRONZE:
        silver.run(sessions(), settings, once=True, stop=stop, sessions=sessions)
    if layer is Layer.GOLD:
        publish.run(sessions(), settings, once=True, stop=stop, sessions=sessions)
