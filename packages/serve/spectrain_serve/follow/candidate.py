"""A candidate on its way: a process trains it, and another one proves it. Both are niced, and
end with this process.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from spectrain.config.environment import inherited_environment
from spectrain.config.spec import RunSpec
from spectrain.errors import RunError
from spectrain.files import write_text

from ..engines.launch import explain_log
from ..engines.process_group import run_group
from ..promotion import PromotionProof
from .proof import read_proof
from .reservoir import write_conversations
from .settings import FollowSettings
from .traffic import RecordedConversation
from .train_candidate import plan_training

Phase = Literal["train", "prove"]
MODULES: dict[Phase, str] = {
    "train": "spectrain_serve.follow.train_candidate",
    "prove": "spectrain_serve.follow.proof",
}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class CandidateData:
    """The conversations that a candidate is trained on and proven with."""

    new: list[RecordedConversation]
    replay: list[RecordedConversation]
    prove_new: list[RecordedConversation]
    prove_old: list[RecordedConversation]

    def count(self) -> dict[str, int]:
        """Return how many conversations there are of each use."""
        return {
            name: len(getattr(self, name)) for name in ("new", "replay", "prove_new", "prove_old")
        }


class CandidateJob:
    """The training and the proof of one candidate."""

    def __init__(self, folder: Path, settings: FollowSettings) -> None:
        self.folder, self.settings = folder, settings
        self.phase: Phase = "train"
        self.process: subprocess.Popen[bytes] | None = None
        self._stack = ExitStack()

    @property
    def directory(self) -> Path:
        """Return the folder of the trained drafter."""
        return self.folder / "run" / "drafter"

    def prepare(self, spec: RunSpec, serving: str, depth: int, data: CandidateData) -> None:
        """Write the plan and the conversations."""
        settings = self.settings
        self.folder.mkdir(parents=True, mode=0o700)
        for name in ("new", "replay"):
            write_conversations(self.folder / f"{name}.jsonl", getattr(data, name))
        for name in ("new", "old"):
            write_conversations(self.folder / f"prove-{name}.jsonl", getattr(data, f"prove_{name}"))
        adapter = (
            {"_target_": "spectrain.training.adapters.LoraAdapter"}
            if settings.learn == "lora"
            else None
        )
        plan: dict[str, Any] = {
            "spec": plan_training(spec, serving, settings, adapter).to_nodes(),
            "serving": serving,
            "depth": depth,
            "replay": settings.replay,
            "prove_tokens": settings.prove_tokens,
            "tolerance": settings.tolerance,
        }
        write_text(self.folder / "plan.json", json.dumps(plan, indent=2) + "\n")

    def start(self, phase: Phase) -> None:
        """Start the process of a phase."""
        self.phase = phase
        threads = dict.fromkeys(THREAD_VARIABLES, str(self.settings.threads))
        variables = {
            **inherited_environment(),
            **threads,
            "SPECTRAIN_FOLLOW_NICE": str(self.settings.nice),
        }
        log: IO[bytes] = self._stack.enter_context((self.folder / f"{phase}.log").open("wb"))
        arguments = [sys.executable, "-m", MODULES[phase], str(self.folder)]
        self.process = self._stack.enter_context(run_group(arguments, variables, log))

    def poll(self) -> bool:
        """Return whether the process of this phase has ended well; a RunError says how it
        failed.
        """
        assert self.process is not None
        status = self.process.poll()
        if status is None:
            return False
        if status != 0:
            how = (
                f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            )
            text = (self.folder / f"{self.phase}.log").read_text(errors="replace")
            raise RunError(
                f"the process to {self.phase} the candidate ended with {how}: {explain_log(text)}"
            )
        self.close()
        return True

    def close(self) -> None:
        """Stop the process of this phase, if it runs."""
        self._stack.close()
        self.process = None

    def read_proof(self) -> PromotionProof:
        """Return the proof that the second process wrote."""
        return read_proof(self.folder)
