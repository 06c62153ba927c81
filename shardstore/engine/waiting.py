"""Wait for what another host has written, and this one does not see yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

VISIBLE_WAIT_S: Final = 30.0
"""How long another host may take to show a new file (NFS attribute caches)."""


def wait_until(is_so: Callable[[], bool], timeout_s: float) -> bool:
    """Ask again and again, ever more rarely; False if it is not so in time."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    delay_s = 0.01
    while not is_so():
        if time.monotonic() >= deadline:
            return False
        pause.wait(delay_s)
        delay_s = min(1.0, delay_s * 2)
    return True
