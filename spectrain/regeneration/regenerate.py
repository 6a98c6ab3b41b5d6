"""`spectrain data regenerate`: conversations whose answers the target itself wrote, shard by shard.

A drafter learns what its target says, so a set of other answers is best answered anew. Killed at any moment, it goes on where
it stopped; several processes, of torchrun or of as many commands, share the shards.
"""

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from spectrain.data.chat import Message
from spectrain.data.readers import Data
from spectrain.data.shards import Lost, Row, Shard, Shards, Wanted
from spectrain.decoding.session import Session
from spectrain.errors import RunError, UserError
from spectrain.models.target import Target
from spectrain.provenance import provenance
from spectrain.runs.defaults import complete as with_defaults
from spectrain.runs.drafter_files import build_drafter, load_weights
from spectrain.runs.folder import trained_target
from spectrain.runs.places import drafter_directory
from spectrain.settings.build import build, constructor
from spectrain.settings.check import check_config

from .progress import WritingProgress
from .writers import EngineWriter, Sampling, Writer, opening_prompts


@dataclass
class Ledger:
    """Where every conversation goes once it is written or lost."""

    shards: Shards
    progress: WritingProgress
    stop_after: int
    failed: int = 0  # one after another, up to now
    complete: list[Shard] = field(default_factory=list)

    def add(self, shard: Shard, outcome: Row | Lost) -> None:
        self.failed = self.failed + 1 if isinstance(outcome, Lost) and outcome.kind == "failed" else 0
        if isinstance(outcome, Lost) and self.failed >= self.stop_after:
            raise RunError(
                f"{self.failed} conversations failed one after another, the last, number {outcome.id}, for: {outcome.error}; "
                "mend that and go on with the same command"
            )
        shard.add(outcome)
        self.progress.count(outcome)
        if shard.is_complete:
            self.complete.append(shard)
        if not self.failed:  # else what fails may be the end of the server, which is held against no conversation
            self.finish()

    def finish(self) -> None:
        """Write the shards that are complete."""
        while self.complete:
            self.shards.finish(self.complete[0])
            self.progress.finish(self.complete.pop(0))


class Regeneration:
    """What is answered anew: all assistant turns of a conversation, each given the answers before it, or the first one, after
    which it ends. `system` takes the place of the conversations' own system prompts.

    Conversations that failed are left out; more than `max_failed` of all, and the command fails in the end. `stop_after` that
    fail in a row stop it at once, with nothing noted of them. retry_failed=true asks again for those of finished shards.
    """

    def __init__(
        self,
        turns: Literal["all", "first"] = "all",
        system: str | None = None,
        shard_size: int = 500,
        max_failed: float = 0.1,
        stop_after: int = 20,
        retry_failed: bool = False,
    ) -> None:
        for key, value in (("shard_size", shard_size), ("stop_after", stop_after)):
            if value < 1:
                raise UserError(f"regenerate.{key}={value}: use 1 or more")
        if not 0 <= max_failed <= 1:
            raise UserError(f"regenerate.max_failed={max_failed}: use 0 to 1")
        self.turns, self.system, self.shard_size = turns, system, shard_size
        self.max_failed, self.stop_after, self.retry_failed = max_failed, stop_after, retry_failed

    def run(self, out: Path, data: Data, sampling: Sampling, writer: Writer) -> None:
        """Make every shard that is not there, and say what came of it."""
        shards = Shards(out)
        wanted = [self.wanted(number, messages) for number, messages in enumerate(data.conversations())]
        begun = shards.is_begun
        faults = shards.faults() if begun else {}
        if not begun or faults or self.retry_failed:
            writer.check()
        shards.open(self.settings(data, sampling, writer), {
            "data": data.name, "conversations": len(wanted), "shard_size": self.shard_size, "made_with": provenance(),
        })  # fmt: skip
        faults = faults if begun else shards.faults()
        rank = int(os.environ.get("RANK", 0))
        if rank == 0:
            announce(shards, faults)
        with stopped_softly(shards), WritingProgress(shards, faults, enabled=rank == 0) as progress:
            ledger = Ledger(shards, progress, self.stop_after)
            if due := self.due(shards, faults):
                writer.write(self.claimed(shards, due, wanted, progress), ledger.add)
                ledger.finish()
            shards.tidy()
        self.conclude(shards, progress)

    def due(self, shards: Shards, faults: dict[str, str]) -> list[str]:
        """Shards to make, those of this rank first: where its own are done, it takes what others have left, from the end."""
        rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        known, names = shards.manifest["shards"], shards.names
        retried = {name for name in known if self.retry_failed and "failed" in known[name]["lost"]}
        due, mine = {*faults} | retried, {*names[rank::processes]}
        return sorted(due & mine) + sorted(due - mine, reverse=True)

    def claimed(self, shards: Shards, due: list[str], wanted: list[Wanted], progress: WritingProgress) -> Iterator[Shard]:
        """Of these shards, those that no other process is at or has made by now, with what is known of them."""
        size, before = self.shard_size, shards.manifest["shards"]
        first_of = {name: number * size for number, name in enumerate(shards.names)}
        for name in due:
            first = first_of[name]
            shard = shards.claim(name, wanted[first : first + size])
            if shard is None:
                continue
            is_whole, record = shards.fault(name) is None, shards.manifest["shards"].get(name)
            if is_whole and not (self.retry_failed and record == before.get(name)):
                shards.release(shard)
                continue
            shard.begin(shards.read(name) if is_whole else ())
            progress.begin(shard)
            if shard.is_complete:  # an earlier attempt was killed just before its end
                shards.finish(shard)
                progress.finish(shard)
            else:
                yield shard

    def wanted(self, number: int, messages: list[Message]) -> Wanted:
        """A conversation as it is asked for: up to its last assistant turn, or the first."""
        places = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        messages = messages[: (places[0] if self.turns == "first" else places[-1]) + 1]
        if self.system is not None:
            messages = [message for message in messages if message["role"] != "system"]
            messages = [{"role": "system", "content": self.system}, *messages]
        asked = [message if message["role"] != "assistant" else {"role": "assistant"} for message in messages]
        key = hashlib.blake2b(json.dumps(asked).encode(), digest_size=7).digest()
        return Wanted(number, messages, int.from_bytes(key, "big"))

    def settings(self, data: Data, sampling: Sampling, writer: Writer) -> dict[str, Any]:
        """What the set depends on, by the names that the command line has for it."""
        conversations = data.conversations()
        digest = hashlib.sha256()
        for messages in conversations:
            digest.update(json.dumps(messages).encode() + b"\n")
        return {
            "data": f"{len(conversations)} conversations, sha256 {digest.hexdigest()[:16]}",
            **writer.settings(),
            **sampling.settings(),
            **{f"regenerate.{key}": getattr(self, key) for key in ("turns", "system", "shard_size")},
        }

    def conclude(self, shards: Shards, progress: WritingProgress) -> None:
        """The last line, and a failed run where too much is missing."""
        manifest = shards.manifest
        left = [name for name in progress.faults if shards.fault(name) is not None]
        records = [record for name, record in manifest["shards"].items() if name not in left]
        lost: dict[str, int] = {}
        for record in records:
            for kind, count in record["lost"].items():
                lost[kind] = lost.get(kind, 0) + count
        rows = sum(record["rows"] for record in records)
        said = ", ".join(f"{count} {WORDS[kind]}" for kind, count in lost.items())
        print(
            f"{shards.folder}: {rows} of {manifest['conversations']} conversations in {len(records)} shards, "
            f"{sum(record['cut'] for record in records)} with an answer cut"
            + (f"; {said}, told in {shards.folder / 'failed'}" if said else "")
            + (f"; other processes are at {', '.join(sorted(left))}" if left else "")
            + f"; {progress.summary}",
            flush=True,
        )
        total = rows + sum(lost.values())
        if total and (not rows or lost.get("failed", 0) > self.max_failed * total):
            raise RunError(
                f"{shards.folder}: {lost.get('failed', 0)} of {total} conversations failed, more than regenerate.max_failed="
                f"{self.max_failed} allows; see {shards.folder / 'failed'}, and ask again by regenerate.retry_failed=true"
                if rows
                else f"{shards.folder}: not one of {total} conversations could be had ({said}); see {shards.folder / 'failed'}"
            )


WORDS = {"failed": "failed", "too_long": "too long for the context", "cut": "left out for a cut answer"}


def regenerate(config: DictConfig) -> None:
    """What the command does: check a set that is there, or make it."""
    if config.out is None:
        raise UserError("out: say where the conversations go, as in out=DIR")
    out = Path(str(config.out)).expanduser()
    if config.check:
        faults = Shards(out).faults()
        announce(Shards(out), faults)
        if faults:
            named = ", ".join([*faults][:5]) + (f" and {len(faults) - 5} more" if len(faults) > 5 else "")
            raise RunError(f"out={out}: not whole: {named}; run the command that made it, without check=true")
        return
    sampling, settings, data = build(config.sampling), build(config.regenerate), build(config.data)
    data.asks_only = True
    data.conversations()
    if constructor(config.writer).needs_target:
        writer = engine_writer(config, sampling, settings, data)
    else:
        for key in ("target", "run", "tree"):
            if config.get(key) is not None:
                raise UserError(f"{key}: the server has its own model, which writer.model names; leave {key} out")
        writer = build(config.writer, sampling=sampling)
    settings.run(out, data, sampling, writer)


def engine_writer(config: DictConfig, sampling: Sampling, settings: Regeneration, data: Data) -> EngineWriter:
    """Our own engine with the target and, where a run is named, its drafter."""
    if config.run is None and config.get("tree") is not None:
        raise UserError("tree: nothing is drafted without a drafter; give one, as in run=runs/NAME, or leave tree out")
    standing_in = None if config.run else {"_target_": "spectrain.drafters.ngram.Ngram"}  # nothing is drafted
    asked = {key: config.get(key) for key in ("run", "target", "tree")}
    completed, run = with_defaults(OmegaConf.create({**asked, "drafter": standing_in, "acceptance": None, "eval": None}))
    completed = check_config(completed, [str(key) for key in completed])
    target: Target = build(completed.target)
    target.pack()
    plain: EngineWriter = build(config.writer, sampling=sampling, target=target)
    if config.run is None:
        return plain
    directory, drafter, builder = drafter_directory(run), build_drafter(completed.drafter, target), build(completed.tree)
    if drafter.abilities.target_training or trained_target(run) is not None:
        raise UserError(
            f"run={run}: its drafter belongs to the target that was trained with it; regenerate without a drafter, by "
            f"target=hf target.model={trained_target(run) or run / 'target'}"
        )
    assert directory is not None, "it was read from there"
    load_weights(drafter, directory)
    first = [settings.wanted(number, messages) for number, messages in enumerate(data.conversations()[:64])]
    prompts = opening_prompts(plain, first)
    Session.prepare(target, drafter, builder, sampling.rule, lambda: prompts)
    return build(config.writer, sampling=sampling, target=target, drafter=drafter, builder=builder)


def announce(shards: Shards, faults: dict[str, str]) -> None:
    """Say by name what is missing or corrupt, and how much is to be made."""
    for name, fault in faults.items():
        if fault != "unfinished":
            print(f"{shards.folder / name}: {fault}", flush=True)
    whole = len(shards.names) - len(faults)
    print(f"{shards.folder}: {whole} of {len(shards.names)} shards are whole, {len(faults)} to make", flush=True)


@contextmanager
def stopped_softly(shards: Shards) -> Iterator[None]:
    """A scheduler's SIGTERM stops as Ctrl-C does; then, and where the disk is full, say that what is finished is kept."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt as error:
        raise RunError(f"{shards.folder}: stopped; what is finished is kept, go on with the same command") from error
    except OSError as error:
        raise RunError(
            f"{shards.folder}: it could not be written ({error.strerror}); what is finished is kept, mend that and go on with "
            "the same command"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, before)
        for shard in [*shards.claimed]:
            shards.release(shard)
