"""Where and when something was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

_PACKAGES = (
    "torch", "safetensors", "torchsnapshot", "torch_checkpointing", "fastsafetensors"
)  # fmt: skip


def facts(folder: Path) -> dict[str, Any]:
    """Plain values; `folder` is on the disk that was measured."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "cores": len(os.sched_getaffinity(0)),
        "torch threads": torch.get_num_threads(),
        "processor": _processor(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "kernel": f"Linux {platform.release()}",
        "file system": _file_system(folder),
        "python": platform.python_version(),
        "packages": ", ".join(filter(None, map(_version, _PACKAGES))),
    }


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _file_system(folder: Path) -> str:
    """Type of the file system that holds a folder: the longest mount point above it, the last if several."""
    best, found = -1, "unknown"
    path = str(folder.resolve())
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split(" ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, found = len(point), kind
    return found
