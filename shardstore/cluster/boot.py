"""Which boot of which kernel this is: equal for all containers of a host, and for all that share its memory."""

from __future__ import annotations


def read_boot_id() -> str:
    """Identity of this boot of this host's kernel; empty where it cannot be read."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
