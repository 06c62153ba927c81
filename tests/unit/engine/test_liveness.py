"""A run is alive or dead when the kernel says so, and unknown otherwise."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardstore.cluster.boot import read_boot_id
from shardstore.engine.liveness import (
    RunRecord,
    decode_record,
    entered,
    judge,
    left,
    process_started,
    record_of_this,
)


def _record(location: Path, **changes: Any) -> RunRecord:
    """Of a run of this process, with changes."""
    record = record_of_this(
        nonce="9f3c1d20", host="host", boot_id=read_boot_id(), started=0.0, location=str(location), memory="", others=0
    )  # fmt: skip
    return msgspec.structs.replace(record, **changes)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_a_store_of_this_process_is_alive_until_it_is_left(tmp_path: Path) -> None:
    record = _record(tmp_path)
    assert judge(record, str(tmp_path)).liveness == "dead"
    entered("9f3c1d20")
    try:
        assert judge(record, str(tmp_path)).liveness == "alive"
    finally:
        left("9f3c1d20")
    assert judge(record, str(tmp_path)).liveness == "dead"


def test_another_process_is_alive_until_it_ends_and_dead_before_its_parent_looks(
    tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    record = _record(tmp_path, pid=child.pid, process_started=process_started(child.pid))
    assert judge(record, str(tmp_path)).liveness == "alive"
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is defunct, and stays so
    judgement = judge(record, str(tmp_path))
    assert judgement.liveness == "dead", judgement
    child.wait()
    assert judge(record, str(tmp_path)).liveness == "dead"


def test_a_number_that_another_process_has_now_proves_death(
    tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    record = _record(tmp_path, pid=child.pid, process_started=process_started(child.pid) - 1)
    assert judge(record, str(tmp_path)).liveness == "dead"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"boot_id": "another"}, "restarted"),
        ({"boot_id": ""}, "restarted"),
        ({"pid_namespace": "pid:[1]"}, "container"),
        ({"folder": (1, 2)}, "copied or moved"),
        ({"pid": 0}, "does not say"),
        ({"process_started": -1}, "does not say"),
    ],
)
def test_what_cannot_be_seen_from_here_is_unknown_and_says_what_would_prove_it(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    judgement = judge(_record(tmp_path, **changes), str(tmp_path))
    assert judgement.liveness == "unknown"
    assert why in judgement.why


def test_a_copy_of_a_root_proves_nothing_of_the_runs_in_it(tmp_path: Path) -> None:
    """Who copies file by file has torn attempts there for a while (C119)."""
    copy = tmp_path / "copy"
    copy.mkdir()
    assert judge(_record(tmp_path), str(copy)).liveness == "unknown"
    assert judge(_record(tmp_path), str(tmp_path / "gone")).liveness == "unknown"


def test_records_of_earlier_and_later_versions_are_read() -> None:
    old = {"format": 1, "nonce": "9f3c1d20", "host": "h", "boot_id": "b", "started": 1.5}
    found = decode_record(json.dumps(old).encode())
    assert found == RunRecord(1, "9f3c1d20", "h", "b", 1.5)
    assert judge(found, "/").liveness == "unknown"
    assert decode_record(json.dumps({**old, "pid": 7, "later": [1]}).encode()) is not None


@pytest.mark.parametrize(
    "data", [None, b"", b"{", b"\xff\xfe", b"[]", b'{"format": 1}', b"[" * 100_000]
)
def test_what_is_no_record_says_nothing(data: bytes | None) -> None:
    assert decode_record(data) is None
    assert judge(None, "/").liveness == "unknown"
