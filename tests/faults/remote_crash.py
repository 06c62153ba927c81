"""End a life at one request to remote storage, and look at what the next one finds there."""

from __future__ import annotations

import dataclasses
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from shardstore import SaveFailedError
from shardstore.testing import CountingOps, kill_at, run_forked
from tests.faults.clients import warm_client
from tests.faults.crash_at import Crash, Places, live_before, live_once, look, places, telling
from tests.faults.lives import SCENARIOS, Life, Scenario, Told, state_of


@dataclass(frozen=True)
class Remote:
    """Remote storage, for a process of one thread that forks. Pickles."""

    url: str
    """Roots are made below."""
    storage_options: Mapping[str, Any]
    loses_host: bool = False
    """Memory and disk are gone when the next life begins, as on a new host."""


class RequestOps(CountingOps):
    """Numbers requests alone: what else a life does is ended elsewhere."""

    def _hit(self, name: str, *subjects: str) -> None:
        if name.startswith("request:"):
            super()._hit(name, *subjects)


def _save_failing(life: Life) -> None:
    """Ranks disagree on the step: what each of them wrote goes."""
    store = life.open()
    life.commit(store, 1)
    life.arm()
    with pytest.raises(SaveFailedError, match="step"):
        life.save(store, 2, step=2 + life.number).wait(20)
    life.told.phase = 1
    with pytest.raises(SaveFailedError, match="step"):
        store.drain(20)


_PARTS_NUMEL: Final = 5 << 20
"""20 MiB: three parts on S3."""

REMOTE_SCENARIOS: Final[Mapping[str, Scenario]] = {
    **{
        name: SCENARIOS[name]
        for name in (
            "save, no older one",
            "open and save",
            "save, retention",
            "save, retention and a pin",
            "save, streamed",
            "save, by way of a disk",
            "save, persist=False leaves memory",
            "save, two ranks",
            "flush",
            "delete",
            "delete, two ranks",
            "close",
            "restore from the root",
            "adopt twice, two ranks",
            "publish late",
            "publish late, two ranks",
        )
    },
    "save, failing": Scenario(_save_failing, {0: {1}, 1: {1}}, {"keep": 2}, num_ranks=2),
    "save, in parts": dataclasses.replace(
        SCENARIOS["save, retention"],
        numel=_PARTS_NUMEL,
        options={"keep": 1, "memory": "64MiB"},
    ),
}
"""Every life that is ended at every request."""
NEEDS_HOST: Final = frozenset({"save, persist=False leaves memory"})
"""What these have in memory alone goes with the host."""


def remote_crashes_of(name: str, remote: Remote, first: int, stride: int) -> list[Crash]:
    """End the lives of a scenario at requests `first`, `first + stride`, ... as long as there are any."""
    found = [remote_crash_at(name, remote, first)]
    while found[-1].was_killed:
        first += stride
        found.append(remote_crash_at(name, remote, first))
    return found


def remote_crash_at(name: str, remote: Remote, at: int) -> Crash:
    """One life that ends at request `at` of its armed part, and the next one."""
    scenario = REMOTE_SCENARIOS[name]
    state_of(1)  # what torch and clients import, children have then
    warm_client(remote.url)
    url = f"{remote.url}/{secrets.token_hex(8)}"
    with places(url, remote.storage_options) as where:
        live_before(where, scenario, name)
        told = Told()
        ended = live_once(
            where, scenario, scenario.act, told, telling(told, kill_at(at)), counting=RequestOps
        )
        what = f"{name} on {url}, ended at {at}, {told.operation}, in phase {told.phase}"
        assert not ended.error, f"{what}: {ended.error}"
        if remote.loses_host:
            _lose_host(where)
        allowed = scenario.found
        after = run_forked(lambda: look(where, scenario))
        assert not after.error, f"{what}: {after.error}"
        assert after.value in allowed[told.phase], (
            f"{what}: restored {after.value}, not one of {allowed[told.phase]}"
        )
        return Crash(ended.was_killed, told.operation, told.phase, after.value)


def _lose_host(where: Places) -> None:
    for path in (Path(where.folder, "memory"), Path(where.disk_folder)):
        shutil.rmtree(path, ignore_errors=True)
    Path(where.disk_folder).mkdir()
