"""File systems in image files: make one, mount it, and copy it as a power cut at this moment would leave it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

IMAGE_BYTES: Final = 400 << 20
_MAKE: Final = {
    "ext4": ("mkfs.ext4", "-q", "-F"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
    "btrfs": ("mkfs.btrfs", "-q", "-f"),
}
FILE_SYSTEMS: Final = tuple(_MAKE)
_OPTIONS: Final = {"xfs": "nouuid"}


def run(*command: str) -> str:
    """Run a command that must succeed."""
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if found.returncode:
        raise OSError(f"{' '.join(command)}: {found.stdout}{found.stderr}")
    return found.stdout.strip()


def why_impossible(kind: str, folder: Path) -> str | None:
    """Why no such file system can be mounted here, None if it can."""
    if os.getuid() != 0:
        return "mounting needs root"
    if shutil.which(_MAKE[kind][0]) is None:
        return f"{_MAKE[kind][0]} is not installed"
    code = "import sys; from tests.faults.power.images import try_out; try_out(*sys.argv[1:])"
    tried = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", code, kind, str(folder)],
        capture_output=True, text=True, timeout=60, check=False, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    return None if tried.returncode == 0 else f"{kind}: {tried.stderr[-300:]}"


def try_out(kind: str, folder: str) -> None:
    """Make and mount one."""
    image = make_image(kind, Path(folder) / "probe.image")
    with mounted(kind, image, Path(folder) / "probe"):
        pass
    image.unlink()


def make_image(kind: str, image: Path) -> Path:
    """A new file system in a sparse file."""
    image.touch()
    os.truncate(image, IMAGE_BYTES)
    run(*_MAKE[kind], str(image))
    return image


@contextlib.contextmanager
def mounted(kind: str, image: Path, where: Path) -> Iterator[str]:
    """Mount an image; the file system repairs itself as after a power cut. Yields the device's name."""
    where.mkdir(exist_ok=True)
    device = run("losetup", "--find", "--show", str(image))
    try:
        run("mount", "-t", kind, "-o", _OPTIONS.get(kind, "defaults"), device, str(where))
    finally:
        run("losetup", "--detach", device)  # as soon as it is no longer mounted
    try:
        yield os.path.basename(device)
    finally:
        run("umount", str(where))


def copy_image(image: Path, device: str, target: Path) -> None:
    """Copy the image of a mounted file system to which nobody writes; again if the kernel did meanwhile."""
    while True:
        before = _writes(device)
        run("cp", "--sparse=always", str(image), str(target))
        if before is not None and before == _writes(device):
            return


def _writes(device: str) -> int | None:
    """Writes that the device has seen; None while one is under way."""
    fields = Path(f"/sys/block/{device}/stat").read_text().split()
    return None if int(fields[8]) else int(fields[4])
