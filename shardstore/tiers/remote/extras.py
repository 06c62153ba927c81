"""Clients that are installed as extras, imported where they are used."""

from __future__ import annotations

import importlib
from types import ModuleType


def client_module(name: str, extra: str) -> ModuleType:
    """Import the client of a kind of storage.

    Args:
        name: The module.
        extra: The extra of this package that brings it.

    Raises:
        ImportError: It cannot be imported; the message says what to install.
    """
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"this root needs {name}, which cannot be imported ({error}): "
            f"pip install 'shardstore[{extra}]'"
        ) from error
    forget_dead_loop()
    return module


def forget_dead_loop() -> None:
    """After a fork, let fsspec make a loop of this process; its older releases keep the parent's."""
    import fsspec.asyn

    thread = fsspec.asyn.iothread[0]
    if thread is not None and not thread.is_alive():
        fsspec.asyn.reset_lock()
