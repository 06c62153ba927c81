"""Whatever path is given, the answer says what it is and what may have been meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Roots, run, run_json, snapshot

COMMANDS = [
    ("list",), ("show",), ("verify",), ("diff",), ("prune", "--keep", "1"), ("gc",), ("pin",), ("unpin",),
]  # fmt: skip


def on(command: tuple[str, ...], root: object) -> list[object]:
    extra = {"diff": ["1", "2"], "pin": ["1"], "unpin": ["1"]}.get(command[0], [])
    return [command[0], root, *command[1:], *extra]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[0])
def test_path_that_does_not_exist_names_the_nearest_folder_and_what_is_like_it(
    roots: Roots, command: tuple[str, ...]
) -> None:
    wrong = roots.one.parent / "onee"
    result = run(*on(command, wrong), code=2)
    assert f"{wrong} does not exist" in result.stderr
    assert f"nearest folder that does is {roots.one.parent}" in result.stderr
    assert f"Did you mean {roots.one}" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[0])
def test_error_is_one_json_document_if_asked_for(tmp_path: Path, command: tuple[str, ...]) -> None:
    document = run_json(*on(command, tmp_path / "none"), code=2)
    assert set(document) == {"error", "exit_code"}
    assert document["exit_code"] == 2


def test_wrong_option_is_one_json_document_if_asked_for(roots: Roots) -> None:
    assert "No such option" in run_json("list", roots.one, "--nope", code=2)["error"]


@pytest.mark.parametrize("command", COMMANDS[1:], ids=lambda c: c[0])
def test_empty_folder_has_nothing_to_work_on(tmp_path: Path, command: tuple[str, ...]) -> None:
    assert f"{tmp_path} is empty" in run(*on(command, tmp_path), code=2).stderr


def test_empty_folder_lists_as_no_snapshots(tmp_path: Path) -> None:
    assert run_json("list", tmp_path)["snapshots"] == []
    result = run("list", tmp_path)
    assert result.stdout == ""
    assert "is empty" in result.stderr


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["config.json", "model.safetensors"], "Hugging Face"),
        (["model.safetensors.index.json"], "Hugging Face"),
        ([".metadata", "__0_0.distcp"], "torch.distributed.checkpoint (DCP)"),
        (["__0_0.distcp"], "without its .metadata"),
        ([".snapshot_metadata", "0"], "torchsnapshot"),
        (["latest_checkpointed_iteration.txt"], "Megatron-LM"),
        (["latest", "global_step100"], "DeepSpeed"),
        (["last.ckpt"], "pickled checkpoints"),
        (["weights.safetensors"], "safetensors files"),
        (["rank-00000.safetensors", "manifest.json"], "under another name"),
        (["notes.txt"], "It holds notes.txt"),
    ],
)
def test_foreign_folder_is_recognised(tmp_path: Path, names: list[str], kind: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    result = run("list", tmp_path, code=2)
    assert "is not a root of shardstore" in result.stderr
    assert kind in result.stderr


def test_parent_of_roots_names_them(roots: Roots) -> None:
    result = run("list", roots.one.parent, code=2)
    assert f"Did you mean {roots.one} or {roots.two}?" in result.stderr


def test_memory_of_a_store_is_no_root(roots: Roots) -> None:
    (user,) = roots.memory.iterdir()
    assert "the folder of all stores of one user" in run("list", user, code=2).stderr
    (namespace,) = user.iterdir()
    assert "shardstore memory list" in run("list", namespace, code=2).stderr


@pytest.mark.parametrize("inner", ["", "manifest.json", "rank-00000.safetensors"])
def test_snapshot_in_place_of_its_root_is_taken_for_that_snapshot(roots: Roots, inner: str) -> None:
    result = run("show", snapshot(roots.one, 200) / inner)
    assert snapshot(roots.one, 200).name in result.stdout
    assert f"its root is {roots.one}" in result.stderr


def test_snapshot_that_is_gone_names_its_root(roots: Roots) -> None:
    gone = roots.one / "step-000000000999.00000001-000009-aaaaaaaa"
    result = run("show", gone, code=2)
    assert "was deleted, or never was" in result.stderr
    assert f"shardstore list {roots.one}" in result.stderr


def test_path_and_options_may_not_contradict_each_other(roots: Roots) -> None:
    path = snapshot(roots.one, 200)
    assert "is not of step 100" in run("show", path, "--step", "100", code=2).stderr
    assert "--id says" in run("show", path, "--id", snapshot(roots.one, 100).name, code=2).stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nowhere://bucket/run", "no storage is known by nowhere://"),
        ("hdfs://x/y", "needs a client that is not installed"),
        ("s3://bucket/../run", "clients take for another one"),
        ("sftp://me:hidden@host/run", "a password in a URL would be shown"),
    ],
)
@pytest.mark.parametrize("command", ["list", "doctor"])
def test_url_that_cannot_be_a_root_is_refused(command: str, text: str, said: str) -> None:
    result = run(command, text, code=2)
    assert said in result.stderr
    assert "hidden" not in result.stderr + result.stdout


def test_file_url_and_relative_path_are_fine(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_json("list", f"file://{roots.one}")["root"] == str(roots.one)
    monkeypatch.chdir(roots.one.parent)
    assert run_json("list", "one")["root"] == str(roots.one)
    assert run_json("list", "./one/")["root"] == str(roots.one)


def test_file_in_place_of_a_folder_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert "is a file" in run("list", file, code=2).stderr
    assert f"{file} is a file" in run("list", file / "below", code=2).stderr


@pytest.mark.parametrize("step", ["abc", "-1", "1.5", "9" * 30, "²"])
def test_step_that_is_none_is_refused(roots: Roots, step: str) -> None:
    assert "is no step" in run("show", roots.one, f"--step={step}", code=2).stderr


def test_part_of_several_ids_lists_them(roots: Roots) -> None:
    result = run("show", roots.one, "--id", "step-0", code=2)
    assert result.stderr.count("step-000000000") == 3
