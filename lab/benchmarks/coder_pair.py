"""Qwen2.5-Coder 1.5B in the 4-bit blocks of its file, with the EAGLE-3 drafter that ships for it
and with the 0.5B as its drafter: what drafting gains on coding prompts, and what copying from a
folder of code adds.

    make demo-coder                                  # after make models
    make demo-coder CODE=~/src/project
    python -m lab.benchmarks.coder_pair threads=1 prompts=12 tokens=64 minutes=60
    python -m lab.benchmarks.coder_pair trained=runs/mine questions=questions.jsonl

All ways of decoding take turns on every prompt, and each answer is compared with plain decoding.
The first prompts choose the drafter of the last line; that line counts the others. With `code`,
half of the prompts continue files of that folder, the largest ones. Copies come from its other
files, and a training of the EAGLE-3 drafter goes on with these for `train_minutes`.

With one thread, seconds are those of the processor, because other work on a machine interrupts
them at random; with several they are those of the clock.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from spectrain.data.datastore import Datastore, hash_vocabulary, write_store
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.decoding.session import prepare_for_decoding
from spectrain.drafters.base import Drafter
from spectrain.drafters.causal import Causal
from spectrain.drafters.hybrid import DrafterWithCopies
from spectrain.drafters.layers.copies import CopySource
from spectrain.drafters.retrieval import Retrieval
from spectrain.errors import UserError
from spectrain.eval.intervals import interval
from spectrain.models.device import choose_work_clock
from spectrain.models.loading import load_hf
from spectrain.models.published import MODELS
from spectrain.models.target import Target
from spectrain.models.threads import format_threads
from spectrain.output.console import make_console
from spectrain.runs.drafters import load_for_decoding
from spectrain.runs.folder import require_drafter_directory
from spectrain.servers.commands import to_options
from spectrain.trees import Chain, TreeBuilder
from spectrain_serve.engines.llamacpp import find_program
from spectrain_serve.engines.llamacpp_command import model_options

from .coding_questions import QUESTIONS, read_questions
from .command import run_benchmark
from .llama_cpp import launch_pair

TARGET = "qwen2.5-coder-1.5b"
DRAFTER = "qwen2.5-coder-0.5b"
CODE_SUFFIX = re.compile(
    r"\.(c|cc|cpp|cs|go|h|hpp|java|jl|js|kt|lua|php|pl|py|r|rb|rs|scala|sh|sql|swift|ts|tsx)"
)
NUM_TRIALS = 2
"""Prompts that choose the drafter of the last line."""
MAX_FILE_BYTES = 200_000
MAX_STORE_TOKENS = 2_000_000
CONTEXT_TOKENS = 256
"""Tokens of a file of which the next ones are wanted."""


@dataclass(frozen=True)
class CodeFolder:
    """Texts of a folder of source files."""

    continued: list[str]
    """The largest, whose middles are prompts."""
    others: list[str]


@dataclass
class Decoder:
    """A way to decode, and its answers by prompt with their seconds."""

    name: str
    drafter: Drafter | None = None
    builder: TreeBuilder | None = None
    answers: list[Generation] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def decode(self, target: Target, prompt: list[int], tokens: int) -> None:
        clock = choose_work_clock(target.device)
        started = clock()
        answers = decode(target, [prompt], Greedy(), tokens, self.drafter, self.builder)
        self.seconds.append(clock() - started)
        self.answers += answers

    @property
    def tokens_per_second(self) -> float:
        return sum(len(answer.output) for answer in self.answers) / sum(self.seconds)

    @property
    def tokens_per_forward(self) -> float:
        lengths = [length for answer in self.answers for length in answer.round_lengths]
        return sum(lengths) / max(1, len(lengths))

    def milliseconds(self, part: str) -> float:
        """Return the mean milliseconds of a part of a round, by the wall clock."""
        times = [seconds[part] for answer in self.answers for seconds in answer.round_seconds]
        return 1e3 * sum(times) / max(1, len(times))


class CoderPair:
    """Score drafters of the 1.5B: a trained one, the 0.5B, and copies from a folder of code."""

    def __init__(
        self,
        code: str | None = None,
        # Run folder, drafter directory or name of the trained drafter.
        trained: str = TARGET,
        # Coding questions, rows of {"prompt": ..}.
        questions: str = str(QUESTIONS),
        threads: int | None = None,
        prompts: int = 8,
        tokens: int = 64,
        minutes: float = 7.0,
        # Minutes of a training on `code`, before; 0 leaves the drafter as it is.
        train_minutes: float = 2.0,
        quantization: Literal["gguf", "gguf_int8"] = "gguf_int8",
        vocab_size: int = 32_768,
        # Blocks of the 0.5B's weights.
        drafter_blocks: Literal["gguf", "q4_0"] = "q4_0",
        out: str | None = None,
    ) -> None:
        self.code = code or None
        self.trained = trained
        self.questions = Path(questions)
        self.threads = threads
        self.num_prompts = prompts
        self.tokens = tokens
        self.minutes = minutes
        self.train_minutes = train_minutes
        self.quantization = quantization
        self.vocab_size = vocab_size
        self.drafter_blocks = drafter_blocks
        self.out = out

    def run(self) -> None:
        console = make_console()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        with TemporaryDirectory() as name:
            folder = Path(name)
            code = None
            continued = None
            if self.code is not None:
                code = split_code(read_code(Path(self.code).expanduser()), self.num_prompts)
                if self.train_minutes:
                    continued = continue_training(self.trained, code, self.train_minutes, folder)
            started = time.perf_counter()
            target = load_hf(TARGET, quantization=self.quantization)
            target.pack_weights()
            eagle = load_for_decoding(require_drafter_directory("trained", self.trained), target)
            small = Causal(
                target, model=DRAFTER, vocab_size=self.vocab_size, quantization=self.drafter_blocks
            )
            prepare_for_decoding(small, target)
            console.print(
                f"{TARGET}, its drafter of {count_gigabytes(eagle):.2f} GB and {DRAFTER} are "
                f"loaded in {time.perf_counter() - started:.0f} s: "
                f"{count_gigabytes(target, eagle, small):.2f} GB, "
                f"{format_threads(torch.get_num_threads())}"
            )
            prompts = read_questions(target, self.num_prompts, self.questions)
            store = None
            if code is not None:
                store = store_texts(target, code.others, folder)
                prompts = mix_prompts(target, code.continued, prompts)
            decoders = list_decoders(target, eagle, small, store)
            if continued is not None:
                own = load_for_decoding(continued, target)
                decoders.insert(2, Decoder("EAGLE-3 on your code, chain of 2", own, Chain(2)))
            take_turns(target, decoders, prompts, self.tokens, self.minutes, console)
        console.print(make_table(decoders))
        console.print(describe_llama_cpp(torch.get_num_threads()), soft_wrap=True)
        console.print(describe_result(decoders), soft_wrap=True)
        if self.out is not None:
            Path(self.out).write_text(json.dumps(list_numbers(decoders), indent=2) + "\n")


def read_code(folder: Path) -> list[str]:
    """Return the texts of the source files of a folder, without hidden ones and large ones."""
    if not folder.is_dir():
        raise UserError(f"code={folder}: there is no such folder; name one with source files")
    texts = []
    for path in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if is_hidden or not CODE_SUFFIX.fullmatch(path.suffix.lower()) or not path.is_file():
            continue
        if 0 < path.stat().st_size <= MAX_FILE_BYTES:
            texts.append(path.read_text(errors="replace"))
    if len(texts) < 2:
        raise UserError(f"code={folder}: it has fewer than two source files; name another folder")
    return texts


def split_code(texts: list[str], num_prompts: int) -> CodeFolder:
    """Take the largest files for half of the prompts, and leave at least as many others."""
    num_continued = min(num_prompts // 2, len(texts) // 2)
    largest_first = sorted(texts, key=len, reverse=True)
    return CodeFolder(largest_first[:num_continued], largest_first[num_continued:])


def continue_training(trained: str, code: CodeFolder, minutes: float, folder: Path) -> Path:
    """Go on with the training of a drafter on the files that are not continued; return its
    directory.
    """
    data = folder / "code.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in code.others))
    run = name_run()
    words = [
        "recipe=eagle3",
        f"target={TARGET}",
        "target.quantization=gguf_int8",
        "data=text",
        f"data.path={data}",
        f"drafter.init={trained}",
        "drafter.vocab_size=8192",
        "drafter.architecture={intermediate_size: 6144}",
        "trainer.batch_tokens=768",
        f"trainer.max_minutes={minutes}",
        "eval=none",
        f"run={run}",
    ]
    subprocess.run([sys.executable, "-m", "spectrain", "train", *words], check=True)
    return run / "drafter"


def name_run() -> Path:
    """Return a new run folder, so that the drafter stays."""
    number = 1
    while Path(f"runs/own-code-{number}").exists():
        number += 1
    return Path(f"runs/own-code-{number}")


def store_texts(target: Target, texts: list[str], folder: Path) -> Datastore:
    """Return the store of texts from which tokens are copied, up to its limit of tokens."""
    stored: list[list[int]] = []
    num_tokens = 0
    for text in texts:
        tokens = target.tokenizer.encode(text)
        if num_tokens + len(tokens) <= MAX_STORE_TOKENS:
            stored.append(tokens)
            num_tokens += len(tokens)
    write_store(folder, stored, [], [], {"tokenizer": hash_vocabulary(target.tokenizer)})
    return Datastore(str(folder), target.tokenizer)


def mix_prompts(target: Target, texts: list[str], questions: list[list[int]]) -> list[list[int]]:
    """Return texts up to their middle, behind which much is left to write, and questions, in
    turns and as many in all as there are questions.
    """
    prompts: list[list[int]] = []
    for number, text in enumerate(texts):
        tokens = target.tokenizer.encode(text)
        middle = len(tokens) // 2
        prompts.append(tokens[max(0, middle - CONTEXT_TOKENS) : middle])
        prompts.append(questions[number])
    return [*prompts, *questions[len(texts) : len(questions) - len(texts)]]


def list_decoders(
    target: Target, eagle: Drafter, small: Causal, store: Datastore | None
) -> list[Decoder]:
    """Return plain decoding first, and what is compared with it."""
    copies = Retrieval(target)
    copies.copying = CopySource(store)
    both = DrafterWithCopies(eagle, CopySource(store))
    return [
        Decoder("plain"),
        Decoder("EAGLE-3, chain of 2", eagle, Chain(2)),
        Decoder("EAGLE-3, chain of 3", eagle, Chain(3)),
        Decoder("EAGLE-3 + copies", both, Chain(3)),
        Decoder("0.5B, chain of 3", small, Chain(3)),
        Decoder("0.5B, chain of 4", small, Chain(4)),
        # Ends where the product of its probabilities falls below.
        Decoder("0.5B, up to 6", small, Chain(6, stop=0.6)),
        Decoder("copies", copies, Chain(4)),
    ]


def take_turns(
    target: Target,
    decoders: list[Decoder],
    prompts: list[list[int]],
    tokens: int,
    minutes: float,
    console: Console,
) -> None:
    """Decode every prompt in every way, in an order that rotates, until the time is over."""
    started = time.perf_counter()
    for decoder in decoders:
        # Compiles kernels outside of the measurement.
        decode(target, [prompts[0]], Greedy(), 4, decoder.drafter, decoder.builder)
    for number, prompt in enumerate(prompts):
        if number > NUM_TRIALS and time.perf_counter() - started > 60 * minutes:
            console.print(f"{minutes:g} minutes are over after {number} of {len(prompts)} prompts")
            return
        first = number % len(decoders)
        for decoder in decoders[first:] + decoders[:first]:
            decoder.decode(target, prompt, tokens)
        speeds = ", ".join(
            f"{len(decoder.answers[-1].output) / decoder.seconds[-1]:.1f}" for decoder in decoders
        )
        console.print(f"prompt {number + 1} of {len(prompts)}: {speeds} tokens/s")


def compare(decoder: Decoder, plain: Decoder, prompts: slice) -> tuple[float, list[float]]:
    """Return how many times as fast as plain decoding a way is on some prompts, with its 95 %
    interval.
    """
    seconds = np.array([plain.seconds[prompts], decoder.seconds[prompts]])
    bounds = interval(seconds.T, (1, -1))
    return float(seconds[0].sum() / seconds[1].sum()), bounds or []


def count_identical(decoder: Decoder, plain: Decoder) -> int:
    return sum(a.output == b.output for a, b in zip(decoder.answers, plain.answers))


def make_table(decoders: list[Decoder]) -> Table:
    plain = decoders[0]
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for column in ("tokens per forward", "draft ms", "verify ms", "tokens per s", "speedup"):
        table.add_column(column, justify="right")
    table.add_column("95 %", justify="right", no_wrap=True)
    table.add_column("same", justify="right", no_wrap=True)
    for decoder in decoders:
        ratio, bounds = compare(decoder, plain, slice(None))
        table.add_row(
            decoder.name,
            f"{decoder.tokens_per_forward:.2f}",
            f"{decoder.milliseconds('draft'):.0f}",
            f"{decoder.milliseconds('verify'):.0f}",
            f"{decoder.tokens_per_second:.1f}",
            f"{ratio:.2f}",
            " to ".join(f"{bound:.2f}" for bound in bounds),
            f"{count_identical(decoder, plain)} of {len(plain.answers)}",
        )
    return table


def describe_llama_cpp(threads: int) -> str:
    """Return the command that decodes with the same pair in llama.cpp, where that is installed."""
    program = find_program(None)
    if program is None:
        return "llama.cpp is not installed: make llama-cpp brings it"
    launch = launch_pair(str(MODELS[TARGET].path), str(MODELS[DRAFTER].path), num_tokens=3)
    words = to_options(model_options(launch) | {"-t": threads})
    return f"in llama.cpp: {' '.join([program, *words])}"


def describe_result(decoders: list[Decoder]) -> str:
    """Return the last line: how many times as fast the best drafter of the trial prompts is on the
    others.
    """
    plain, *drafted = decoders
    trial = slice(0, NUM_TRIALS)
    best = max(drafted, key=lambda decoder: compare(decoder, plain, trial)[0])
    ratio, bounds = compare(best, plain, slice(NUM_TRIALS, None))
    number = len(plain.answers) - NUM_TRIALS
    same = count_identical(best, plain)
    outputs = (
        "outputs identical"
        if same == len(plain.answers)
        else f"{len(plain.answers) - same} outputs differ"
    )
    limits = f" (95 % {bounds[0]:.2f} to {bounds[1]:.2f})" if bounds else ""
    verdict = "" if ratio > 1 else "; drafting does not pay on this machine"
    return (
        f"{best.name}: {ratio:.2f} times as fast{limits}, {outputs}, on {number} prompts with "
        f"{format_threads(torch.get_num_threads())}{verdict}"
    )


def count_gigabytes(*models: Target | Drafter) -> float:
    weights = {id(weight): weight for model in models for weight in model.parameters()}
    return sum(weight.nbytes for weight in weights.values()) / 1e9


def list_numbers(decoders: list[Decoder]) -> list[dict[str, object]]:
    """Return what was measured, by way of decoding."""
    plain = decoders[0]
    rows: list[dict[str, object]] = []
    for decoder in decoders:
        ratio, bounds = compare(decoder, plain, slice(None))
        rows.append(
            {
                "name": decoder.name,
                "prompts": len(decoder.answers),
                "tokens_per_forward": decoder.tokens_per_forward,
                "tokens_per_second": decoder.tokens_per_second,
                "draft_ms": decoder.milliseconds("draft"),
                "verify_ms": decoder.milliseconds("verify"),
                "speedup": ratio,
                "interval": bounds,
                "identical": count_identical(decoder, plain),
            }
        )
    return rows


if __name__ == "__main__":
    run_benchmark(CoderPair)
