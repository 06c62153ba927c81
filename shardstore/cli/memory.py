"""`shardstore memory list|clear`: what runs keep or left in host memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import click

from shardstore.cli.output import Column, note, plural, say, say_status, say_table, size, write_json
from shardstore.cli.parameters import MEMORY_DIR, json_option, memory_dir_option, yes_option
from shardstore.cli.places import PlaceError
from shardstore.engine.attempts import list_ranks
from shardstore.engine.listing import resolve_name, resolve_root
from shardstore.tiers.fileops import current_ops
from shardstore.tiers.leftovers import (
    Cleared,
    Namespace,
    clear_namespace,
    find_namespaces,
    other_users,
    user_folder,
)

_root_option = click.option(
    "--root",
    metavar="ROOT",
    help="Only the memory of this root's store (a name is a digest of the root's path).",
)
_name_option = click.option("--name", metavar="NAME", help="Only the memory of this name.")


@click.group(invoke_without_command=True)
@click.pass_context
def memory(ctx: click.Context) -> None:
    """See or free what runs keep in host memory."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@memory.command("list")
@_root_option
@_name_option
@memory_dir_option
@json_option
def list_(root: str | None, name: str | None, memory_dir: str, as_json: bool) -> None:
    """List what stores of this user keep: which steps, alive or dead."""
    memory_dir = os.path.abspath(memory_dir)
    found = _find(memory_dir, root, name)
    if as_json:
        document = {
            "command": "memory list",
            "memory_dir": memory_dir,
            "namespaces": [_as_json(namespace, root) for namespace in found],
            "other_users": other_users(memory_dir, current_ops()),
        }
        write_json(document)
        return
    rows = [
        [
            namespace.name,
            _state(namespace),
            size(namespace.nbytes),
            _short_ranks(namespace),
            ", ".join(str(i.step) for i in namespace.ids) or "none",
            _owners(namespace),
        ]
        for namespace in found
    ]
    columns = [
        Column("NAME"), Column("RUN"), Column("MEMORY", is_number=True), Column("RANKS"),
        Column("STEPS"), Column("HELD BY"),
    ]  # fmt: skip
    if rows:
        say_table(columns, rows)
    else:
        note(f"nothing in {user_folder(memory_dir)}: no store of this user has memory on this host")
    others = other_users(memory_dir, current_ops())
    if others:
        note(f"other users have memory there as well: {', '.join(others)}")
    dead = sum(namespace.nbytes for namespace in found if not _is_alive(namespace))
    if dead:
        note(
            f"{size(dead)} are of runs that ended. A restart on this host restores from it; if none will "
            f"come: shardstore memory clear{_elsewhere(memory_dir)}"
        )


@memory.command()
@_root_option
@_name_option
@yes_option
@memory_dir_option
@json_option
def clear(root: str | None, name: str | None, yes: bool, memory_dir: str, as_json: bool) -> None:
    """Free memory of runs that ended; what a process holds stays.

    A snapshot that was only in memory is lost by it.
    """
    found = _find(memory_dir, root, name)
    if (root is not None or name is not None) and not found:
        raise PlaceError(f"there is no memory of that store in {user_folder(memory_dir)}")
    results: list[Cleared] = []
    for namespace in found:
        if yes:
            results.append(clear_namespace(namespace, current_ops()))
        else:
            alive = {owner.nonce for owner in namespace.owners if owner.is_alive}
            free = [f for f in namespace.files if f.owner.nonce not in alive]
            held = tuple(owner for owner in namespace.owners if owner.is_alive)
            num = sum(not file.is_mark for file in free)
            results.append(Cleared(sum(file.nbytes for file in free), num, held, ()))
    problems = [problem for result in results for problem in result.problems]
    if as_json:
        namespaces = [
            {
                "name": namespace.name,
                "path": namespace.path,
                "nbytes": result.nbytes,
                "num_files": result.num_files,
                "held_by": [{"pid": o.pid, "rank": o.rank} for o in result.held],
                "problems": list(result.problems),
            }
            for namespace, result in zip(found, results, strict=True)
        ]
        document = {"command": "memory clear", "done": yes, "namespaces": namespaces}
        write_json(document)
    else:
        _say_cleared(found, results, done=yes)
    for problem in problems:
        note(problem)
    if problems:
        click.get_current_context().exit(1)


def _say_cleared(found: Sequence[Namespace], results: Sequence[Cleared], *, done: bool) -> None:
    verb = "freed" if done else "would free"
    for namespace, result in zip(found, results, strict=True):
        steps = ", ".join(str(i.step) for i in namespace.ids) or "none"
        if result.num_files or not result.held:
            files = plural(result.num_files, "file")
            say(f"{verb}  {namespace.name}: {size(result.nbytes)} in {files} (steps {steps})")
        if result.held:
            pids = sorted({owner.pid for owner in result.held if owner.pid})
            who = ", ".join(map(str, pids)) or "of another pid namespace"
            say_status("warn", f"{namespace.name}: left alone, process {who} holds it")
    total = sum(result.nbytes for result in results)
    num_files = sum(result.num_files for result in results)
    if not num_files:
        say("there is nothing to free")
    elif not done:
        say(f"{size(total)} would be free: add --yes")


def _find(memory_dir: str, root: str | None, name: str | None) -> list[Namespace]:
    if not os.path.isdir(memory_dir):
        raise PlaceError(f"{memory_dir} is no folder on this host: give the store's --memory-dir")
    found = find_namespaces(os.path.abspath(memory_dir), current_ops())
    if root is None and name is None:
        return found
    try:
        wanted = resolve_name(name, resolve_root(root))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return [namespace for namespace in found if namespace.name in (wanted, name)]


def _elsewhere(memory_dir: str) -> str:
    return "" if memory_dir == MEMORY_DIR else f" --memory-dir {memory_dir}"


def _is_alive(namespace: Namespace) -> bool:
    return any(owner.is_alive for owner in namespace.owners)


def _state(namespace: Namespace) -> str:
    return "alive" if _is_alive(namespace) else "ended"


def _short_ranks(namespace: Namespace) -> str:
    ranks = list_ranks(file.rank for file in namespace.files)
    return ranks.removeprefix("ranks ").removeprefix("rank ") or "none"


def _owners(namespace: Namespace) -> str:
    alive = [owner for owner in namespace.owners if owner.is_alive]
    pids = sorted({owner.pid for owner in alive if owner.pid})
    hidden = ["of another pid namespace"] if any(not owner.pid for owner in alive) else []
    return ", ".join([*(f"pid {pid}" for pid in pids), *hidden]) or "nobody"


def _as_json(namespace: Namespace, root: str | None) -> dict[str, Any]:
    return {
        "name": namespace.name,
        "root": None if root is None else resolve_root(root),
        "path": namespace.path,
        "alive": _is_alive(namespace),
        "nbytes": namespace.nbytes,
        "ranks": sorted({file.rank for file in namespace.files}),
        "snapshots": [
            {"step": i.step, "id": i.name, "ranks": list(namespace.ranks_of(i))}
            for i in namespace.ids
        ],
        "owners": [
            {"rank": o.rank, "run_nonce": o.nonce, "alive": o.is_alive, "pid": o.pid or None}
            for o in namespace.owners
        ],
    }
