"""Memory limits of control groups, read from trees as kernels and containers show them."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping

import pytest

from shardstore.tiers.cgroups import GroupRoom, ReadText, group_rooms
from shardstore.tiers.fileops import FileOps

MIB = 1 << 20
V2_MOUNT = "35 31 0:32 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "36 31 0:33 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
V1_CPU = "37 31 0:34 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct"
HYBRID = "38 31 0:35 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"


def tree(cgroup: str, mounts: str, files: Mapping[str, object]) -> ReadText:
    """A kernel that has these files only."""
    found = {"/proc/self/cgroup": cgroup, "/proc/self/mountinfo": mounts} | dict(files)

    def read(path: str) -> str:
        if path not in found:
            raise FileNotFoundError(path)
        return f"{found[path]}\n"

    return read


def v2(
    group: str, limit: object, use: int, *, high: object = "max", stat: str = ""
) -> dict[str, object]:
    return {
        f"{group}/memory.max": limit, f"{group}/memory.high": high,
        f"{group}/memory.current": use, f"{group}/memory.stat": stat,
    }  # fmt: skip


def v1(group: str, limit: int, use: int, stat: str = "") -> dict[str, object]:
    return {
        f"{group}/memory.limit_in_bytes": limit, f"{group}/memory.usage_in_bytes": use,
        f"{group}/memory.stat": stat,
    }  # fmt: skip


def tightest(read: ReadText) -> GroupRoom:
    return min(group_rooms(read), key=lambda room: room.nbytes)


def test_limit_minus_use_in_both_versions() -> None:
    read = tree("0::/job", V2_MOUNT, v2("/sys/fs/cgroup/job", 512 * MIB, 100 * MIB))
    expected = GroupRoom(412 * MIB, 512 * MIB, "/sys/fs/cgroup/job/memory.max")
    assert group_rooms(read) == [expected]
    old = "/sys/fs/cgroup/memory/job"
    read = tree(
        "4:cpu,cpuacct:/x\n3:memory:/job\n0::/y",
        f"{V1_CPU}\n{HYBRID}\n{V1_MOUNT}",
        v1(old, 512 * MIB, 100 * MIB),
    )
    assert group_rooms(read) == [GroupRoom(412 * MIB, 512 * MIB, f"{old}/memory.limit_in_bytes")]


def test_the_tightest_ancestor_counts_wherever_it_is() -> None:
    top = "/sys/fs/cgroup"
    groups = [f"{top}/a", f"{top}/a/b", f"{top}/a/b/c"]
    for tight in groups:
        files: dict[str, object] = {}
        for group in groups:
            files |= v2(group, (600 if group == tight else 900) * MIB, 200 * MIB)
        assert tightest(tree("0::/a/b/c", V2_MOUNT, files)).file == f"{tight}/memory.max"
        assert tightest(tree("0::/a/b/c", V2_MOUNT, files)).nbytes == 400 * MIB
    sibling = v2(f"{top}/other", 1, 1) | v2(f"{top}/a/bb", 1, 1)
    assert group_rooms(tree("0::/a/b", V2_MOUNT, sibling)) == []


def test_memory_high_is_a_limit_too() -> None:
    group = "/sys/fs/cgroup/job"
    read = tree("0::/job", V2_MOUNT, v2(group, 900 * MIB, 100 * MIB, high=300 * MIB))
    assert tightest(read) == GroupRoom(200 * MIB, 300 * MIB, f"{group}/memory.high")


def test_inside_a_container_the_mount_shows_its_own_group() -> None:
    expected = 300 * MIB
    limited = v2("/sys/fs/cgroup", 512 * MIB, 212 * MIB)
    assert tightest(tree("0::/", V2_MOUNT, limited)).nbytes == expected, "own namespace"
    mount = V2_MOUNT.replace("0:32 / ", "0:32 /docker/abc ")
    for path in ("/docker/abc", "/../elsewhere", "/docker/abcd"):
        assert tightest(tree(f"0::{path}", mount, limited)).nbytes == expected, path
    nested = limited | v2("/sys/fs/cgroup/step", 300 * MIB, 290 * MIB)
    assert tightest(tree("0::/docker/abc/step", mount, nested)).nbytes == 10 * MIB
    old = v1("/sys/fs/cgroup/memory", 512 * MIB, 212 * MIB)
    mount = V1_MOUNT.replace("0:33 / ", "0:33 /docker/abc ")
    assert tightest(tree("9:memory:/docker/abc", mount, old)).nbytes == expected
    elsewhere = V2_MOUNT.replace("/sys/fs/cgroup ", "/run/groups ")
    assert (
        tightest(tree("0::/", elsewhere, v2("/run/groups", 512 * MIB, 212 * MIB))).nbytes
        == expected
    )


def test_page_cache_can_be_had_and_shared_memory_cannot() -> None:
    group = "/sys/fs/cgroup/job"
    stat = f"anon {60 * MIB}\nfile {440 * MIB}\nshmem {140 * MIB}\ninactive_file {200 * MIB}\nactive_file {100 * MIB}"
    read = tree("0::/job", V2_MOUNT, v2(group, 512 * MIB, 510 * MIB, stat=stat))
    assert tightest(read).nbytes == (512 - 510 + 200 + 50) * MIB
    old = "/sys/fs/cgroup/memory/job"
    stat = f"inactive_file 0\nactive_file 0\ntotal_inactive_file {200 * MIB}\ntotal_active_file {100 * MIB}"
    read = tree("3:memory:/job", V1_MOUNT, v1(old, 512 * MIB, 510 * MIB, stat))
    assert tightest(read).nbytes == (512 - 510 + 200 + 50) * MIB, "of the group and all below it"


def test_no_limit_is_none_and_use_above_the_limit_leaves_nothing() -> None:
    group = "/sys/fs/cgroup/job"
    assert group_rooms(tree("0::/job", V2_MOUNT, v2(group, "max", MIB))) == []
    old = "/sys/fs/cgroup/memory"
    assert group_rooms(tree("3:memory:/", V1_MOUNT, v1(old, 9223372036854771712, MIB))) == []
    assert tightest(tree("0::/job", V2_MOUNT, v2(group, MIB, 2 * MIB))).nbytes == 0
    assert group_rooms(tree("0::/", "", {})) == []


def test_without_proc_the_usual_places_are_looked_at() -> None:
    files = v2("/sys/fs/cgroup", 512 * MIB, 212 * MIB)

    def read(path: str) -> str:
        if path.startswith("/proc"):
            raise PermissionError(path)
        return tree("", "", files)(path)

    assert tightest(read).nbytes == 300 * MIB


@pytest.mark.parametrize("seed", range(20))
def test_files_that_make_no_sense_raise_nothing(seed: int) -> None:
    chance = random.Random(seed)

    def read(path: str) -> str:
        if chance.random() < 0.2:
            raise OSError(path)
        return chance.choice(
            [
                "",
                "\n\n",
                "0::",
                "0",
                "a:b",
                "0::/x\nx",
                "1:memory:/",
                "-1",
                "x - cgroup2",
                "memory.stat 1",
            ]
        )

    for room in group_rooms(read):
        assert room.nbytes >= 0


@pytest.mark.skipif(not os.path.exists("/proc/self/cgroup"), reason="no control groups here")
def test_the_groups_of_this_very_process_can_be_read() -> None:
    for room in group_rooms(FileOps().read_text):
        assert 0 <= room.nbytes <= room.limit
        assert os.path.exists(room.file)
