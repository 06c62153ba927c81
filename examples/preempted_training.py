"""Train, kill every process in the middle of a save, restart, and get the same losses bit for bit.

    python examples/preempted_training.py

1. `uninterrupted`: the training of `preempted_training_worker.py`, without any snapshot.
2. `killed`: the same with a store. In the middle of a save, every rank and torchrun get SIGKILL.
3. `from memory`: restarted, it restores what the dead ranks left in memory; killed in a save again.
4. `from disk`: its memory is deleted too, as a reboot would; it restores from disk and finishes.

Then `preempted_training_report.py` compares. Exits with status 1 if one loss, parameter, optimizer
moment, random state or data position differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from progress_bars import Bars, bars_on

import shardstore

NUM_RANKS: Final = 2
RUN_LIMIT_S: Final = 180.0
LONGEST_WAIT_S: Final = 0.005
"""From `save` having returned somewhere to the kill."""
HERE: Final = Path(__file__).resolve().parent


def say(text: str) -> None:
    print(text, flush=True)


class ExampleFailedError(Exception):
    """Something did not go as this example promises; the text says what."""


@dataclass(frozen=True)
class Setup:
    """Where everything lies."""

    folder: Path
    name: str
    steps: int
    save_every: int

    @property
    def root(self) -> Path:
        return self.folder / "snapshots"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def memory(self) -> Path:
        """Where the store keeps this training in memory."""
        return Path(f"/dev/shm/shardstore-{os.getuid()}") / self.name


class Run:
    """One start of torchrun: its processes, and what its ranks log."""

    def __init__(
        self, setup: Setup, title: str, *, with_store: bool, bars: Bars | None = None
    ) -> None:
        self.setup, self.title, self.bars = setup, title, bars
        number = len(list(setup.logs.iterdir()))
        self.logs = setup.logs / f"{number}-{title.replace(' ', '-')}"
        self.logs.mkdir()
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
        options = [f"--log-dir={self.logs}", f"--steps={setup.steps}"]
        if with_store:
            options += [f"--root={setup.root}", f"--name={setup.name}"]
            options += [f"--save-every={setup.save_every}"]
        self.launched = time.time()
        (self.logs / "launch.json").write_text(json.dumps({"title": title, "time": self.launched}))
        with (self.logs / "torchrun.log").open("wb") as output:
            self.torchrun = subprocess.Popen(
                [sys.executable, *torchrun, str(HERE / "preempted_training_worker.py"), *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._pids = [self.torchrun.pid]
        self._offsets = [0] * NUM_RANKS

    def follow(self, on_entry: Callable[[dict[str, Any]], bool] = lambda _: False) -> bool:
        """Read the ranks' logs until all have ended (False) or `on_entry` returns True."""
        while True:
            has_ended = self.torchrun.poll() is not None
            for rank in range(NUM_RANKS):
                for entry in self._read_new(rank):
                    if entry["event"] == "imported":
                        self._pids.append(entry["pid"])
                    if rank == 0:
                        self._show(entry)
                    if on_entry(entry):
                        return True
            if has_ended:
                return False
            if time.time() - self.launched > RUN_LIMIT_S:
                raise ExampleFailedError(f"{self.title}: not done in {RUN_LIMIT_S:.0f} s")
            time.sleep(0.001)

    def _read_new(self, rank: int) -> list[dict[str, Any]]:
        path = self.logs / f"rank-{rank}.jsonl"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._offsets[rank])
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offsets[rank] += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def _show(self, entry: dict[str, Any]) -> None:
        at = f"  {time.time() - self.launched:5.1f} s "
        if entry["event"] == "restored":
            say(f"{at} restored step {entry['step']} from {entry['tier']}")
        elif entry["event"] == "ready":
            say(f"{at} training from step {entry['first']}")
        elif entry["event"] == "loss" and self.bars is not None:
            step, loss = entry["step"], float.fromhex(entry["mean"])
            self.bars.train(self.title, step, self.setup.steps, loss)
        elif entry["event"] == "loss" and entry["step"] % 20 == 0:
            say(f"{at} step {entry['step']}, loss {float.fromhex(entry['mean']):.4f}")
        elif entry["event"] == "progress" and self.bars is not None:
            self.bars.show(msgspec.convert(entry, shardstore.Progress))

    def printed(self) -> str:
        """The end of what torchrun and the ranks printed."""
        return (self.logs / "torchrun.log").read_text(errors="replace")[-4000:]

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to torchrun and to every rank."""
        for pid in self._pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def kill(self) -> None:
        """End whatever is left of it."""
        if self.torchrun.poll() != 0:
            self.signal_all(signal.SIGKILL)
            self.torchrun.wait()
        self._pids.clear()


def finish(run: Run) -> None:
    """Let a run reach its end."""
    run.follow()
    if run.torchrun.returncode != 0:
        raise ExampleFailedError(f"{run.title}: ended with status {run.torchrun.returncode}")


def kill_in_a_save(run: Run, *, from_step: int) -> None:
    """SIGKILL every process while a save at `from_step` or later is being written.

    `save` has returned on some rank and the rest goes on behind. All processes are stopped first, to
    look at the root: if the save was committed already, they go on and the next one is tried.
    """
    setup, step = run.setup, from_step - 1

    def is_in_a_save(entry: dict[str, Any]) -> bool:
        nonlocal step
        if entry["event"] != "saved" or entry["step"] <= step:
            return False
        step = entry["step"]
        time.sleep(random.uniform(0.0, LONGEST_WAIT_S))
        run.signal_all(signal.SIGSTOP)
        if any(info.step == step for info in shardstore.list_snapshots(setup.root)):
            run.signal_all(signal.SIGCONT)
            return False
        return True

    if not run.follow(is_in_a_save):
        raise ExampleFailedError(f"{run.title}: ended before it was caught in the middle of a save")
    run.kill()
    files = f"step-{step:012d}.*/rank-*.safetensors"
    in_memory, on_disk = (len(list(place.glob(files))) for place in (setup.memory, setup.root))
    say(
        f"  SIGKILL to all in the save of step {step}: sealed in memory on {in_memory} of {NUM_RANKS} "
        f"ranks, on disk {on_disk} of {NUM_RANKS}, not committed"
    )


def train_all(setup: Setup, runs: list[Run], bars: Bars | None) -> None:
    """The four runs of the module's docstring, appended to `runs` as they start."""

    def start(title: str, what: str, *, with_store: bool = True) -> Run:
        say(f"{title}: {what}")
        runs.append(Run(setup, title, with_store=with_store, bars=bars))
        return runs[-1]

    finish(start("uninterrupted", f"{setup.steps} steps, no snapshots", with_store=False))
    run = start("killed", f"the same, with a snapshot every {setup.save_every} steps")
    kill_in_a_save(run, from_step=setup.steps // 3)
    run = start("from memory", "restarted with the memory that the dead ranks left")
    kill_in_a_save(run, from_step=2 * setup.steps // 3)
    shutil.rmtree(setup.memory)
    finish(start("from disk", "restarted with its memory deleted"))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill a training twice and compare its losses.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep snapshots and logs here")
    parser.add_argument("--png", type=Path, default=Path("preempted_training.png"))
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    started = time.monotonic()
    folder = (args.keep or Path(tempfile.mkdtemp(prefix="preempted-training-"))).resolve()
    name = f"preempted-training-{uuid.uuid4().hex[:8]}"
    setup = Setup(folder, name, args.steps, args.save_every)
    setup.logs.mkdir(parents=True)
    runs: list[Run] = []
    try:
        with bars_on(sys.stdout) as bars:
            train_all(setup, runs, bars)
        report = [str(HERE / "preempted_training_report.py"), str(setup.logs), f"--png={args.png}"]
        status = subprocess.run([sys.executable, *report], check=False).returncode
    except ExampleFailedError as error:
        say(f"FAILED: {error}\n{runs[-1].printed()}")
        status = 1
    finally:
        for run in runs:
            run.kill()
        shutil.rmtree(setup.memory, ignore_errors=True)
        if args.keep is None:
            shutil.rmtree(folder)
    say(f"{'Failed' if status else 'Done'} after {time.monotonic() - started:.0f} s.")
    return status


if __name__ == "__main__":
    sys.exit(main())
