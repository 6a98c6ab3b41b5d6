"""The loop: record, watch, train, prove, swap, account. A failure of one step is recorded, and
the loop goes on.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from spectrain.config.spec import RunSpec
from spectrain.errors import RunError, UserError, describe_error
from spectrain.files import write_text
from spectrain_serve.promotion import LEAST_PROMPTS, PromotionProof

from ..servers.openai import OpenAIServer
from .candidate import CandidateData, CandidateJob
from .clock import read_date
from .kinds import KindRegistry
from .ledger import Ledger, report_damage
from .limits import CHECK_SECONDS, SAVE_SECONDS, TICK_SECONDS
from .logs import RequestLogs
from .proxy import Recorder
from .reservoir import Reservoir, is_for_proof, read_conversations, write_conversations
from .settings import FollowSettings
from .shadow import ShadowRequests, select_shadows
from .state import ActiveDrafter, FollowFolder, hash_weights
from .swap import DrafterSwapper
from .traffic import RecordedConversation, parse_exchange
from .watch import DriftAlarm, TrafficWatch, compare_live


class TrafficFollower:
    """What learns from the traffic. It runs in one thread; the proxy only fills the recorder."""

    def __init__(
        self,
        spec: RunSpec,
        settings: FollowSettings,
        folder: FollowFolder,
        server: OpenAIServer,
        recorder: Recorder | RequestLogs,
        swapper: DrafterSwapper,
        active: ActiveDrafter,
    ) -> None:
        self.spec = spec
        self.settings = settings
        self.folder = folder
        self.server = server
        self.recorder, self.swapper, self.active = recorder, swapper, active
        # Ages and pauses are measured by a clock that cannot jump.
        self.now = folder.clock.now
        self.ledger = Ledger(folder.ledger)
        self.kinds = KindRegistry(settings.kinds)
        self.watch = TrafficWatch(settings)
        self.reservoir = Reservoir(
            settings.conversations, settings.held_out, settings.retention_hours * 3600
        )
        self.old: list[RecordedConversation] = []
        self.is_old_fixed = False
        self.job: CandidateJob | None = None
        self.alarm: DriftAlarm | None = None
        # When conversations count as new: after the last candidate, or shortly before the alarm.
        self.new_since = 0.0
        self.num_new = 0
        self.paused_until = 0.0
        self.before_swap: dict[str, list[float]] = {}
        self.num_errors = 0
        self._last: dict[str, float] = {}
        self.is_stopping = threading.Event()

    def load(self) -> None:
        """Read what an earlier process recorded."""
        if isinstance(self.recorder, RequestLogs):
            self.recorder.load_positions()
        recorded = [*read_conversations(self.folder.recorded, report_damage)]
        newest = max((entry.time for entry in recorded), default=None)
        self.folder.clock.load(self.reservoir.retention_seconds / 2, newest)
        # A clock that was wrong may have dated some ahead, which would then never expire.
        self.reservoir.load(replace(entry, time=min(entry.time, self.now())) for entry in recorded)
        source = self.folder.old if self.settings.old is None else Path(self.settings.old)
        self.old = [*read_conversations(source, report_damage)]
        self.is_old_fixed = len(self.old) >= self.settings.held_out or self.settings.old is not None

    def run(self) -> None:
        """Run until `is_stopping` is set."""
        self.ledger.record(
            "started", drafter=self.active.path, digest=self.active.digest, way=self.swapper.way
        )
        while not self.is_stopping.wait(TICK_SECONDS):
            self.tick()
        # A training takes its time to end, and whoever stops this may not wait for it.
        self.attempt(self.save)
        job = self.job
        left = {} if job is None else {"candidate": job.folder.name, "phase": job.phase}
        self.ledger.record("stopped", **left)
        if job is not None:
            job.close()

    def tick(self) -> None:
        """Run every step once."""
        for step in (
            self.record_traffic,
            self.advance_candidate,
            self.check_live,
            self.begin_candidate,
        ):
            self.attempt(step)
        if self.is_due("save", SAVE_SECONDS):
            self.attempt(self.save)
        if self.is_due("check", CHECK_SECONDS):
            self.attempt(self.restore_drafter)

    def attempt(self, step: Callable[[], None]) -> None:
        """Run a step; a failure is recorded once for each message, and raises nothing."""
        try:
            step()
        except Exception as error:
            self.num_errors += 1
            message = describe_error(error)
            if self.is_due(f"error {step.__name__} {message}"[:200], 60.0):
                self.ledger.record("error", step=step.__name__, message=message)

    def is_due(self, name: str, seconds: float) -> bool:
        """Return whether something was not done in so many seconds, and note that it is done
        now.
        """
        now = time.monotonic()
        if now - self._last.get(name, float("-inf")) < seconds:
            return False
        if len(self._last) > 1000:
            self._last.clear()
        self._last[name] = now
        return True

    # Listen and watch

    def record_traffic(self) -> None:
        """Parse what the proxy has recorded, or what is new in the request logs."""
        for exchange in self.recorder.take_all():
            try:
                conversation = parse_exchange(exchange, self.kinds, self.server.parse_rounds)
            except (
                UserError,
                ValueError,
                KeyError,
                TypeError,
                IndexError,
                AttributeError,
                OverflowError,
                RecursionError,
            ):
                continue
            if conversation is not None:
                self.add_conversation(conversation)

    def add_conversation(self, conversation: RecordedConversation) -> None:
        """Add a conversation to the store and to the watch."""
        for alarm in self.watch.add(conversation, self.active.digest[:8]):
            self.ledger.record("drift", **asdict(alarm))
            if self.alarm is None:
                self.alarm = alarm
                # The first requests of a fall are those that raised the alarm.
                self.new_since = alarm.since
                self.num_new = sum(entry.time > alarm.since for entry in self.reservoir.select())
        if not self.add_old(conversation) and self.reservoir.add(conversation):
            self.num_new += 1

    def add_old(self, conversation: RecordedConversation) -> bool:
        """Add a conversation that is held out to the fixed set of old ones, until that is complete;
        return whether it is in the set."""
        if any(entry.digest == conversation.digest for entry in self.old):
            return True
        is_room = not self.is_old_fixed and self.alarm is None
        is_added = is_room and is_for_proof(conversation.digest)
        if is_added:
            self.old.append(conversation)
        if not self.is_old_fixed and (
            len(self.old) >= self.settings.held_out or self.alarm is not None
        ):
            self.is_old_fixed = True
            self.ledger.record("old set fixed", conversations=len(self.old))
            # Where the disk is full, `save` writes it later, and no other request is lost.
            self.attempt(self.write_old)
        return is_added

    def write_old(self) -> None:
        """Write the fixed set of old conversations."""
        write_conversations(self.folder.old, self.old)

    # Train and prove

    def begin_candidate(self) -> None:
        """Start the training of a candidate after drift, or after enough new traffic."""
        if self.job is not None or self.before_swap or self.now() < self.paused_until:
            return
        enough = self.settings.train_after is not None and self.num_new >= self.settings.train_after
        if not enough and (self.alarm is None or self.num_new < self.settings.least_new):
            return
        data = self.select_data()
        if not data.new or min(len(data.prove_new), len(data.prove_old)) < LEAST_PROMPTS:
            return
        job = CandidateJob(self.folder.next_candidate(), self.settings)
        try:
            job.prepare(self.spec, self.active.path, self.find_depth(data), data)
            job.start("train")
        except Exception as error:
            # A full disk would otherwise get another folder at every tick.
            self.drop_candidate(job, describe_error(error))
            return
        self.job = job
        reason = "enough new conversations" if self.alarm is None else f"drift of {self.alarm.kind}"
        self.ledger.record("training", candidate=job.folder.name, reason=reason, data=data.count())

    def select_data(self) -> CandidateData:
        """Return the conversations of a candidate: new ones since the alarm, and old ones of the
        same store.
        """
        new = self.reservoir.select(False, lambda entry: entry.time > self.new_since)
        replay = self.reservoir.select(False, lambda entry: entry.time <= self.new_since)
        recent = self.reservoir.select(True, lambda entry: entry.time > self.new_since)
        return CandidateData(new, replay, recent, self.old[: self.settings.held_out])

    def find_depth(self, data: CandidateData) -> int:
        """Return how many tokens the server drafts in a round, by its settings or by what it has
        drafted.
        """
        configured: int | None = getattr(self.server.settings, "draft_tokens", None)
        drafted = [max(entry.drafted) for entry in data.prove_new if entry.drafted]
        return configured or max(drafted, default=3)

    def advance_candidate(self) -> None:
        """Go on from training to the proof, and from the proof to a decision."""
        job = self.job
        if job is None:
            return
        try:
            if not job.poll():
                return
            if job.phase == "train":
                if hash_weights(job.directory) is None:
                    raise RunError("the training left no drafter")
                self.ledger.record("trained", candidate=job.folder.name)
                job.start("prove")
                return
            proof = job.read_proof()
        except Exception as error:
            self.drop_candidate(job, describe_error(error))
            return
        self.job = None
        self.decide(job, proof)

    def drop_candidate(self, job: CandidateJob, reason: str) -> None:
        """Give a candidate up; its files are kept for inspection."""
        job.close()
        self.job = None
        self.paused_until = self.now() + self.settings.pause_seconds
        self.ledger.record("failed", candidate=job.folder.name, phase=job.phase, reason=reason)

    def decide(self, job: CandidateJob, proof: PromotionProof) -> None:
        """Promote a proven candidate, or keep it for inspection with the reason."""
        numbers = {
            "candidate": job.folder.name,
            "new": asdict(proof.new),
            "old": None if proof.old is None else asdict(proof.old),
            "reason": proof.reason,
        }
        if proof.is_promoted:
            self.promote(job.directory, numbers)
            return
        self.ledger.record("kept for inspection", **numbers)
        self.forget_alarm()
        self.watch.accept_level()
        self.paused_until = self.now() + self.settings.pause_seconds

    def forget_alarm(self) -> None:
        """Count new traffic from now on."""
        self.alarm, self.num_new, self.new_since = None, 0, self.now()

    # Swap

    def promote(self, directory: Path, numbers: dict[str, Any]) -> None:
        """Bring a candidate into use, and check that outputs did not change."""
        shadows = ShadowRequests(
            self.swapper.servers, select_shadows(self.reservoir.select(), self.settings.shadow)
        )
        digest = hash_weights(directory) or ""
        began = time.monotonic()
        before = shadows.send()
        try:
            outcome = self.swapper.swap(directory, digest)
        except (RunError, UserError, OSError) as error:
            self.ledger.record("not swapped", **numbers, error=describe_error(error))
            self.forget_alarm()
            self.paused_until = self.now() + self.settings.pause_seconds
            return
        if outcome.way == "keep":
            self.ledger.record("proven, not swapped", **numbers, path=str(directory))
            self.forget_alarm()
            return
        self.set_active(ActiveDrafter(str(directory), digest, read_date(), self.active.path))
        self.before_swap = self.watch.restart()
        self.forget_alarm()
        changed = shadows.count_changed(before, shadows.send())
        self.ledger.record(
            "promoted",
            **numbers,
            **asdict(outcome),
            shadow={"sent": len(before), "changed": changed},
            seconds=round(time.monotonic() - began, 3),
        )
        if changed > self.settings.shadow_tolerance * len(before):
            self.roll_back(f"{changed} of {len(before)} repeated requests have other answers")

    def set_active(self, active: ActiveDrafter) -> None:
        """Note which drafter serves; where the disk is full, the note is written later."""
        self.active = active
        self.attempt(lambda: self.folder.write_active(active))

    def check_live(self) -> None:
        """Roll back where the live acceptance of a kind lies below the interval of that before
        the swap.
        """
        if not self.before_swap or not self.settings.rollback_after:
            self.before_swap = {}
            return
        results = compare_live(self.before_swap, self.watch, self.settings.rollback_after)
        # A kind that is rare, or came before the swap only, must not hold up further candidates.
        if not results and not self.watch.is_filled():
            return
        worse = [result for result in results if result.high < 0]
        self.ledger.record("live", kinds=[asdict(result) for result in results])
        self.before_swap = {}
        if worse:
            self.roll_back(
                f"live acceptance of {worse[0].kind} fell from {worse[0].before:.3f} to "
                f"{worse[0].after:.3f}"
            )

    def roll_back(self, reason: str) -> None:
        """Use the drafter before the active one again."""
        previous = self.active.previous
        if previous is None:
            self.ledger.record("no roll-back", reason=f"{reason}; there is no earlier drafter")
            return
        digest = hash_weights(Path(previous)) or ""
        outcome = self.swapper.swap(Path(previous), digest)
        failed = self.active.path
        self.set_active(ActiveDrafter(previous, digest, read_date()))
        self.watch.restart()
        self.before_swap = {}
        self.forget_alarm()
        self.paused_until = self.now() + self.settings.pause_seconds
        self.ledger.record(
            "rolled back", reason=reason, to=previous, failed=failed, way=outcome.way
        )

    def restore_drafter(self) -> None:
        """Send the active drafter again to a server that was started anew, and obey a request to
        roll back.
        """
        request = self.folder.root / "rollback"
        if request.is_file():
            request.unlink()
            self.roll_back("requested")
        directory = Path(self.active.path)
        digest = self.active.digest
        if self.swapper.restart_ended(directory, digest):
            self.ledger.record("server started again", drafter=self.active.path)
        # A server starts with the run's own drafter, so only a candidate has to be sent to it.
        elif (
            self.folder.candidates in directory.parents
            and self.swapper.is_served(directory, digest) is False
        ):
            self.swapper.push(directory, digest)
            self.ledger.record("sent again", drafter=self.active.path)

    # Account

    def save(self) -> None:
        """Write the recorded conversations and the status, and delete what is past its retention
        time.
        """
        self.ledger.flush()
        self.reservoir.delete_expired(self.now())
        # What cannot be deleted in a candidate's folder must not keep what is new off the disk.
        self.attempt(self.delete_copies)
        self.reservoir.save(self.folder.recorded)
        if self.is_old_fixed and self.settings.old is None and not self.folder.old.exists():
            self.write_old()
        self.folder.clock.save()
        if isinstance(self.recorder, RequestLogs):
            self.recorder.save_positions()
        write_text(self.folder.status, json.dumps(self.describe(), indent=2) + "\n")

    def delete_copies(self) -> None:
        """Delete the conversations in folders of candidates that are past their retention time."""
        self.folder.delete_conversations(self.reservoir.retention_seconds)

    def describe(self) -> dict[str, Any]:
        """Return what the status command and the page show."""
        kinds = {}
        for kind, series in self.watch.series.items():
            kinds[kind] = {
                "requests": series.num_requests,
                "unmeasured": series.num_unmeasured,
                "tokens": series.num_tokens,
                "rounds": series.num_rounds,
                "accepted_per_draft": sum(series.values) / len(series.values)
                if series.values
                else None,
                "reference": series.test.mean if series.test.is_ready else None,
                "by_position": [round(rate, 4) for rate in series.acceptance_by_position],
                "drift_sum": series.test.sum,
                "drift_threshold": series.test.threshold if series.test.is_ready else None,
                "alarm": series.test.has_alarm,
            }
        return {
            "time": read_date(),
            "active": asdict(self.active),
            "phase": "following" if self.job is None else self.job.phase,
            "alarm": None if self.alarm is None else asdict(self.alarm),
            "kinds": kinds,
            "conversations": len(self.reservoir),
            "by_kind": dict(self.reservoir.count_kinds()),
            "old": len(self.old),
            "duplicates": self.reservoir.num_duplicates,
            "errors": self.num_errors,
        }
