"""Delta's log with a compare-and-set: two log stores in Java, beside the jar that is built from them.

`python -m pipelines.delta.log_store.build` builds the jar anew after a change; a test compares it with its source.
"""

from __future__ import annotations

from pathlib import Path

JAR = Path(__file__).with_name("mongo-medallion-log-store.jar")
LOCAL = "io.mongomedallion.storage.HardLinkLogStore"
CONDITIONAL_PUT = "io.mongomedallion.storage.ConditionalPutLogStore"
