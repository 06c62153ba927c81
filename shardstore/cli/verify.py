"""`shardstore verify`: every digest of every file."""

from __future__ import annotations

import time
from typing import Any

import click
from msgspec import UNSET

from shardstore.cli.choosing import choose_many
from shardstore.cli.output import note, plural, say, say_status, size, write_json
from shardstore.cli.parameters import json_option, root_argument, which_options
from shardstore.cli.places import PlaceError, find_root
from shardstore.cli.progress import byte_bar
from shardstore.engine.attempts import Attempt, find_attempts
from shardstore.engine.audit import Audit, Finding, audit_snapshot


@click.command()
@root_argument
@which_options("all")
@click.option("--mark", is_flag=True, help="Mark what is damaged: retention counts it no more.")
@json_option
def verify(root: str, step: str | None, id_: str | None, mark: bool, as_json: bool) -> None:
    """Read snapshots whole and compare every digest.

    Of manifests, headers and tensors. Exit code 1 if anything is not as it was written; each finding names the rank, file and tensor. Attempts
    that were never committed are no snapshots, and not read. Memory stays under 256 MiB. Nothing is
    written, except with --mark.
    """
    place = find_root(root)
    wanted = set(choose_many(place, step=step, id_=id_))
    attempts = [a for a in find_attempts(place.catalog) if a.id in wanted]
    is_named = place.snapshot is not None or id_ is not None or step not in (None, "all")
    to_read = [a for a in attempts if a.state in ("committed", "damaged")]
    passed_over = [a for a in attempts if a not in to_read]
    if not attempts:
        raise PlaceError(f"there is no snapshot in {place.root} to verify")
    started = time.monotonic()
    audits: list[Audit] = []
    for number, attempt in enumerate(to_read, 1):
        title = f"step {attempt.id.step} ({number} of {len(to_read)})"
        total = attempt.register.nbytes if attempt.register is not None else 0
        with byte_bar(title, total=total) as bar:
            audit = audit_snapshot(place.catalog, attempt.id, progress=bar.advance)
        audits.append(audit)
        if mark and audit.proves_damage and not audit.is_gone:
            place.catalog.mark_damaged(audit.id)
        if not as_json:
            _say(audit)
        if attempt.register is not None and attempt.register.here is not UNSET and attempt.why:
            note(f"step {attempt.id.step}: {attempt.why}")
    seconds = time.monotonic() - started
    is_good = all(audit.is_gone or not audit.findings for audit in audits)
    is_good = is_good and not (passed_over and is_named)
    if as_json:
        document = {
            "command": "verify",
            "root": place.root,
            "ok": is_good,
            "snapshots": [_as_json(audit) for audit in audits],
            "not_committed": [
                {"id": a.id.name, "state": a.state, "why": a.why} for a in passed_over
            ],
            "seconds": seconds,
        }
        write_json(document)
    _say_rest(passed_over, is_named=is_named)
    if not as_json:
        nbytes = sum(audit.nbytes for audit in audits)
        speed = f", {size(int(nbytes / seconds))}/s" if seconds > 0.5 else ""
        num_bad = sum(bool(audit.findings) and not audit.is_gone for audit in audits)
        verdict = f"{num_bad} of them damaged" if num_bad else "all as they were written"
        if audits:
            say(f"{plural(len(audits), 'snapshot')}, {size(nbytes)} read in {seconds:.1f} s{speed}: {verdict}")  # fmt: skip
    if not is_good:
        click.get_current_context().exit(1)


def _say(audit: Audit) -> None:
    if audit.is_gone:
        say(f"gone  step {audit.id.step}  {audit.id.name}: deleted while it was read")
        return
    facts = f"step {audit.id.step}  {audit.id.name}"
    if not audit.findings:
        read = f"{plural(audit.num_tensors, 'tensor')} in {plural(audit.num_files - 1, 'file')}"
        say_status("ok", f"{facts}  {read}, {size(audit.nbytes)}")
        return
    say_status("fail", f"{facts}  {plural(len(audit.findings), 'finding')}")
    for finding in audit.findings:
        first, *rest = finding.problem.split("\n")
        say(f"      {_where(finding)}: {first}")
        for line in rest:
            say(f"      {line}")


def _where(finding: Finding) -> str:
    rank = "" if finding.rank is None else f"rank {finding.rank}, "
    tensor = "" if finding.tensor is None else f", tensor {finding.tensor}"
    return f"{rank}{finding.file}{tensor}"


def _say_rest(passed_over: list[Attempt], *, is_named: bool) -> None:
    if is_named:
        for attempt in passed_over:
            note(f"{attempt.id.name} is {attempt.state}, not a snapshot: {attempt.why}")
    elif passed_over:
        text = "attempt was" if len(passed_over) == 1 else "attempts were"
        note(f"{len(passed_over)} {text} never committed, and not read: shardstore list --all")


def _as_json(audit: Audit) -> dict[str, Any]:
    return {
        "step": audit.id.step,
        "id": audit.id.name,
        "ok": audit.is_gone or not audit.findings,
        "deleted_meanwhile": audit.is_gone,
        "num_files": audit.num_files,
        "num_tensors": audit.num_tensors,
        "nbytes": audit.nbytes,
        "findings": [
            {"rank": f.rank, "file": f.file, "tensor": f.tensor, "problem": f.problem}
            for f in audit.findings
        ],
    }
