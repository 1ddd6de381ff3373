"""The logger of all modules of the capture.

Log lines show its name, so it stays the same however the code is divided into modules.
"""

from __future__ import annotations

import logging

log = logging.getLogger("pipelines.capture.service")
