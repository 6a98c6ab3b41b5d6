"""What a score is asked for: the settings of `eval=`, by what they are for, and what is refused of them."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from spectrain.config.values import FolderName, Number
from spectrain.decoding.session import EngineChoice
from spectrain.errors import UserError
from spectrain.eval.baselines import BESIDE, COPYING, OURS, OWN, TRANSFORMERS
from spectrain.eval.online import Learn, Online
from spectrain.eval.parts import Part
from spectrain.eval.sweep import SWEPT, ExitSweep, LengthSweep, PrunedTrees, PruneSweep, TreeSweep


def refuse_below(settings: Any, **least: int) -> None:
    """Refuse settings below their least value, key=least; what is null was not asked for."""
    for key, lowest in least.items():
        if (value := getattr(settings, key)) is not None and value < lowest:
            raise UserError(f"eval.{key}={value}: use {lowest} or more")


def refuse_unknown(key: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Refuse names that a setting does not know."""
    if unknown := sorted(set(given) - set(known)):
        raise UserError(f"eval.{key}: {unknown[0]!r} is unknown; choose from {', '.join(known)}")


@dataclass
class Scoring:
    """Which prompts, how long, in which engine, and what the drafter is compared with."""

    # Name of the folder under eval/ that receives the result.
    name: FolderName = "heldout"
    # Prompts to score: a file or the name of a known benchmark; null uses the held-out prompts that ship with the project.
    prompts: str | None = None
    # Prompt categories to score; null scores all of them.
    categories: list[str] | None = None
    # Largest number of prompts, taken from all categories in turn; null scores every prompt.
    limit: int | None = None
    # Largest number of tokens that one answer may have.
    max_new_tokens: int = 128
    # Number of prompts that are decoded together.
    batch_size: int = 1
    # Systems to score next to the drafter. This engine decodes own, auto, copies, chain, shipped, untrained, ngram,
    # lookahead and retrieval; transformers decodes generate, prompt_lookup, assistant and early_exit.
    baselines: tuple[str, ...] = BESIDE
    # Score tree=auto first and the drafter's own tree as a second system. The commands train, eval and compare set this where
    # no tree= is given, rounds are not captured and one process drafts.
    measured: bool = False
    # Store that the baselines copies and retrieval copy from, in addition to the text: own is the answers in a run's training
    # data, any other value is a folder that spectrain data index wrote, and null is no store.
    store: str | None = OWN
    # Compare every output with its reference.
    check: bool = True
    # Measure perplexity, agreement and the task score for a lossless rule too; a lossy rule always reports them.
    quality: bool = False
    # Run the programs that answer eval.prompts=humaneval on this machine, as this user, to score them.
    execute: bool = False
    # Decode once more with every draft correct, as the upper bound for a better drafter.
    oracle: bool = True
    # Write report.html with example drafts, and measure what drafting adds to memory and what training changed in the target.
    report: bool = True
    # Engine of all systems: captured replays rounds as CUDA graphs, eager runs them one by one, and auto captures on a GPU.
    engine: EngineChoice = "auto"
    # Decode autoregressively while drafting does not pay.
    guard: bool = False
    # Number of times to decode every pair of runs where times are unsteady; repeats after the first alternate round by round.
    repeats: int = 2
    # Prompts on which trees are searched and timed; null uses openings of the embedded conversations.
    calibration: str | None = None
    # Largest number of prompts for searching and timing trees.
    calibration_limit: int = 8
    # Directory of the model that the assistant baseline drafts with; null is allowed without that baseline.
    assistant: str | None = None
    # Number of layers that the early_exit baseline drafts with; null uses the drafter's own exit layer.
    exit_layer: int | None = None

    def check_scoring(self) -> None:
        refuse_below(self, limit=1, max_new_tokens=2, batch_size=1, calibration_limit=1, exit_layer=1, repeats=1)
        if self.engine not in get_args(EngineChoice):
            raise UserError(f"eval.engine={self.engine}: choose from {', '.join(get_args(EngineChoice))}")
        refuse_unknown("baselines", self.baselines, (*OURS, *TRANSFORMERS))
        if "assistant" in self.baselines and self.assistant is None:
            raise UserError("eval.baselines: assistant needs a model, as in eval.assistant=DIR")

    @property
    def reads_data(self) -> bool:
        """Whether it asks for what a run was trained on."""
        return bool({"untrained", *(COPYING if self.store == OWN else ())} & {*self.baselines})


@dataclass
class Learning:
    """A drafter that goes on learning while it decodes."""

    # Let the drafter learn from the corrections of the target while it is scored, next to a copy that does not learn.
    online: bool = False
    # Learning rate of the online updates.
    online_lr: float = 1e-4
    # Number of answers between two online updates.
    online_every: int = 8
    # What online updates learn from: corrections are the tokens that replaced a wrong draft, answers are all tokens of the
    # answers, and split replays drafts with the loss of Draft-OPD.
    online_learn: Learn = "corrections"

    def check_learning(self) -> None:
        refuse_below(self, online_every=1)
        if not self.online_lr > 0:
            raise UserError(f"eval.online_lr={self.online_lr}: use more than 0")

    def learning(self) -> list[Part]:
        return [Online(self.online_lr, self.online_every, self.online_learn)] if self.online else []


@dataclass
class Sweeping:
    """One drafter with many trees, lengths, exits or prunings, or its own tree pruned."""

    # Number of target layers after which unlikely branches are dropped from the drafter's trees; null does not prune.
    prune_layer: int | None = None
    # Number of most likely tokens of the early layers that a node must be among to stay in the tree.
    prune_top: int = 8
    # Rank of the early head that names these tokens, fitted beforehand and used if it is as good; 0 uses the target's head.
    prune_rank: Number = 64
    # What to vary for one drafter: tree builders, chain lengths, exits or prunings; null varies nothing.
    sweep: Literal["tree", "length", "exit", "prune"] | None = None
    # Tree builders of eval.sweep=tree; null takes all of them.
    trees: tuple[str, ...] | None = None
    # Tree sizes of eval.sweep=tree, in nodes with the root included.
    budgets: tuple[int, ...] = (8, 16, 32, 64)
    # Exit layers of eval.sweep=exit and eval.sweep=prune; null takes up to seven, evenly spaced.
    exits: tuple[int, ...] | None = None
    # Chain lengths of eval.sweep=exit, in tokens.
    depths: tuple[int, ...] = (2, 4, 6)
    # Numbers of most likely tokens that eval.sweep=prune tries.
    tops: tuple[int, ...] = (1, 2, 4, 8, 16)

    def check_sweeping(self) -> None:
        refuse_below(self, prune_layer=1, prune_top=1)
        if self.prune_layer is not None and self.sweep is not None:
            raise UserError(f"eval.sweep={self.sweep}: it needs no eval.prune_layer; use eval.sweep=prune with eval.exits")
        if any(budget < 2 for budget in self.budgets):
            raise UserError(f"eval.budgets={list(self.budgets)}: a tree has 2 nodes or more, the root included")
        for key in ("exits", "depths", "tops"):
            numbers = getattr(self, key)
            if numbers is not None and (not numbers or any(number < 1 for number in numbers)):
                raise UserError(f"eval.{key}={list(numbers)}: give numbers from 1 on")
        refuse_unknown("trees", self.trees or (), tuple(SWEPT))

    def sweeping(self) -> list[Part]:
        if self.prune_layer is not None:
            return [PrunedTrees(self.prune_layer, self.prune_top)]
        if self.sweep == "tree":
            return [TreeSweep(self.trees or tuple(SWEPT), self.budgets)]
        if self.sweep == "length":
            return [LengthSweep()]
        if self.sweep == "exit":
            return [ExitSweep(self.exits, self.depths)]
        return [PruneSweep(self.exits, self.tops)] if self.sweep == "prune" else []
