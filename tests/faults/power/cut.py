"""Cut the power of a job at every operation: copy the image, mount the copy, and see what is there."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from shardstore import SnapshotStore, list_snapshots
from tests.faults.power.images import copy_image, make_image, mounted
from tests.faults.power.writer import NUM_ROWS, PINNED, state


def take_images(kind: str, folder: Path, every: int, sync: str) -> list[dict[str, Any]]:
    """Run the writer on a new file system and copy the image at each of its lines."""
    image = make_image(kind, folder / "live.image")
    cuts: list[dict[str, Any]] = []
    chance = random.Random(17)
    with mounted(kind, image, folder / "live") as device:
        told, tell = os.pipe()
        hear, heard = os.pipe()
        writer = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.power.writer",
             str(folder / "live" / "root"), str(tell), str(hear), sync],
            pass_fds=(tell, hear),
        )  # fmt: skip
        os.close(tell)
        os.close(hear)
        with os.fdopen(told) as lines:
            for line in lines:
                cut = json.loads(line)
                is_taken = every == 1 or chance.randrange(every) == 0 or cut["at"] == "the end"
                if is_taken:
                    writer.send_signal(signal.SIGSTOP)
                    os.waitpid(writer.pid, os.WUNTRACED)
                    cut["image"] = str(folder / f"cut-{len(cuts):04d}.image")
                    copy_image(image, device, Path(cut["image"]))
                    writer.send_signal(signal.SIGCONT)
                    cuts.append(cut)
                os.write(heard, b"!")
        os.close(heard)
        assert writer.wait(60) == 0
    image.unlink()
    return cuts


def _restores(store: SnapshotStore, step: int) -> bool:
    live = {"w": torch.full((NUM_ROWS,), -1), "small": torch.zeros(3), "step": {"n": -1}}
    expected = state(step)
    report = store.restore(live, step=step, fallback=False)
    return (
        report.step == step
        and torch.equal(live["w"], expected["w"])  # type: ignore[arg-type]
        and torch.equal(live["small"], expected["small"])  # type: ignore[arg-type]
        and live["step"] == expected["step"]
    )


def look(kind: str, cut: dict[str, Any], where: Path) -> list[str]:
    """What is wrong after this power cut."""
    wrong: list[str] = []
    with mounted(kind, Path(cut["image"]), where):
        root = where / "root"
        found = list_snapshots(root)
        listed = {info.id: info.step for info in found}
        pinned = [info.step for info in found if info.pinned]
        if cut["pinning"] != "under way" and pinned != [PINNED] * (cut["pinning"] == "done"):
            wrong.append(f"pinned are {pinned}")
        must = [name for name in cut["committed"] if name not in cut["leaving"]]
        wrong += [f"{name} was committed and is gone" for name in must if name not in listed]
        known = {*cut["committed"], *cut["leaving"]}
        more = [name for name in listed if name not in known]
        if len(more) > 1:
            wrong.append(f"{more} were never committed and are listed")
        if cut["committed"] and not listed:
            wrong.append("nothing is left")
        with SnapshotStore(root, memory=0, keep=1, timeout_s=60.0) as store:
            for step in listed.values():
                if not _restores(store, step):
                    wrong.append(f"step {step} is listed and has other values")
            store.save(state(100), step=100).wait()
            store.drain()
            if not _restores(store, 100):
                wrong.append("the next save has other values")
        left = [info.step for info in list_snapshots(root)]
        if left != [*pinned, 100]:
            wrong.append(f"after the next save with keep=1 {left} are left")
        orphans = [path.name for path in root.glob("**/*.tmp")]
        if any(not name.startswith(("rank-", ".manifest.json.", ".run-")) for name in orphans):
            wrong.append(f"unknown leftovers {orphans}")
    return wrong


def main() -> None:
    """Arguments: kind of file system, folder, one in how many operations, and "sync" or "pretend"."""
    torch.set_num_threads(1)
    kind, folder, every, sync = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    started = time.monotonic()
    cuts = take_images(kind, folder, every, sync)
    taken = time.monotonic()
    wrong: list[str] = []
    for number, cut in enumerate(cuts):
        try:
            found = look(kind, cut, folder / "copy")
        except Exception as error:  # noqa: BLE001 - all cuts are looked at
            found = [f"{type(error).__name__}: {error}"]
        wrong += [f"cut {number} at {cut['at']!r}: {text}" for text in found]
        if not found or len(wrong) > 20:
            os.unlink(cut["image"])
    result = {
        "num_cuts": len(cuts),
        "num_committed": len(cuts[-1]["committed"]) if cuts else 0,
        "at_most_listed": max((len(cut["committed"]) for cut in cuts), default=0),
        "wrong": wrong,
        "copy_s": round(taken - started, 1),
        "look_s": round(time.monotonic() - taken, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
