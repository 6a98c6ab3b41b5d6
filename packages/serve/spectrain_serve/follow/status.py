"""`spectrain follow status`, which only reads files: it imports nothing that loads torch."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from spectrain.errors import UserError
from spectrain.files import open_in_place
from spectrain.output.verbosity import print_json

from .ledger import describe_entry, format_number, format_time, read_ledger, report_damage
from .state import FollowFolder

# Decisions that are printed.
NUM_SHOWN = 10


def status_command(run: str | None, rollback: bool) -> None:
    """Print what follows a run, and its last decisions; or request a roll-back of the process
    that follows it.
    """
    if run is None:
        raise UserError("run: say which run, as in run=runs/NAME")
    folder = FollowFolder(Path(run))
    if not folder.ledger.exists():
        raise UserError(
            f"run={run}: nothing has followed this run; start spectrain follow run={run}"
        )
    if rollback:
        os.close(open_in_place(folder.root / "rollback", os.O_WRONLY | os.O_CREAT))
        print_json({"rollback": "requested"})
        print(
            "a roll-back is requested; the process that follows this run makes it within some "
            "seconds"
        )
        return
    status = folder.read_status()
    print_json(
        {
            "status": None if status is None else asdict(status),
            "decisions": [*read_ledger(folder.ledger)][-NUM_SHOWN:],
        }
    )
    print("\n".join(format_status(folder)))


def format_status(folder: FollowFolder) -> list[str]:
    """Return the lines that `spectrain follow status` prints."""
    status = folder.read_status()
    lines = list[str]()
    if status is not None:
        active = status.active
        lines.append(
            f"active drafter  {active.path} ({active.digest[:8]}) since {format_time(active.since)}"
        )
        lines.append(f"now             {status.phase}, last checked {format_time(status.time)}")
        lines.append(f"recorded        {status.conversations} conversations, {status.old} old ones")
        for kind, entry in status.kinds.items():
            mean = format_number(entry.accepted_per_draft)
            reference = format_number(entry.reference)
            alarm = ", alarm of drift" if entry.alarm else ""
            alarm += f", {entry.unmeasured} not measurable" if entry.unmeasured else ""
            lines.append(
                f"{kind:15} {entry.requests} requests, {mean} accepted per draft, reference "
                f"{reference or '-'}{alarm}"
            )
    lines.append("last decisions")
    for decision in [*read_ledger(folder.ledger, report_damage)][-NUM_SHOWN:]:
        lines.append(
            f"  {format_time(decision['time'])}  {decision['event']}: {describe_entry(decision)}"
        )
    # A line break in a file would look like another line.
    return [line.replace("\n", " ") for line in lines]
