"""Two torchrun agents, each with a folder of its own under the same path: hosts that share no root."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardstore import list_snapshots
from tests.distributed.training import Training
from tests.faults.two_hosts_job import NUM_STEPS
from tests.ranks import run_ranks

_ROOT = Path(__file__).resolve().parents[2]
_WAIT_S = 80.0


def _has_namespaces() -> bool:
    tried = subprocess.run(
        ["unshare", "-m", "mount", "--make-rprivate", "/"], capture_output=True, check=False
    )
    return tried.returncode == 0


pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not _has_namespaces(), reason="mount namespaces cannot be had here"
)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _agent(
    folder: Path, host: Path, node: int, port: int, num_local: int, *arguments: str
) -> subprocess.Popen[bytes]:
    """One agent in a mount namespace in which the root is the host's folder."""
    run = shlex.join([
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node),
        "--monitor-interval", "0.1", "--nproc-per-node", str(num_local), "--master-addr", "127.0.0.1", "--master-port", str(port),
        "-m", "tests.faults.two_hosts_job", str(folder / "root"), str(folder), *arguments,
    ])  # fmt: skip
    bind = shlex.join(["mount", "--bind", str(host), str(folder / "root")])
    return subprocess.Popen(
        ["unshare", "-m", "sh", "-c", f"mount --make-rprivate / && {bind} && exec {run}"],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _life(folder: Path, hosts: list[Path], life: str, dies_after: int, num_local: int) -> list[Any]:
    """One life of both agents; what its ranks left, empty if they were killed."""
    port = _free_port()
    agents = [
        _agent(folder, host, node, port, num_local, life, str(dies_after))
        for node, host in enumerate(hosts)
    ]
    try:
        for agent in agents:
            agent.wait(_WAIT_S)
    finally:
        for agent in agents:
            try:
                os.killpg(agent.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            agent.wait()
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{life}-*.json"))]


def _uninterrupted(rank: int) -> list[str]:
    training = Training(rank)
    for _ in range(NUM_STEPS):
        training.step()
    return [data.hex() for data in training.fingerprint()]


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_local", [1, 2])
def test_two_hosts_train_on_bit_for_bit_and_refuse_each_others_roots(
    folder: str, num_local: int
) -> None:
    """C31, C32: the first save finds out by itself; train, kill all, swap the roots, start as before."""
    place, world_size = Path(folder), 2 * num_local
    hosts = [place / "host-a", place / "host-b"]
    for made in (*hosts, place / "root"):
        made.mkdir()
    assert _life(place, hosts, "first", 2, num_local) == []
    for node, host in enumerate(hosts):
        here = tuple(range(node * num_local, (node + 1) * num_local))
        assert {info.here for info in list_snapshots(host)} == {here}
    assert not list((place / "root").iterdir())
    swapped = _life(place, hosts[::-1], "swapped", -1, num_local)
    assert len(swapped) == world_size
    for result in swapped:
        assert "does not hold the file" in result["refused"]
    results = _life(place, hosts, "last", -1, num_local)
    assert [result["begun"] for result in results] == [2] * world_size
    expected = run_ranks(world_size, _uninterrupted)
    assert [result["fingerprint"] for result in results] == expected
