"""Connect the ranks of a process group: one broadcast of the store's address, then our own sockets."""

from __future__ import annotations

import datetime
import os
import platform
import secrets
import socket
import weakref
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Final

import msgspec

from shardstore.cluster.boot import read_boot_id
from shardstore.cluster.coordination import Coordinator
from shardstore.cluster.kv import LocalKeyValueStore, TcpKeyValueStore
from shardstore.cluster.threads import ThreadRank
from shardstore.errors import CoordinationError, CoordinationTimeoutError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ADDRESS_BYTES: Final = 1024
_CONNECT_S: Final = 20.0


class _Address(msgspec.Struct, frozen=True):
    """Where rank 0's store listens, and the run's nonce."""

    nonce: str
    port: int
    boot_id: str
    host: str
    candidates: tuple[str, ...]


def connect(process_group: ProcessGroup | ThreadRank | None, *, timeout_s: float) -> Coordinator:
    """Make this rank's coordinator; every rank of the group calls it.

    The group carries one small broadcast and is not used again.

    Args:
        process_group: Ranks that take part; None: all.
        timeout_s: Default deadline of the coordinator.

    Raises:
        CoordinationError: WORLD_SIZE says that there are others, but no process group was initialised;
            or rank 0's store cannot be reached.
    """
    if isinstance(process_group, ThreadRank):
        return process_group.connect(timeout_s=timeout_s, boot_id=read_boot_id())
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        _refuse_unconnected_ranks()
        return _alone(timeout_s)
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank < 0:
        raise CoordinationError("this process is not a member of process_group", phase="connecting")
    group_ranks = tuple(dist.get_process_group_ranks(process_group))
    if world_size == 1:
        alone = _alone(timeout_s)
        alone.group_ranks = group_ranks
        return alone
    store = None
    address = None
    if rank == 0:
        store, port = TcpKeyValueStore.host(timeout_s)
        address = _Address(
            secrets.token_hex(4), port, read_boot_id(), platform.node(), _candidates(process_group)
        )
    address = _broadcast(address, process_group, timeout_s)
    if store is None:
        store = _join(address, timeout_s)
    coordinator = _introduce(store, rank, world_size, timeout_s, address)
    coordinator.group_ranks = group_ranks
    return coordinator


def _refuse_unconnected_ranks() -> None:
    declared = os.environ.get("WORLD_SIZE", "1")
    if declared.isdigit() and int(declared) > 1:
        raise CoordinationError(
            f"WORLD_SIZE is {declared}, but torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() before opening the store, or every rank would "
            "believe to be alone and overwrite the others",
            phase="connecting",
        )


def _alone(timeout_s: float) -> Coordinator:
    return Coordinator(
        LocalKeyValueStore(),
        rank=0,
        world_size=1,
        timeout_s=timeout_s,
        nonce=secrets.token_hex(4),
        host=platform.node(),
        boot_id=read_boot_id(),
        local_ranks=(0,),
    )


def _candidates(process_group: ProcessGroup | None) -> tuple[str, ...]:
    """Names under which other hosts may reach this one, best first."""
    import torch.distributed as dist

    found: dict[str, None] = {}
    is_global_master = process_group is None or dist.get_global_rank(process_group, 0) == 0
    if is_global_master and os.environ.get("MASTER_ADDR"):
        found[os.environ["MASTER_ADDR"]] = None
    name = socket.gethostname()
    found[name] = None
    try:
        for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            found[str(info[4][0])] = None
    except OSError:
        pass
    return tuple(found)[:8]


def _broadcast(
    address: _Address | None, process_group: ProcessGroup | None, timeout_s: float
) -> _Address:
    """Send rank 0's address to all; a tensor of fixed size, since objects would be pickled."""
    import torch
    import torch.distributed as dist

    device = _device(process_group)
    buffer = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8)
    if address is not None:
        data = msgspec.json.encode(address)
        if len(data) > _ADDRESS_BYTES:
            data = msgspec.json.encode(msgspec.structs.replace(address, candidates=()))
        buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    buffer = buffer.to(device)
    source = 0 if process_group is None else dist.get_global_rank(process_group, 0)
    try:
        work = dist.broadcast(buffer, src=source, group=process_group, async_op=True)
        if work is not None:
            work.wait(datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise CoordinationTimeoutError(
            f"not all ranks opened the store within {timeout_s:g} s ({error}): every rank of the group "
            "must open it, with the same arguments",
            phase="connecting",
        ) from error
    data = bytes(buffer.cpu().tolist()).rstrip(b"\0")
    return msgspec.json.decode(data, type=_Address)


def _device(process_group: ProcessGroup | None) -> str:
    """A device that the group can broadcast from."""
    import torch
    import torch.distributed as dist

    backend = str(dist.get_backend(process_group))
    if "gloo" in backend or "mpi" in backend or "fake" in backend:
        return "cpu"
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available():
        return str(accelerator.current_accelerator())
    return "cuda"


def _join(address: _Address, timeout_s: float) -> TcpKeyValueStore:
    same_host = address.boot_id == read_boot_id() and address.host == platform.node()
    candidates = [*(("127.0.0.1",) if same_host else ()), *address.candidates]
    tried = []
    limit_s = max(1.0, min(timeout_s, _CONNECT_S))
    for candidate in candidates:
        try:
            with socket.create_connection((candidate, address.port), timeout=limit_s):
                pass
            return TcpKeyValueStore.join(candidate, address.port, timeout_s)
        except (OSError, RuntimeError) as error:
            tried.append(f"{candidate}: {error}")
    raise CoordinationError(
        f"rank 0's store on {address.host}, port {address.port}, cannot be reached. Tried "
        + "; ".join(tried),
        failed_ranks=(0,),
        phase="connecting",
    )


def _abandon(coordinator: weakref.ref[Coordinator]) -> None:
    alive = coordinator()
    if alive is not None:
        alive.abandon()


class _Card(msgspec.Struct, frozen=True):
    boot_id: str
    host: str


def _introduce(
    store: TcpKeyValueStore, rank: int, world_size: int, timeout_s: float, address: _Address
) -> Coordinator:
    """Learn which ranks share this host."""
    boot_id, host = read_boot_id(), platform.node()
    coordinator = Coordinator(
        store,
        rank=rank,
        world_size=world_size,
        timeout_s=timeout_s,
        nonce=address.nonce,
        host=host,
        boot_id=boot_id,
    )
    # However this process ends, short of a kill: what it has to say goes out, and rank 0, which hosts
    # the store, stays until the others have read the last decision. Unlike atexit, this also runs in
    # children of multiprocessing.
    Finalize(None, _abandon, args=(weakref.ref(coordinator),), exitpriority=10)
    card = _Card(boot_id, host)
    try:
        cards = msgspec.json.decode(
            coordinator.gather_decide(
                "cards",
                msgspec.json.encode(card),
                lambda values: b"[" + b",".join(values) + b"]",
                phase="connecting the ranks",
            ),
            type=list[_Card],
        )
    except BaseException:
        coordinator.abandon()
        raise
    coordinator.local_ranks = tuple(r for r, other in enumerate(cards) if other == card)
    return coordinator
