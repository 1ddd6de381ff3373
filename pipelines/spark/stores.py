"""What Spark needs to keep tables in a store: its file system's packages, and a log store that commits by
compare-and-set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pipelines.spark import log_store

HADOOP = "3.5.0"
"""The Hadoop of the pinned Spark: a file system of another version does not work with it."""
AWS_SDK = "2.35.4"
"""The SDK that this Hadoop was built with. Its bundle is 690 MB; these three parts are all that S3A asks for, 18 MB."""
_AWS = tuple(f"software.amazon.awssdk:{part}:{AWS_SDK}" for part in ("s3", "s3-transfer-manager", "sts"))
_S3A = (
    f"org.apache.hadoop:hadoop-aws:{HADOOP}",
    *_AWS,
    "software.amazon.s3.analyticsaccelerator:analyticsaccelerator-s3:1.3.1",
)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


@dataclass(frozen=True)
class ObjectStore:
    """Packages to resolve, of which `excludes` are left out, and settings of Spark."""

    packages: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    conf: Mapping[str, str] = field(default_factory=dict)

    def log_stores(self) -> dict[str, str]:
        """Those of the settings that name log stores."""
        return {name: value for name, value in self.conf.items() if name.startswith("spark.delta.logStore.")}

    def checksums(self) -> dict[str, str]:
        """The one of the settings that names who writes the checksums of versions, where it is ours."""
        return {name: value for name, value in self.conf.items() if name in log_store.CHECKSUMS}

    def without_log_stores(self) -> ObjectStore:
        """The same where `LOG_STORE_OF_ALL` is set."""
        return replace(self, conf={name: value for name, value in self.conf.items() if name not in self.log_stores()})


LOG_STORE_OF_ALL = "spark.delta.logStore.class"
"""Names one log store for every scheme; beside it Delta refuses one that is named for a scheme."""


def log_store_of(scheme: str) -> str:
    """The setting that names the log store of a scheme."""
    return f"spark.delta.logStore.{scheme}.impl"


LOCAL = ObjectStore(conf={log_store_of("file"): log_store.LOCAL})

STORES: Mapping[str, ObjectStore] = {
    "s3a": ObjectStore(
        _S3A,
        ("software.amazon.awssdk:bundle", "org.wildfly.openssl:wildfly-openssl", "org.slf4j:slf4j-api"),
        {
            log_store_of("s3a"): log_store.CONDITIONAL_PUT,
            **log_store.CHECKSUMS,
            # The default, of Amazon's accelerator, asks for a file's length also where it is told.
            "spark.hadoop.fs.s3a.input.stream.type": "classic",
            # In memory, so that nothing stays on a disk after a kill; a file that is written takes up to three blocks of the direct
            # memory, which is as large as the heap, and 32 cores write 32 files.
            "spark.hadoop.fs.s3a.fast.upload.buffer": "bytebuffer",
            "spark.hadoop.fs.s3a.multipart.size": "8M",
            "spark.hadoop.fs.s3a.fast.upload.active.blocks": "2",
        },
    ),
    "abfss": ObjectStore((f"org.apache.hadoop:hadoop-azure:{HADOOP}",)),
    "gs": ObjectStore(
        ("com.google.cloud.bigdataoss:gcs-connector:hadoop3-2.2.26",),
        conf={
            "spark.hadoop.fs.gs.impl": "com.google.cloud.hadoop.fs.gcs.GoogleHadoopFileSystem",
            log_store_of("gs"): "io.delta.storage.GCSLogStore",
        },
    ),
}


def scheme(root: str | None) -> str:
    """The scheme of a root or path in lower case; `file` for a plain path."""
    found = _SCHEME.match(root or "")
    return found[1].lower() if found else "file"


def of(root: str | None) -> ObjectStore:
    """What a session of ours needs for a lakehouse below `root`; every session may write local tables."""
    store = STORES.get(scheme(root), ObjectStore())
    return ObjectStore(store.packages, store.excludes, {**LOCAL.conf, **store.conf})
