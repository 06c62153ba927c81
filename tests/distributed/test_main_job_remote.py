"""The main job with a root on real remote storage: kill all, lose all that is local, restart, train on, bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardstore import SnapshotStore, list_snapshots
from tests.distributed.training import Training
from tests.faults.scenario import share_pids
from tests.ranks import RanksFailedError, run_ranks
from tests.servers.openssh import SftpServer
from tests.servers.s3 import MotoServer, RcloneServer

NUM_STEPS = 8
SAVED_AFTER = 4
Server = MotoServer | RcloneServer | SftpServer


def _open(folder: str, root: str, options: Mapping[str, Any], disk: Path | None) -> SnapshotStore:
    memory = Path(folder, "memory")
    memory.mkdir(parents=True, exist_ok=True)
    return SnapshotStore(
        root,
        disk=disk,
        memory="8MiB",
        memory_dir=memory,
        storage_options=options,
        timeout_s=30.0,
    )


def _uninterrupted(rank: int) -> tuple[list[str], list[bytes]]:
    training = Training(rank)
    losses = [training.step() for _ in range(NUM_STEPS)]
    return losses, training.fingerprint()


def _train_and_die(rank: int, folder: str, *where: Any) -> None:
    pids = share_pids(rank, folder)
    store = _open(folder, *where)
    training = Training(rank)
    for step in range(SAVED_AFTER):
        training.step()
        if step in (1, SAVED_AFTER - 1):
            store.save(training.state, step=step).wait(30)
    training.step()  # lost
    dist.barrier()
    if rank == 0:
        for pid in reversed(pids):
            os.kill(pid, signal.SIGKILL)
    signal.pause()


def _restart(rank: int, folder: str, *where: Any) -> dict[str, Any]:
    store = _open(folder, *where)
    training = Training(rank, seed=5)  # everything differs until the restore
    training.step()
    report = store.restore(training.state)
    losses = [training.step() for _ in range(NUM_STEPS - SAVED_AFTER)]
    fingerprint = training.fingerprint()
    store.save(training.state, step=NUM_STEPS - 1).wait(30)
    store.close()
    return {
        "restored": (report.step, report.tier, report.missing),
        "losses": losses,
        "fingerprint": fingerprint,
    }


@pytest.mark.parametrize(
    ("server", "with_disk"),
    [
        ("s3_server", True),
        pytest.param("s3_server", False, marks=pytest.mark.nightly),
        pytest.param("deviant_s3_server", True, marks=pytest.mark.nightly),
        pytest.param("sftp_server", False, marks=pytest.mark.nightly),
    ],
)
def test_training_restored_from_the_root_alone_equals_training_without_interruption(
    server: str,
    with_disk: bool,
    folder: str,
    disk_folder: Path,
    request: pytest.FixtureRequest,
) -> None:
    chosen: Server = request.getfixturevalue(server)
    root, options = chosen.fresh("main job"), chosen.storage_options
    disk = disk_folder / "disk" if with_disk else None
    expected = run_ranks(2, _uninterrupted)
    with pytest.raises(RanksFailedError, match="exit code -9"):
        run_ranks(2, _train_and_die, folder, root, options, disk)
    assert [i.step for i in list_snapshots(root, storage_options=options)] == [1, SAVED_AFTER - 1]
    shutil.rmtree(folder)
    shutil.rmtree(disk_folder)
    results = run_ranks(2, _restart, folder, root, options, disk)
    for (losses, fingerprint), result in zip(expected, results, strict=True):
        assert result["restored"] == (SAVED_AFTER - 1, "root (2 ranks)", ())
        assert result["losses"] == losses[SAVED_AFTER:]
        assert result["fingerprint"] == fingerprint
    listed = [i.step for i in list_snapshots(root, storage_options=options)]
    assert listed == [1, SAVED_AFTER - 1, NUM_STEPS - 1]
