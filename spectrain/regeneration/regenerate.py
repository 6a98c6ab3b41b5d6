"""`spectrain data regenerate`: conversations whose answers the target generates, shard by shard.

A drafter learns the target's distribution, so a data set with other answers is best regenerated.
The command can be killed at any moment and resumes where it stopped. Several processes, of torchrun
or of separate commands, share the shards.
"""

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from spectrain.config.values import Count, Share
from spectrain.data.messages import Conversation
from spectrain.data.readers import ConversationReader
from spectrain.data.shards import FailedRow, PendingRow, Row, Shard, ShardSet
from spectrain.errors import SIGNAL_STATUS, RunError, RunInterrupted, UserError
from spectrain.output.verbosity import print_json, result_output
from spectrain.provenance import collect_provenance

from .progress import WritingProgress
from .sampling import Sampling
from .writers import AnswerWriter

MAX_CALIBRATION_ROWS = 64
"""Number of first conversations among which prompts are searched for calibration."""


@dataclass
class OutcomeLedger:
    """Records each conversation in its shard once it is answered or has failed."""

    shards: ShardSet
    progress: WritingProgress
    stop_after: int
    # Number of consecutive failures so far.
    num_failed: int = 0
    complete_shards: list[Shard] = field(default_factory=list)

    def add_outcome(self, shard: Shard, outcome: Row | FailedRow) -> None:
        self.num_failed = (
            self.num_failed + 1
            if isinstance(outcome, FailedRow) and outcome.kind == "failed"
            else 0
        )
        if isinstance(outcome, FailedRow) and self.num_failed >= self.stop_after:
            raise RunError(
                f"{self.num_failed} conversations failed one after another, the last, number "
                f"{outcome.id}, for: {outcome.error}; correct that and run the same command again"
            )
        shard.add_outcome(outcome)
        self.progress.count_outcome(outcome)
        if shard.is_complete:
            self.complete_shards.append(shard)
        # Otherwise the server may be down, which is not the fault of a conversation.
        if not self.num_failed:
            self.write_complete()

    def write_complete(self) -> None:
        """Write the complete shards."""
        while self.complete_shards:
            self.shards.finish_shard(self.complete_shards[0])
            self.progress.finish_shard(self.complete_shards.pop(0))


@dataclass(eq=False)
class Regeneration:
    """Regeneration of the assistant turns of conversations, each turn given the regenerated answers
    before it.

    Conversations that fail are left out and listed in a folder of their own.
    """

    # Assistant turns to regenerate: all of them, or only the first, after which the
    # conversation ends.
    turns: Literal["all", "first"] = "all"
    # System prompt that replaces the system prompts of the conversations; null keeps theirs.
    system: str | None = None
    # Number of conversations in a shard.
    shard_size: Count = 500
    # Share of the conversations that may fail before the command ends with an error.
    max_failed: Share = 0.1
    # Number of consecutive failures that stops the command at once.
    stop_after: Count = 20
    # Request the failed conversations of finished shards again.
    retry_failed: bool = False

    def __post_init__(self) -> None:
        # Arguments of the chat template for every conversation, from data.template_kwargs.
        self.template_arguments: dict[str, Any] = {}

    def run(
        self, out: Path, data: ConversationReader, sampling: Sampling, writer: AnswerWriter
    ) -> None:
        """Write every missing shard, and print a summary."""
        shards = ShardSet(out)
        self.template_arguments = dict(data.template_kwargs or {})
        pending = [
            self.make_pending_row(number, conversation)
            for number, conversation in enumerate(data.load_conversations())
        ]
        begun = shards.is_begun
        faults = shards.find_faults() if begun else {}
        if not begun or faults or self.retry_failed:
            writer.check_ready()
        shards.begin_or_resume(
            self.recorded_settings(data, sampling, writer),
            {
                "data": data.name,
                "conversations": len(pending),
                "shard_size": self.shard_size,
                "made_with": collect_provenance(),
            },
        )
        faults = faults if begun else shards.find_faults()
        rank = int(os.environ.get("RANK", 0))
        if rank == 0:
            report_faults(shards, faults)
        due = self.list_due_shards(shards, faults)
        with stop_gracefully(shards), WritingProgress(shards, due, enabled=rank == 0) as progress:
            ledger = OutcomeLedger(shards, progress, self.stop_after)
            if due:
                writer.write_answers(
                    self.claim_shards(shards, due, pending, progress), ledger.add_outcome
                )
                ledger.write_complete()
            shards.remove_leftovers()
        self.report_result(shards, progress)

    def list_due_shards(self, shards: ShardSet, faults: dict[str, str]) -> list[str]:
        """List the shards to write: those of this rank first, then what other ranks have left,
        from the end.
        """
        rank = int(os.environ.get("RANK", 0))
        processes = int(os.environ.get("WORLD_SIZE", 1))
        records = shards.manifest["shards"]
        names = shards.shard_names
        retried = {
            name for name in records if self.retry_failed and "failed" in records[name]["lost"]
        }
        due = {*faults} | retried
        own_names = {*names[rank::processes]}
        return sorted(due & own_names) + sorted(due - own_names, reverse=True)

    def claim_shards(
        self, shards: ShardSet, due: list[str], pending: list[PendingRow], progress: WritingProgress
    ) -> Iterator[Shard]:
        """Yield those of the due shards that no other process holds or has written by now, with
        the rows finished so far.
        """
        size = self.shard_size
        before = shards.manifest["shards"]
        first_of = {name: number * size for number, name in enumerate(shards.shard_names)}
        for name in due:
            first = first_of[name]
            shard = shards.claim_shard(name, pending[first : first + size])
            if shard is None:
                continue
            is_complete = shards.find_fault(name) is None
            record = shards.manifest["shards"].get(name)
            if is_complete and not (self.retry_failed and record == before.get(name)):
                shards.release_shard(shard)
                continue
            shard.restore_rows(shards.read_shard(name) if is_complete else ())
            progress.begin_shard(shard)
            if shard.is_complete:  # an earlier attempt was killed just before its end
                shards.finish_shard(shard)
                progress.finish_shard(shard)
            else:
                yield shard

    def make_calibration_rows(self, data: ConversationReader) -> list[PendingRow]:
        """Return the first conversations to answer, with which a writer is checked or
        calibrated.
        """
        return [
            self.make_pending_row(*numbered)
            for numbered in enumerate(data.load_conversations()[:MAX_CALIBRATION_ROWS])
        ]

    def make_pending_row(self, number: int, conversation: Conversation) -> PendingRow:
        """Return the conversation to answer, up to its last assistant turn or its first."""
        if not isinstance(conversation, Conversation) or conversation.text is not None:
            form = "plain text" if isinstance(conversation, Conversation) else "token ids"
            raise UserError(
                f"data: regeneration answers conversations, and these are {form}; use data=jsonl "
                "with messages"
            )
        messages = conversation.messages
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        messages = messages[: (answers[0] if self.turns == "first" else answers[-1]) + 1]
        if self.system is not None:
            messages = [message for message in messages if message["role"] != "system"]
            messages = [{"role": "system", "content": self.system}, *messages]
        request = [
            message if message["role"] != "assistant" else {"role": "assistant"}
            for message in messages
        ]
        key = hashlib.blake2b(json.dumps(request).encode(), digest_size=7).digest()
        # A row's own arguments of the chat template win over those of the command.
        template_arguments = {**self.template_arguments, **conversation.template_arguments}
        pending = replace(
            conversation, messages=messages, template_arguments=template_arguments, answer_ids={}
        )
        return PendingRow(number, pending, int.from_bytes(key, "big"))

    def recorded_settings(
        self, data: ConversationReader, sampling: Sampling, writer: AnswerWriter
    ) -> dict[str, Any]:
        """Return the settings that determine the set, by their command-line names."""
        conversations = data.load_conversations()
        digest = hashlib.sha256()
        for conversation in conversations:
            row = conversation.to_row()
            digest.update(json.dumps(row["messages"] if len(row) == 1 else row).encode() + b"\n")
        return {
            "data": f"{len(conversations)} conversations, sha256 {digest.hexdigest()[:16]}",
            **writer.recorded_settings(),
            **sampling.recorded_settings(),
            **{
                f"regenerate.{key}": getattr(self, key) for key in ("turns", "system", "shard_size")
            },
            **(
                {"data.template_kwargs": dict(data.template_kwargs)} if data.template_kwargs else {}
            ),
        }

    def report_result(self, shards: ShardSet, progress: WritingProgress) -> None:
        """Print the result; raise a RunError if too many conversations failed."""
        manifest = shards.manifest
        left = [name for name in progress.due if shards.find_fault(name) is not None]
        records = [record for name, record in manifest["shards"].items() if name not in left]
        counts: dict[str, int] = {}
        for record in records:
            for kind, count in record["lost"].items():
                counts[kind] = counts.get(kind, 0) + count
        rows = sum(record["rows"] for record in records)
        ended = sum(record.get("ended", 0) for record in records)
        kinds = ", ".join(f"{count} {FAILURE_TEXTS[kind]}" for kind, count in counts.items())
        num_cut = sum(record["cut"] for record in records)
        print_json(
            {
                "out": str(shards.folder),
                "conversations": manifest["conversations"],
                "written": rows,
                "shards": len(records),
                "cut": num_cut,
                "ended": ended,
                "lost": counts,
                "unfinished": sorted(left),
            }
        )
        with result_output():
            print(
                f"{shards.folder}: {rows} of {manifest['conversations']} conversations in "
                f"{len(records)} shards, {num_cut} with an answer cut"
                + (f", {ended} that end at a tool call without a recorded result" if ended else "")
                + (f"; {kinds}, listed in {shards.folder / 'failed'}" if kinds else "")
                + (f"; other processes are at {', '.join(sorted(left))}" if left else "")
                + f"; {progress.summary_line}",
                flush=True,
            )
        total = rows + sum(counts.values())
        if total and (not rows or counts.get("failed", 0) > self.max_failed * total):
            raise RunError(
                f"{shards.folder}: {counts.get('failed', 0)} of {total} conversations failed, "
                f"more than regenerate.max_failed={self.max_failed} allows; see "
                f"{shards.folder / 'failed'}, and request them again with "
                "regenerate.retry_failed=true"
                if rows
                else (
                    f"{shards.folder}: none of {total} conversations was answered ({kinds}); "
                    f"see {shards.folder / 'failed'}"
                )
            )


FAILURE_TEXTS = {
    "failed": "failed",
    "too_long": "too long for the context",
    "cut": "left out for a cut answer",
}


def report_faults(shards: ShardSet, faults: dict[str, str]) -> None:
    """Print the names of missing or corrupt shards, and how many are to be written."""
    for name, fault in faults.items():
        if fault != "unfinished":
            print(f"{shards.folder / name}: {fault}", flush=True)
    num_complete = len(shards.shard_names) - len(faults)
    print(
        f"{shards.folder}: {num_complete} of {len(shards.shard_names)} shards are complete, "
        f"{len(faults)} to write",
        flush=True,
    )


@contextmanager
def stop_gracefully(shards: ShardSet) -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C; after any of them, or when the disk is full, say that
    finished rows are saved.
    """
    received = signal.SIGINT

    def stop(number: int, frame: Any) -> None:
        nonlocal received
        received = signal.Signals(number)
        raise KeyboardInterrupt

    # nohup lets SIGHUP be ignored.
    before = {
        number: signal.signal(number, stop)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    except KeyboardInterrupt as error:
        raise RunInterrupted(
            f"{shards.folder}: stopped; what is finished is kept, go on with the same command",
            SIGNAL_STATUS + received,
        ) from error
    except OSError as error:
        raise RunError(
            f"{shards.folder}: it could not be written ({error.strerror}); what is finished is "
            "kept, correct that and run the same command again"
        ) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for shard in [*shards.open_shards]:
            shards.release_shard(shard)
