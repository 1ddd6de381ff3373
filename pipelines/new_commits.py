"""What a layer tells the next one in the same process: that it committed.

Tables carry the positions, and every layer looks at them by itself: a word that is lost costs a look a second, and
nothing else.
"""

from __future__ import annotations

import threading
import time

LOOK_SECONDS = 0.2
"""So often a layer that waits looks whether it is to end."""


class NewCommits:
    """Whether the layer before has committed since the last look."""

    def __init__(self) -> None:
        self._told = threading.Event()

    def tell(self) -> None:
        """Say that there is something new."""
        self._told.set()

    def wait(self, seconds: float, *, stop: threading.Event) -> None:
        """Return when something is new, `stop` is set, or the seconds are over."""
        end = time.monotonic() + seconds
        while not stop.is_set() and (left := end - time.monotonic()) > 0:
            if self._told.wait(min(left, LOOK_SECONDS)):
                self._told.clear()
                return
