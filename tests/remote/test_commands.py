"""The command line on a root on S3, which it finds through fsspec's own configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from shardstore import SnapshotStore
from shardstore.cli.app import cli
from shardstore.cli.places import _open_remote
from tests.remote.job import s3_keys, s3_options
from tests.servers.s3 import MotoServer


@pytest.fixture
def root(s3_server: MotoServer, folder: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A root with steps 1 to 3, of which the command line is told in fsspec's configuration alone."""
    import fsspec.config

    url = f"s3://{s3_server.fresh_bucket()}/a run"
    with SnapshotStore(
        url, memory="1MiB", memory_dir=folder, storage_options=s3_options(s3_server)
    ) as store:
        for step in (1, 2, 3):
            store.save({"w": torch.full((7,), float(step))}, step=step, metadata={"n": step})
    monkeypatch.setitem(fsspec.config.conf, "s3", s3_options(s3_server))
    _open_remote.cache_clear()
    yield url
    _open_remote.cache_clear()


def _run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def _json(*arguments: object, code: int = 0) -> Any:
    return json.loads(_run(*arguments, "--json", code=code).stdout)


def _steps(root: str) -> list[int]:
    return [each["step"] for each in _json("list", root)["snapshots"]]


def test_every_command_works_on_a_url(root: str) -> None:
    assert _steps(root) == [1, 2, 3]
    assert "w" in _run("show", root, "--step", 2).output
    assert "ok" in _run("verify", root).output
    assert "w" in _run("diff", root, "1", "2", code=1).output
    _run("pin", root, "1")
    assert [each["pinned"] for each in _json("list", root)["snapshots"]] == [True, False, False]
    _run("prune", root, "--keep", 1, "--yes")
    assert _steps(root) == [1, 3]
    _run("unpin", root, "1")
    _run("prune", root, "--keep", 1, "--yes")
    assert _steps(root) == [3]
    _run("gc", root, "--yes")
    assert _steps(root) == [3]


def test_doctor_looks_at_a_url(root: str) -> None:
    output = _run("doctor", root).output
    assert "exclusive create" in output
    assert root in output


def test_damage_is_found_on_a_url(root: str, s3_server: MotoServer) -> None:
    bucket = root.split("/")[2]
    (key,) = (k for k in s3_keys(s3_server, bucket) if "step-000000000002" in k and "rank-" in k)
    body = bytearray(s3_server.client.get_object(Bucket=bucket, Key=key)["Body"].read())
    body[-3] ^= 1
    s3_server.client.put_object(Bucket=bucket, Key=key, Body=bytes(body))
    output = _run("verify", root, code=1).output
    assert key.rpartition("/")[2] in output


def test_a_snapshot_s_folder_or_file_leads_to_its_root(root: str, s3_server: MotoServer) -> None:
    keys = [k for k in s3_keys(s3_server, root.split("/")[2]) if "step-000000000002" in k]
    for place in (keys[0].rpartition("/")[0], *keys):
        result = _run("show", f"s3://{root.split('/')[2]}/{place}")
        assert f"its root is {root}" in result.output
        assert "step 2" in result.output or '"step": 2' in result.output or " 2" in result.output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda root: f"{root}x", ("is empty", "another address was meant")),
        (lambda root: root.rpartition("/")[0], ("is not a root", "a run")),
        (lambda _root: "s3://no-such-bucket-at-all/run", ("no bucket", "Make the bucket")),
        (lambda _root: "nobody://bucket/run", ("nobody://",)),
        (lambda _root: "s3://k:hunter2@bucket/run", ("password in a URL",)),
    ],
)
def test_a_wrong_url_is_told_with_what_may_have_been_meant(
    root: str, change: Any, words: tuple[str, ...]
) -> None:
    for command in ("show", "verify"):
        output = _run(command, change(root), code=2).output
        for word in words:
            assert word in output, (command, output)
        assert "hunter2" not in output
        assert "Traceback" not in output


@pytest.mark.parametrize("how", ["variable", pytest.param("file", marks=pytest.mark.nightly)])
def test_fsspec_s_configuration_reaches_the_client(
    root: str, s3_server: MotoServer, tmp_path: Path, how: str
) -> None:
    """FSSPEC_S3 in the environment, or a file in its folder: in a process of its own."""
    options = s3_server.storage_options
    env = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "FSSPEC_"))}
    if how == "variable":
        env["FSSPEC_S3"] = json.dumps(options)
    else:
        (tmp_path / "conf.json").write_text(json.dumps({"s3": options}))
        env["FSSPEC_CONFIG_DIR"] = str(tmp_path)
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    ended = subprocess.run(
        [sys.executable, "-m", "shardstore", "list", root, "--json"],
        env=env, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert [each["step"] for each in json.loads(ended.stdout)["snapshots"]] == [1, 2, 3]


def test_memory_of_a_remote_root_is_found_by_its_url(s3_server: MotoServer, folder: str) -> None:
    url = s3_server.fresh("mem")
    store = SnapshotStore(
        url, memory="1MiB", memory_dir=folder, storage_options=s3_options(s3_server)
    )
    store.save({"w": torch.ones(7)}, step=1).wait(20)
    store.close(keep_memory=True)
    output = _run("memory", "list", "--memory-dir", folder, "--root", url).output
    assert "1" in output
    _run("memory", "clear", "--memory-dir", folder, "--root", url, "--yes")
    assert not list(Path(folder).rglob("*.safetensors"))
