"""What the ideas add to `eval=default`: their settings and extensions, which are added here and
removed here with the idea.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from spectrain.config.values import Count, NotNegative, Number, Seed, Share
from spectrain.errors import UserError
from spectrain.eval.extensions import EvalExtension
from spectrain.eval.parts import EvalPart
from spectrain.eval.selection import PromptedEvaluation
from spectrain.eval.settings import refuse_below, refuse_empty, refuse_unknown

from .adversary.evaluation import Adversary, Search
from .beams.evaluation import Beams, BeamSettings
from .beams.session import Method
from .grafting.evaluation import GraftedTrees
from .less_cache.evaluation import Traffic
from .online.evaluation import LearnFrom, Online
from .overlap.evaluation import Overlapping
from .pipelines.evaluation import Pipelining
from .pruning.evaluation import PrunedTrees, PruneSweep
from .shared.guard import GuardedSystem
from .sweeps.evaluation import SWEPT, ExitSweep, LengthSweep, TreeSweep
from .transport.evaluation import Optimum


@dataclass
class GuardSettings:
    """Whether rounds that do not pay are decoded without drafts."""

    part: ClassVar[str] = "systems"

    # Decode autoregressively while drafting does not pay.
    guard: bool = False


@dataclass
class IdeaSweeps:
    """What is varied for one drafter."""

    part: ClassVar[str] = "axes"

    # What to vary for one drafter; null varies nothing. With tree, length, exit and prune, this is
    # the tree builder, the length of chains, the exit, and how trees are pruned.
    sweep: Literal["tree", "length", "exit", "prune"] | None = None
    # Tree builders of eval.sweep=tree; null takes all of them.
    trees: tuple[str, ...] | None = None
    # Tree sizes of eval.sweep=tree, in nodes with the root included.
    budgets: tuple[int, ...] = (8, 16, 32, 64)
    # Exit layers of a sweep over layers; null takes up to seven, evenly spaced.
    exits: tuple[int, ...] | None = None
    # Chain lengths of eval.sweep=exit, in tokens.
    depths: tuple[int, ...] = (2, 4, 6)
    # Numbers of most likely tokens that eval.sweep=prune tries.
    tops: tuple[int, ...] = (1, 2, 4, 8, 16)


@dataclass
class PruningSettings:
    """How trees lose unlikely branches within the target."""

    part: ClassVar[str] = "pruning"

    # Number of target layers after which unlikely branches are dropped from the drafter's trees;
    # null does not prune.
    prune_layer: int | None = None
    # Number of most likely tokens of the early layers that a node must be among to stay in the
    # tree.
    prune_top: int = 8
    # Rank of the early head that names these tokens, fitted beforehand and used if it ranks drafts
    # as well as the target's head; 0 uses the target's head.
    prune_rank: Number = 64


@dataclass
class GraftingSettings:
    """How trees gain likely nodes within the target."""

    part: ClassVar[str] = "grafting"

    # Number of target layers after which likely nodes that the drafter's trees lack join them; null
    # grafts nothing.
    graft_layer: int | None = None
    # Number of nodes that join a tree in one step, in place of as many of its least likely leaves.
    graft_nodes: int = 2
    # Number of steps in which nodes join a tree; with more than one, sequences of tokens join it.
    graft_steps: int = 1
    # Rank of the early head that names them, fitted beforehand as for eval.prune_rank; 0 uses the
    # target's head.
    graft_rank: Number = 64


@dataclass
class AdversarySettings:
    """How prompts are sought that slow the drafter down."""

    part: ClassVar[str] = "adversaries"

    # Number of edits of every prompt to try, in search of one that slows the drafter down; null
    # tries none.
    adversary: Count | None = None
    # Largest number of words that one edit inserts into a prompt.
    adversary_words: Count = 4
    # Share of the answer's tokens that must stay the target's most likely ones after an edit.
    adversary_same: Share = 0.9
    # Seed of the random edits.
    adversary_seed: Seed = 0


@dataclass
class OptimumSettings:
    """Whether the upper bound on acceptance is measured."""

    part: ClassVar[str] = "statistics"

    # Measure by depth the upper bound on acceptance of any lossless rule, and the acceptance of
    # each rule.
    optimum: bool = False


@dataclass
class BeamChoices:
    """How prompts are decoded with beams."""

    part: ClassVar[str] = "beam_search"

    # Number of beams with which the prompts are decoded as well, without a drafter and with it;
    # null decodes without beams.
    beams: Count | None = None
    # Which continuations of the beams go on: the most likely ones (strict), ones drawn without
    # replacement (relaxed), the most likely of more that are drawn, as beam sampling of
    # transformers does (sample), or a changing number of drawn ones (dynamic).
    beam_method: Method = "strict"
    # Number of drafts of each depth over all beams; null takes twice as many as beams.
    beam_drafts: Count | None = None
    # Chance with which as many drafts have to be accepted as beams go on, used with
    # eval.beam_method=dynamic.
    beam_threshold: Share = 0.7
    # File of the codes of valid items, one JSON list of token ids per line, to which beams are
    # restricted; null restricts nothing.
    items: str | None = None


@dataclass
class ConcurrencySettings:
    """How drafting and verification run at the same time."""

    part: ClassVar[str] = "concurrent"

    # Draft in a second process while the target verifies. With post, it drafts as if all drafts
    # will be accepted. With pearl, the target also decodes autoregressively while a rejected draft
    # is replaced. With outcomes, it drafts for several likely results of the verification. Null
    # drafts and verifies in turn.
    overlap: Literal["post", "pearl", "outcomes"] | None = None
    # With eval.overlap=outcomes, how many likely results of the verification to draft ahead for.
    outcomes: Count = 8
    # What several stages of layers with several runs in flight would gain: simulate computes it
    # from measured rounds, processes also decodes with every stage in a process of its own. Null
    # does neither.
    pipeline: Literal["simulate", "processes"] | None = None
    # Number of stages of eval.pipeline.
    stages: Count = 2
    # Largest number of runs in flight of eval.pipeline.
    in_flight: Count = 3
    # With eval.pipeline, milliseconds from a drafter at the user's side to a server that verifies,
    # and back: what drafting there gains is simulated too. 0 simulates none.
    round_trip_ms: NotNegative = 0.0


@dataclass
class LearningSettings:
    """How the drafter learns while it is scored."""

    part: ClassVar[str] = "learning"

    # Let the drafter learn from the corrections of the target while it is scored, next to a copy
    # that does not learn.
    online: bool = False
    # Learning rate of the online updates.
    online_lr: float = 1e-4
    # Number of answers between two online updates.
    online_every: int = 8
    # What online updates learn from: corrections are the tokens that replaced a wrong draft,
    # answers are all tokens of the answers, split replays drafts with the loss of Draft-OPD, and
    # dvi takes drafts up to their first rejected token with the loss of DVI.
    online_learn: LearnFrom = "corrections"


@dataclass
class ResearchPart(
    EvalPart,
    LearningSettings,
    ConcurrencySettings,
    BeamChoices,
    OptimumSettings,
    AdversarySettings,
    GraftingSettings,
    PruningSettings,
    IdeaSweeps,
    GuardSettings,
):
    """The settings of `eval` that belong to ideas."""

    def check(self, evaluation: PromptedEvaluation) -> None:
        refuse_below("prune_layer", self.prune_layer, 1)
        refuse_below("prune_top", self.prune_top, 1)
        if any(budget < 2 for budget in self.budgets):
            raise UserError(
                f"eval.budgets={list(self.budgets)}: a tree has 2 nodes or more, the root included"
            )
        for key in ("exits", "depths", "tops"):
            refuse_empty(key, getattr(self, key))
        refuse_unknown("trees", self.trees or (), tuple(SWEPT))
        if self.prune_layer is not None and self.sweep is not None:
            raise UserError(
                f"eval.sweep={self.sweep}: it needs no eval.prune_layer; use eval.sweep=prune "
                "with eval.exits"
            )
        if self.graft_layer is not None and (
            self.prune_layer is not None or self.sweep is not None
        ):
            raise UserError(
                "eval.graft_layer: grafted trees are neither pruned nor swept; leave out "
                "eval.prune_layer, eval.sweep"
            )
        self.learning = Online(self.online_lr, self.online_every, self.online_learn)
        if self.online and self.sweep is not None:
            raise UserError(
                f"eval.sweep={self.sweep}: a drafter that learns while it decodes gives no rows "
                "to compare; use either eval.online or eval.sweep"
            )
        self.search: Search | None = None
        if self.adversary is not None:
            self.search = Search(
                self.adversary, self.adversary_words, self.adversary_same, self.adversary_seed
            )

    def make_sweep(self) -> list[EvalExtension]:
        """Return the extension that varies what eval.sweep names, or that prunes the drafter's
        trees.
        """
        if self.prune_layer is not None:
            return [PrunedTrees(self.prune_layer, self.prune_top, self.prune_rank)]
        if self.sweep == "prune":
            return [PruneSweep(self.exits, self.tops, self.prune_rank)]
        if self.sweep == "tree":
            return [TreeSweep(self.trees or tuple(SWEPT), self.budgets)]
        if self.sweep == "length":
            return [LengthSweep()]
        return [ExitSweep(self.exits, self.depths)] if self.sweep == "exit" else []

    @property
    def uses_clock(self) -> bool:
        return self.guard

    @property
    def leaves_out_baselines(self) -> bool:
        # A sweep compares systems.
        return self.sweep is not None

    @property
    def varies_trees(self) -> bool:
        is_shaped = self.prune_layer is not None or self.graft_layer is not None
        return self.sweep in ("tree", "length", "exit", "prune") or is_shaped

    def extensions(self, evaluation: PromptedEvaluation) -> list[EvalExtension]:
        extensions: list[EvalExtension] = [GuardedSystem()] if self.guard else []
        extensions += self.make_sweep()
        if self.search is not None:
            extensions.append(
                Adversary(
                    self.search,
                    evaluation.chosen,
                    evaluation.max_new_tokens,
                    bool(evaluation.check),
                )
            )
        if self.optimum:
            extensions.append(Optimum(evaluation.max_new_tokens))
        if self.overlap is not None:
            extensions.append(
                Overlapping(
                    self.overlap == "pearl", self.outcomes if self.overlap == "outcomes" else 0
                )
            )
        if self.pipeline is not None:
            extensions.append(
                Pipelining(
                    self.stages,
                    self.in_flight,
                    self.pipeline == "processes",
                    self.round_trip_ms / 1000,
                )
            )
        if self.online:
            extensions.append(self.learning)
        if self.graft_layer is not None:
            extensions.append(
                GraftedTrees(self.graft_layer, self.graft_nodes, self.graft_steps, self.graft_rank)
            )
        if self.beams is not None:
            settings = BeamSettings(
                self.beams, self.beam_method, self.beam_drafts, self.beam_threshold, self.items
            )
            extensions.append(Beams(settings, evaluation.max_new_tokens, bool(evaluation.check)))
        if evaluation.report:
            extensions.append(Traffic())
        return extensions
