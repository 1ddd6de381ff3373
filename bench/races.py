"""Two processes that commit to one table on S3 at the same time, again and again: what a commit says is what the table holds.

python -m bench.races [--count 100] [--kinds append merge upsert statement facts]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pipelines.spark import conf as spark_conf
from pipelines.spark import session as sparks
from tests.harness import object_store, racing


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="attempts of each process at each kind of commit")
    parser.add_argument("--kinds", nargs="*", default=racing.KINDS, choices=racing.KINDS)
    arguments = parser.parse_args(argv)
    is_right = True
    with object_store.elsewhere("races") as store:
        root = "s3a://races/lake"
        conf = {**spark_conf.SHORT_RUN, "spark.driver.memory": "1g"}
        spark = sparks.session("bench", master="local[1]", conf=conf, root=root, hadoop=store.hadoop)
        for kind in arguments.kinds:
            found = racing.race(spark, store, root, kind, count=arguments.count)
            is_right &= found.is_right
            print(
                f"{kind:10} {2 * arguments.count} attempts, {found.through[0]} and {found.through[1]} came through in "
                f"{found.versions} versions: {len(found.missing)} lost, {len(found.doubled)} doubled, "
                f"{len(found.uninvited)} of a loser in the table",
                flush=True,
            )
        sparks.stop()
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
