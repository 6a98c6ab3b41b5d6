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

    name: FolderName = "heldout"  # the folder that the result goes to
    prompts: str | None = None  # a file or a known benchmark; without it the held-out prompts that ship
    categories: list[str] | None = None
    limit: int | None = None
    max_new_tokens: int = 128
    batch_size: int = 1
    baselines: tuple[str, ...] = BESIDE  # of OURS, in this engine, and TRANSFORMERS, in its own
    measured: bool = False  # tree=auto comes first, and the tree that the drafter came with beside it: train, eval and compare
    # do so where no tree= is asked for, rounds are not captured and one process drafts
    store: str | None = OWN  # what copies and retrieval copy from besides the text: the answers of a run's own training data,
    # a folder that spectrain data index wrote, or nothing
    check: bool = True  # compare every output with its reference
    quality: bool = False  # perplexity, agreement and the task's score, which lossy rules always show, for any rule
    execute: bool = False  # run the programs that answer eval.prompts=humaneval, to score them: on this machine, as this user
    oracle: bool = True  # decode once more with every draft right
    report: bool = (
        True  # report.html, the drafts that it shows, what drafting adds to memory, and what training did to the target
    )
    engine: EngineChoice = "auto"  # captured: rounds replayed as CUDA graphs, by default where there is a GPU; eager: a loop
    guard: bool = False  # decode autoregressively while drafting does not pay
    repeats: int = 2  # times that pairs are decoded where times are unsteady: after the first, round by round in turn
    calibration: str | None = None  # prompts that trees are searched and timed on; else openings of the embedded data
    calibration_limit: int = 8
    assistant: str | None = None  # a model's directory, for the baseline of that name
    exit_layer: int | None = None  # for the baseline early_exit

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

    online: bool = False  # the drafter goes on learning from what the target corrects, beside a copy that does not
    online_lr: float = 1e-4
    online_every: int = 8
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

    prune_layer: int | None = None  # drop branches that the target's first layers find unlikely: not among their
    prune_top: int = 8  # likeliest tokens
    prune_rank: Number = 64  # of the head that names them, fitted beforehand and used if it is as good; 0: the target's own
    sweep: Literal["tree", "length", "exit", "prune"] | None = None  # many settings of one drafter side by side
    trees: tuple[str, ...] | None = None  # sweep=tree: tree builders, all or these,
    budgets: tuple[int, ...] = (8, 16, 32, 64)  # at these sizes
    exits: tuple[int, ...] | None = None  # sweep=exit, sweep=prune: after so many layers, by default up to seven places,
    depths: tuple[int, ...] = (2, 4, 6)  # sweep=exit: chains so long
    tops: tuple[int, ...] = (1, 2, 4, 8, 16)  # sweep=prune: by so many likeliest tokens

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
