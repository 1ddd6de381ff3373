"""The capture's logger.

Every module of the capture logs under this one name: log lines show it, and what is searched for there must not depend on
how the code is cut into modules.
"""

from __future__ import annotations

import logging

log = logging.getLogger("pipelines.capture.service")
