"""What shardstore is held to: ratios of medians of one run, and bounds."""

from __future__ import annotations

from benchmarks import restarts, steady
from benchmarks.table import Target

_BLOCKS = "shardstore: save blocks"
_BIG_BLOCKS = "shardstore: save blocks, 64 MiB tensors"
_DURABLE = "shardstore: save until durable"
_COPY = "bare: warm copy"


def _speed(what: str, of: str, by: str, limit: str) -> Target:
    return Target(what, of, limit, by, is_speed=True)


LARGE = (
    Target("save blocks / bare warm copy, in a process of its own", steady.BLOCKS, "<= 1.15", steady.COPY),
    Target("save blocks / DCP async_save, 64 MiB tensors", _BIG_BLOCKS, "<= 0.33", "DCP async_save: save blocks, 64 MiB tensors"),
    Target("save blocks / DCP async_save", _BLOCKS, "<= 1.00", "DCP async_save: save blocks"),
    Target("save blocks / DCP async_save, reused shared memory", _BLOCKS, "<= 1.05", "DCP async_save, reused shared memory: save blocks"),
    Target("first save after warmup / later ones, in a process of its own", steady.FIRST, "<= 1.15", steady.BLOCKS),
    _speed("return of save to committed, speed against bare write + fsync, in a process of its own", steady.AFTER, steady.WRITE, ">= 0.85"),
    _speed("start of save to committed, speed against bare write + fsync, in a process of its own", steady.DURABLE, steady.WRITE, ">= 0.70"),
    _speed("start of save to committed, speed against DCP save", _DURABLE, "DCP save: save until durable", ">= 1.50"),
    _speed("start of save to committed, speed against save_file + fsync", _DURABLE, "safetensors save_file + fsync: save until durable", ">= 1.50"),
    _speed("restore from memory after SIGKILL, speed against one-thread copy", restarts.SIGKILL, restarts.COPY, ">= 0.45"),
    _speed("restore from memory after SIGKILL on one CPU, speed against one-thread copy", restarts.SIGKILL_ONE_CPU, restarts.COPY_ONE_CPU, ">= 0.33"),
    _speed("restore from memory after SIGKILL, speed against DCP load, warm page cache", restarts.SIGKILL, "DCP save: load, warm page cache", ">= 1.20"),
    _speed("read and verify from disk, speed against bare cold read", restarts.VERIFY, restarts.READ, ">= 0.95"),
    _speed("restore from disk, warmed slot, speed against bare cold read", restarts.WARMED, restarts.READ, ">= 0.65"),
    _speed("restore from disk, warmed slot, speed against bare cold read, then bare copy", restarts.WARMED, restarts.READ_COPY, ">= 0.90"),
    _speed("restore from disk, fresh process, speed against bare cold read", restarts.FRESH, restarts.READ, ">= 0.45"),
    _speed("restore from disk, warmed slot, speed against DCP load, cold", restarts.WARMED, "DCP save: load, cold", ">= 1.30"),
    Target("peak memory beyond state and budget, MiB", "shardstore: peak memory beyond the state and the budget", "<= 256"),
    Target("the same with a budget of half the state, MiB", "shardstore, budget of half the state: peak memory beyond the state and the budget", "<= 256"),
    Target("pure Python slowed while spilling, %", "shardstore: pure Python loop slowed while writing", "<= 5"),
    Target("the same / by the bare steps on threads of this process", "shardstore: pure Python loop slowed while writing", "<= 1.25", "bare digest and write, this process: pure Python loop slowed while writing"),
    Target("all-core torch loop loses while spilling, s per GiB", "shardstore: all-core torch loop loses while writing", "<= 0.10"),
    Target("the same / by the bare steps in another process", "shardstore: all-core torch loop loses while writing", "<= 1.25", "bare digest and write, another process: all-core torch loop loses while writing"),
    Target("10,000 plain tensors, each save, us per tensor", "bookkeeping, plain tensors: save", "<= 5"),
    Target("10,000 plain tensors, first save, us per tensor", "bookkeeping, plain tensors: first save", "<= 40"),
    Target("module and AdamW of 10,000 tensors, each save, us per tensor", "bookkeeping, module and AdamW: save", "<= 5"),
    Target("module and AdamW of 10,000 tensors, first save, us per tensor", "bookkeeping, module and AdamW: first save", "<= 40"),
    Target("manifest of 4,096 ranks x 10,000 tensors / those of 4,096 x 1 and 1 x 10,000", "bookkeeping, manifest of 4096 ranks x 10000 tensors", "<= 1.05", "bookkeeping, manifests of 4096 x 1 and 1 x 10000"),
)  # fmt: skip

GPT = (
    Target("save blocks / bare warm copy", _BLOCKS, "<= 1.15", _COPY),
    Target("save blocks / DCP async_save", _BLOCKS, "<= 1.00", "DCP async_save: save blocks"),
    _speed("start of save to committed, speed against DCP save", _DURABLE, "DCP save: save until durable", ">= 1.50"),
    _speed("restore from disk, fresh process, speed against DCP load, cold, fresh process", restarts.FRESH, "DCP save: restore from disk, cold, fresh process", ">= 1.30"),
)  # fmt: skip

TINY = (
    Target("save blocks / DCP async_save", f"{_BLOCKS}, per tensor", "<= 1.00", "DCP async_save: save blocks, per tensor"),
    _speed("start of save to committed, speed against DCP save", f"{_DURABLE}, per tensor", "DCP save: save until durable, per tensor", ">= 1.50"),
)  # fmt: skip

OF_STATE = {"large": LARGE, "gpt": GPT, "tiny": TINY}
