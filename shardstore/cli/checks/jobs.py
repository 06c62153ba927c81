"""Check which runs work on a root."""

from __future__ import annotations

from shardstore.cli.checks.check import Check
from shardstore.engine.catalog import Catalog
from shardstore.engine.liveness import judge
from shardstore.errors import TierError

_MAX_NAMED = 3


def check_jobs(catalog: Catalog) -> list[Check]:
    """One job on a root is right; more keep apart, but each restores what the other saved."""
    name = "root: jobs"
    try:
        records = {run: catalog.run_record(run) for run in catalog.tier.run_numbers()}
    except TierError as error:
        return [Check(name, "fail", str(error), "Mount it again, or give another root.")]
    judged = {run: judge(record, catalog.tier.location) for run, record in records.items()}
    alive = sorted(run for run, judgement in judged.items() if judgement.liveness == "alive")
    unknown = sorted(run for run, judgement in judged.items() if judgement.liveness == "unknown")
    facts = {"runs": len(records), "alive": alive, "unknown": unknown}
    named = "; ".join(f"run {run}: {judged[run].why}" for run in alive[-_MAX_NAMED:])
    if len(alive) > 1:
        return [
            Check(
                name, "warn", named, "Give each job a root of its own, or end the older one.", facts
            )
        ]
    if alive:
        return [Check(name, "ok", named, facts=facts)]
    text = f"none of {len(records)} runs is alive" if records else "there are no records of runs"
    if unknown:
        text += f"; of {len(unknown)} nobody can say here (run {unknown[-1]}: {judged[unknown[-1]].why})"
    return [Check(name, "ok", text, facts=facts)]
