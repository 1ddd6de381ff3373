"""Appends MongoDB's change events to the bronze table.

`spark-submit --properties-file conf/spark-defaults.conf jobs/bronze_capture.py --config conf/shop.yml`; the arguments are
those of `medallion capture`.
"""

from __future__ import annotations

try:
    from jobs import command_line
except ModuleNotFoundError:  # a plain checkout: the packages are beside this file's folder
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from jobs import command_line

if __name__ == "__main__":
    command_line.job("capture")
