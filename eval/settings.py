"""The settings of an evaluation, which are the keys of `eval`, by part, and their validation.

A part is a dataclass. Files and help write its settings as eval.PART.NAME, as in
eval.dataset.limit; a name is unique in `eval`, so eval.limit is the same setting.
config/grouped.py reads both.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from spectrain.config.missing import explain_missing
from spectrain.config.values import Count, FolderName, Positive
from spectrain.decoding.session import EngineChoice
from spectrain.errors import UserError
from spectrain.eval.baselines import COPYING, DEFAULT_BASELINES, OURS, OWN_STORE, TRANSFORMERS
from spectrain.eval.context import ContextFiller, ContextMethod
from spectrain.runs.server_scores import require_server_scores

DrafterDtype = Literal["auto", "float32", "bfloat16", "float16"]
"""auto packs large weights of drafters into fewer bits on a CPU; a type computes with drafters
as they were loaded.
"""
ServingEngine = Literal["auto", "openvino", "llamacpp", "vllm"]


@dataclass
class PromptSettings:
    """What is asked."""

    part: ClassVar[str] = "dataset"

    # Prompts to score: a file or the name of a known benchmark; null uses the held-out prompts that
    # ship with the project.
    prompts: str | None = None
    # Prompt categories to score; null scores all of them.
    categories: list[str] | None = None
    # Largest number of prompts, taken from all categories in turn; null scores every prompt.
    limit: Count | None = None
    # Lengths in tokens that every prompt is extended to by documents before its question, as in
    # [1k,4k,16k] or 4k, where k is 1,024. Null takes the prompts as they are.
    context: tuple[int | str, ...] | int | str | None = None
    # With eval.context, how documents precede the question: concatenated takes different ones,
    # repeated repeats one, and needle takes different ones and asks for a sentence among them in
    # place of the prompt's own question.
    context_method: ContextMethod = "concatenated"
    # With eval.context, a file or a folder of texts to take the documents from; null takes the
    # embedded conversations.
    documents: str | None = None

    def __post_init__(self) -> None:
        self.context_filler = ContextFiller.parse(self.context, self.context_method, self.documents)


@dataclass
class AnswerLimit:
    """How long an answer may be."""

    part: ClassVar[str] = "decoding"

    # Largest number of tokens that one answer may have.
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        refuse_below("max_new_tokens", self.max_new_tokens, 2)


@dataclass
class ReportSettings:
    """What a score writes, and where."""

    part: ClassVar[str] = "output"

    # Name of the folder under eval/ that receives the result.
    name: FolderName = "heldout"
    # Write report.html with example drafts, and measure what drafting adds to memory and what
    # training changed in the target.
    report: bool = True
    # Print an answer in which colours tell the drafter's tokens from the target's; it needs
    # eval.report.
    show_answer: bool = False


@dataclass
class OutputCheck:
    """Whether outputs are compared with their reference."""

    part: ClassVar[str] = "statistics"

    # Compare every output with its reference and, of a server that serves a run, every round with
    # our own chain's. With distribution, also compare the distribution of sampled answers with the
    # target's, on this model.
    check: bool | Literal["distribution"] = True


@dataclass
class SystemSettings:
    """What is scored: the drafter in which trees, and what it is compared with."""

    part: ClassVar[str] = "systems"

    # Systems to score next to the drafter. This engine decodes own, auto, copies, chain, shipped,
    # untrained, ngram, retrieval and those of installed packages; transformers decodes generate,
    # prompt_lookup, assistant and early_exit. With fixed, the drafter, its start, the untrained and
    # the shipped one are also decoded in the same fixed trees, without times: a chain of 3 and 16
    # nodes.
    baselines: tuple[str, ...] = DEFAULT_BASELINES
    # Score a chain of 3 first, and the drafter's own tree and tree=auto as further systems. Default
    # of train, eval and compare: true if no tree= is given. A tree that may draft nothing, such as
    # auto, always follows a chain of 3.
    measured: bool = False
    # Store that the baselines copies and retrieval copy from, in addition to the text: own is the
    # answers in a run's training data, any other value is a folder that spectrain data index wrote,
    # and null is no store.
    store: str | None = OWN_STORE
    # Directory of the model that the assistant baseline drafts with; null is allowed without that
    # baseline.
    assistant: str | None = None
    # Number of layers that the early_exit baseline drafts with; null uses the drafter's own exit
    # layer.
    exit_layer: Count | None = None
    # Engine for CPUs in which the drafter is scored as well, after all other scoring: openvino,
    # llamacpp, vllm, or auto for the first of these that is installed and serves the drafter. Null
    # scores it in none.
    serve_in: ServingEngine | None = None

    def __post_init__(self) -> None:
        if self.serve_in is not None:
            require_server_scores("eval.serve_in")
        for name in self.baselines:
            if (
                name not in (*OURS, *TRANSFORMERS)
                and (missing := explain_missing("drafter", name)) is not None
            ):
                raise UserError(f"eval.baselines: {missing}")
        refuse_unknown("baselines", self.baselines, (*OURS, *TRANSFORMERS))
        if "assistant" in self.baselines and self.assistant is None:
            raise UserError("eval.baselines: assistant needs a model, as in eval.assistant=DIR")

    @property
    def reads_data(self) -> bool:
        """Whether the evaluation needs the data that a run was trained on."""
        return bool(
            {"untrained", *(COPYING if self.store == OWN_STORE else ())} & {*self.baselines}
        )


@dataclass
class DecodingSettings:
    """How this engine decodes, how often, and on which prompts it prepares."""

    part: ClassVar[str] = "decoding"

    # Number of prompts that are decoded together.
    batch_size: Count = 1
    # Engine of all systems: captured replays rounds as CUDA graphs, eager runs them one by one, and
    # auto captures on a GPU.
    engine: EngineChoice = "auto"
    # Type in which drafters compute. auto takes the target's type, except that a CPU multiplies
    # large weights in 8 bits or in bfloat16 where it can. The name of the target's type computes
    # with the drafters as they were loaded, as other engines do.
    drafter_dtype: DrafterDtype = "auto"
    # Number of times to decode every pair of runs where times are unsteady; later repetitions
    # interleave the two systems round by round.
    repeats: Count = 2
    # Minutes that a score may take, from the search for trees to the report: as many prompts are
    # decoded as fit, at least four, and categories take turns. Null decodes all prompts.
    max_minutes: Positive | None = None
    # Prompts on which trees are searched and timed; null uses openings of the embedded
    # conversations.
    calibration: str | None = None
    # Largest number of prompts for searching and timing trees.
    calibration_limit: Count = 8


@dataclass
class StatisticsSettings:
    """What is computed of the answers, beyond lengths, times and speedups."""

    part: ClassVar[str] = "statistics"

    # Measure perplexity, agreement and the task score for a lossless rule too; a lossy rule always
    # reports them.
    quality: bool = False
    # With eval.check=distribution, number of short texts that each system continues; four times as
    # many see half the distance. They are not counted in eval.max_minutes.
    check_texts: int = 2000
    # Run the programs that answer eval.prompts=humaneval on this machine, as this user, to score
    # them.
    execute: bool = False
    # Decode once more with every draft correct, as the upper bound for a better drafter.
    oracle: bool = True
    # Longest time between two tokens that a reader accepts, in milliseconds. Without a server, the
    # share of the times within it is reported, and goodput counts the answers that keep it in 95 %
    # of their tokens.
    bound_ms: Positive = 50.0
    # Price of an hour of this machine, from which the price of a million tokens is computed; null
    # computes none.
    price_per_hour: Positive | None = None
    # Device to predict the speedup on, by its memory's gigabytes per second and its 10^12
    # operations per second in the target's type, as in {bandwidth: 3350, tflops: 989}; null
    # predicts none.
    other_device: dict[str, float] | None = None

    def __post_init__(self) -> None:
        refuse_below("check_texts", self.check_texts, 100)
        device = self.other_device
        if device is not None and (
            set(device) != {"bandwidth", "tflops"} or min(device.values()) <= 0
        ):
            raise UserError(
                f"eval.other_device={device}: give both numbers, as in {{bandwidth: 3350, tflops: "
                f"989}}"
            )


def refuse_empty(key: str, numbers: tuple[int, ...] | None) -> None:
    """Refuse a list of numbers that is empty or has one below 1; null is allowed."""
    if numbers is not None and (not numbers or any(number < 1 for number in numbers)):
        raise UserError(f"eval.{key}={list(numbers)}: give numbers from 1 on")


def refuse_below(key: str, value: Any, least: int) -> None:
    """Refuse a setting below its least value; null is allowed."""
    if value is not None and value < least:
        raise UserError(f"eval.{key}={value}: use {least} or more")


def refuse_unknown(
    key: str, names: tuple[str, ...], choices: tuple[str, ...], group: str = "eval"
) -> None:
    """Refuse names that a setting does not know."""
    if unknown := sorted({*names} - {*choices}):
        raise UserError(
            f"{group}.{key}: {unknown[0]!r} is unknown; choose from {', '.join(choices)}"
        )
