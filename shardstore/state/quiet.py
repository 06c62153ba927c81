"""Hold back the cyclic garbage collector while thousands of records are made and none is garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Make no collection begin inside the `with`: each would go through every live object again.

    For milliseconds, or seconds at a restore. Reference counting goes on. Any thread.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
