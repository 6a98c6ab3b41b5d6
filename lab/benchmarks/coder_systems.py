"""Systems of docs/systems.md on a target on which drafting can pay, Qwen2.5-Coder-1.5B, with what
exists without training: the EAGLE-3 drafter that ships for it, the 0.5B, copies, and the target
itself.

    OMP_NUM_THREADS=1 nice python -m lab.benchmarks.coder_systems        # what the file lacks
    python -m lab.benchmarks.coder_systems groups='["cascades and choices"]'

The rows stand in lab/benchmarks/coder_systems.yaml. The target is loaded once. The systems of a
group and plain decoding take turns on every prompt, in an order that rotates. Every group is
written at once, so an interrupted run goes on where it stopped. With one thread, seconds are those
of the processor.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import yaml

from spectrain.cli.interface import compose_config, hydra_context
from spectrain.config.spec import RunSpec, read_run
from spectrain.decoding.generation import Generation
from spectrain.drafters.base import Drafter
from spectrain.errors import RunError, UserError
from spectrain.eval.metrics import Turn, measure_system
from spectrain.eval.run import EngineAnswers
from spectrain.eval.systems import Decoder, System
from spectrain.files import write_text
from spectrain.models.device import choose_work_clock
from spectrain.models.loading import load_hf
from spectrain.models.target import Target
from spectrain.provenance import collect_provenance
from spectrain.runs.candidate import Candidate
from spectrain.runs.drafters import build_drafter

from .coding_questions import QUESTIONS
from .command import run_benchmark

ROWS = Path(__file__).with_name("coder_systems.yaml")
TARGET = "qwen2.5-coder-1.5b"
NUM_CALIBRATION = 2
"""Prompts behind the scored ones, on which trees are calibrated."""
SCORING = [
    "eval=default",
    "eval.baselines=[]",
    "eval.oracle=false",
    "eval.report=false",
    "eval.check=false",
]


def read_rows(fill: bool = True) -> dict[str, dict[str, str]]:
    """Return the arguments of every row by group; `fill` puts its arguments in place of a word of
    the file.
    """
    content = yaml.safe_load(ROWS.read_text())
    rows: dict[str, dict[str, str]] = content["groups"]
    for group in rows.values() if fill else ():
        for name, text in group.items():
            for word, value in content["words"].items():
                text = text.replace(word, value)
            group[name] = text
    return rows


@dataclass
class Prepared:
    """A system that is ready to decode, and its answers by prompt."""

    name: str
    system: System
    decoder: Decoder
    batch_size: int
    answers: list[Generation] = field(default_factory=list)

    @property
    def baseline(self) -> tuple[bool, int]:
        """What plain decoding must have in common with the system: whether tokens are drawn, and
        the number of prompts at once.
        """
        return self.system.rule.is_random, self.batch_size


@dataclass
class CoderSystems:
    """Decode with all systems in groups, each group in turns with plain decoding."""

    # Names of groups to measure; null measures all rows that the file of results lacks.
    groups: tuple[str, ...] | None = None
    # Questions, and the tokens of each answer.
    prompts: int = 4
    tokens: int = 32
    # JSON file of the results.
    out: str = "lab/results/coder-systems.json"

    def run(self) -> None:
        out = Path(self.out)
        rows: dict[str, Any] = json.loads(out.read_text())["rows"] if out.exists() else {}
        self.target = load_hf(TARGET, quantization="gguf_int8")
        self.target.pack_weights()
        # Drafters of several rows, which are loaded once.
        self.drafters: dict[str, Drafter] = {}
        with hydra_context(), TemporaryDirectory() as scratch:
            self.folder = Path(scratch)
            self.write_questions()
            groups = read_rows()
            for group in self.groups or groups:
                if group not in groups:
                    raise UserError(f"groups={group}: choose from {', '.join(groups)}")
                left = {name: text for name, text in groups[group].items() if name not in rows}
                if left:
                    # Others than a model alone are of one group, and hold a model of their own.
                    self.drafters = {
                        key: drafter for key, drafter in self.drafters.items() if "inner" not in key
                    }
                    rows |= self.measure_group(group, left)
                    setting = {
                        "target": f"{TARGET}, gguf_int8",
                        "prompts": self.prompts,
                        "max_new_tokens": self.tokens,
                        "scoring": SCORING,
                        **collect_provenance(),
                    }
                    text = json.dumps({"setting": setting, "rows": rows}, indent=1)
                    write_text(out, text + "\n")

    def write_questions(self) -> None:
        """Write the scored questions and those of the calibration to files of their own."""
        lines = QUESTIONS.read_text().splitlines(keepends=True)
        parts = {
            "scored": lines[: self.prompts],
            "calibration": lines[self.prompts : self.prompts + NUM_CALIBRATION],
        }
        for name, part in parts.items():
            (self.folder / f"{name}.jsonl").write_text("".join(part))

    def measure_group(self, group: str, texts: dict[str, str]) -> dict[str, Any]:
        """Return the numbers of the rows of a group; a row that is refused says why."""
        rows: dict[str, Any] = {}
        prepared: list[Prepared] = []
        for name, text in texts.items():
            started = time.thread_time()
            try:
                prepared.append(self.prepare(name, text.split()))
            except (UserError, RunError) as error:
                rows[name] = {"command": f"eval target={TARGET} {text}", "refused": str(error)}
            seconds = time.thread_time() - started
            print(f"{group}: {name}: prepared in {seconds:.0f} s of one core", flush=True)
        # Rounds are timed by the processor's clock, because other work interrupts them.
        with patch.object(time, "perf_counter", choose_work_clock(self.target.device)):
            plain = self.take_turns(group, prepared)
        for entry in prepared:
            rows[entry.name] = {
                "command": f"eval target={TARGET} {texts[entry.name]}",
                **summarize(self.target, entry, plain[entry.baseline]),
            }
            print(entry.name, json.dumps(rows[entry.name]), flush=True)
        return rows

    def take_turns(
        self, group: str, prepared: list[Prepared]
    ) -> dict[tuple[bool, int], list[Generation]]:
        """Decode all prompts with every system and without one, in an order that rotates; return
        the plain answers.
        """
        plain: dict[tuple[bool, int], list[Generation]] = {}
        decoders = {entry.baseline: entry.decoder for entry in prepared}
        prompts = self.tokenize_prompts()
        for number in range(1, len(prompts) + 1):
            for entry in rotate(prepared, number):
                if number % entry.batch_size == 0:
                    ids = list(range(number - entry.batch_size, number))
                    batch = [prompts[index] for index in ids]
                    answers = plain.setdefault(entry.baseline, [])
                    if len(answers) < number:
                        answers += decoders[entry.baseline](None, batch, self.tokens, ids)
                    entry.answers += entry.decoder(entry.system, batch, self.tokens, ids)
            print(f"{group}: prompt {number} of {len(prompts)}", flush=True)
        return plain

    def tokenize_prompts(self) -> list[list[int]]:
        spec = self.compose(["drafter=ngram", "tree=chain", "acceptance=greedy"])
        evaluation = spec.eval.build()
        evaluation.check_prompts(self.target)
        return [prompt.tokenize_for(self.target) for prompt in evaluation.chosen]

    def compose(self, words: list[str]) -> RunSpec:
        """Return the settings of `spectrain eval` with these words."""
        settings = dict(word.split("=", 1) for word in [*SCORING, *words])
        settings |= {
            "eval.prompts": str(self.folder / "scored.jsonl"),
            "eval.calibration": str(self.folder / "calibration.jsonl"),
            "eval.calibration_limit": str(NUM_CALIBRATION),
            "eval.max_new_tokens": str(self.tokens),
        }
        config, overrides = compose_config("eval", settings)
        return read_run(config, ("serve",), overrides)[0]

    def prepare(self, name: str, words: list[str]) -> Prepared:
        """Build, tune and calibrate a system as `spectrain eval` does."""
        spec = self.compose(words)
        evaluation = spec.eval.build()
        evaluation.check_prompts(self.target)
        key = json.dumps(spec.drafter.save(), sort_keys=True, default=str)
        if key not in self.drafters:
            self.drafters[key] = build_drafter(spec.drafter, self.target)
        drafter = self.drafters[key]
        tree, rule = spec.build("tree", "acceptance")
        candidate = Candidate(self.target, drafter, tree, rule, {})
        answers = EngineAnswers(evaluation, candidate, self.folder)
        # A packed drafter cannot move, and is where the target is.
        with patch.object(Drafter, "to", lambda drafter, *_: drafter):
            answers.prepare()
            system = answers.make_systems()[0]
        decoder = Decoder(self.target, system.rule.matching_rule())
        return Prepared(name, system, decoder, evaluation.batch_size)


def rotate(prepared: list[Prepared], number: int) -> Iterator[Prepared]:
    """Yield the systems in an order that begins with another one for every prompt."""
    first = number % max(1, len(prepared))
    yield from prepared[first:] + prepared[:first]


def summarize(target: Target, entry: Prepared, plain: list[Generation]) -> dict[str, Any]:
    """Return tokens per forward and speed of a system, by the definitions of a score."""
    turns = [
        Turn(str(number), 0, "code", before, after)
        for number, (before, after) in enumerate(zip(plain, entry.answers, strict=True))
    ]
    numbers = measure_system(
        turns, entry.system.builder.traits.is_chain, target.template, entry.batch_size > 1
    )
    return {
        "rule": entry.system.rule.name,
        "lossless": entry.system.rule.lossless,
        "prompts": len(turns),
        "identical": sum(turn.autoregressive.output == turn.drafted.output for turn in turns),
        "acceptance_length": asdict(numbers["acceptance_length"]),
        "speedup": asdict(numbers["speedup"]),
        "tokens_per_second": asdict(numbers["tokens_per_second"]),
        "time_share": numbers["time_share"],
    }


if __name__ == "__main__":
    run_benchmark(CoderSystems)
