"""`python -m jobs silver --config conf/shop.yml`: the command line without its console script."""

from __future__ import annotations

import sys

from jobs import command_line

if __name__ == "__main__":
    sys.exit(command_line.main())
