"""`python -m lab.benchmarks.vision_drafting`: drafters for a tiny target of text and images,
drafted and plain in turn.

A Qwen2.5-VL of four layers learns to describe pictures of coloured squares; then each drafter is
trained on its features by its recipe, and held-out pictures are described. Acceptance and speed
have 95 % intervals over prompts. It needs the repository's tests, whose small processor reads the
pictures.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.small_targets.tiny_training import take_step
from lab.small_targets.train_tiny_targets import (
    collect_pixels,
    cross_entropy,
    load_target,
    make_image_processor,
    make_model,
    make_pictures,
    make_tokenizer,
)
from spectrain.cli.interface import compose_spec, hydra_context
from spectrain.data.chat import Example, tokenize_conversation, tokenize_prompt
from spectrain.data.chat_template import ChatTemplate
from spectrain.data.readers import JsonlReader
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.session import Session, prepare_for_decoding, tune_drafter
from spectrain.eval.intervals import interval
from spectrain.files import write_text
from spectrain.provenance import collect_provenance
from spectrain.runs import train as training
from spectrain.runs.drafters import load_drafter
from spectrain.trees import Chain

from .command import run_benchmark

NAME = "qwen2_5_vl"
HELD_OUT = 40  # pictures that nothing is trained on
VARIANTS = "drafter=prompt_variants drafter.num_layers=1"
ROWS: dict[str, str] = {
    "language only, image tokens kept": f"recipe=gkd {VARIANTS} drafter.variants=[kept]",
    "language only, image tokens dropped": f"recipe=gkd {VARIANTS} drafter.variants=[dropped]",
    "three variants, mean": f"recipe=gkd {VARIANTS}",
    "three variants, recent": f"recipe=gkd {VARIANTS} drafter.weights=recent",
    "eagle3": "recipe=eagle3",
    "pruned images": "recipe=eagle3 drafter=pruned_images drafter.keep=0.25 trainer.lr=4e-3",
    "supernet": "recipe=eagle3 drafter=supernet trainer.lr=4e-3",
}
"""The recipe and drafter of each row; all decode with a chain of four drafts."""


@dataclass
class VisionDrafting:
    """Train the target and the drafters, and write what was measured."""

    # Folder of the target, the pictures and the drafters.
    work: str = "runs/vision"
    # JSON file of the results.
    out: str = "lab/results/vision-drafting.json"
    # Training steps of the target.
    steps: int = 150
    # Training steps of each drafter.
    drafter_steps: int = 60
    # Number of held-out pictures that are described.
    prompts: int = 12
    # Tokens of each answer.
    new_tokens: int = 24

    def run(self) -> None:
        work = Path(self.work).absolute()
        self.pictures = make_pictures(work / "pictures", 240)
        if not (work / NAME / "model.safetensors").exists():
            train_target(work / NAME, self.pictures, self.steps)
        rows = {}
        for name, words in ROWS.items():
            rows[name] = self.measure_row(
                work / NAME, work / "".join(sign if sign.isalnum() else "-" for sign in name), words
            )
            print(name, rows[name], flush=True)
            setting = {key: value for key, value in vars(self).items() if isinstance(value, int)}
            write_text(
                Path(self.out),
                json.dumps({"setting": {**setting, **collect_provenance()}, "rows": rows}, indent=1)
                + "\n",
            )

    def measure_row(self, folder: Path, run: Path, words: str) -> dict[str, Any]:
        """Train one drafter and decode the held-out prompts, plain and drafted in turn."""
        target = load_target(NAME, folder)
        settings = dict(word.split("=", 1) for word in words.split()) | {
            "run": run,
            "target": "hf",
            "target.model": target.path,
            "data": "jsonl",
            "data.path": str(self.pictures),
            "eval": "none",
            "trainer.max_steps": self.drafter_steps,
            "trainer.batch_tokens": 1024,
            "trainer.resume": "auto",
        }
        with hydra_context():
            spec = compose_spec(settings)
        training.train_and_score(spec, target, None)
        drafter = load_drafter(spec, run, target)
        chats = [
            chat.messages[:1]
            for chat in JsonlReader(str(self.pictures)).load_conversations()[:HELD_OUT]
        ]
        prompts = [tokenize_prompt(target.template, chat, target.vision) for chat in chats]
        target.pack_weights()
        prepare_for_decoding(drafter, target)
        tune_drafter(drafter, target, lambda: prompts[self.prompts : self.prompts + 4], 4)
        drafted = Session(target, Greedy(), drafter, Chain(4))
        plain = Session(target, Greedy())
        return summarize_rows(
            [
                compare_prompt(drafted, plain, prompt, self.new_tokens)
                for prompt in prompts[: self.prompts]
            ]
        )


def train_target(folder: Path, pictures: Path, steps: int) -> None:
    """Train the model on the descriptions of pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(True)
    model = make_model(NAME, tokenizer).train()
    images = make_image_processor(model, tokenizer)
    template = ChatTemplate(tokenizer)
    examples: list[Example] = [
        example
        for chat in JsonlReader(str(pictures)).load_conversations()[HELD_OUT:]
        for example in tokenize_conversation(template, chat, images)
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    order = np.random.default_rng(0)
    began = time.monotonic()
    for step in range(steps):
        batch = [examples[index] for index in order.choice(len(examples), 12, replace=False)]
        loss = cross_entropy(
            model, [list(example.tokens) for example in batch], collect_pixels(batch, model)
        )
        take_step(model, optimizer, loss)
        if step % 50 == 49:
            print(
                f"step {step + 1}: {loss.item():.3f} nats, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def compare_prompt(
    drafted: Session, plain: Session, prompt: list[int], new_tokens: int
) -> dict[str, float]:
    """Decode a prompt both ways, and return tokens, rounds and seconds."""
    answers = {}
    for name, session in (("plain", plain), ("drafted", drafted)):
        session.decode([prompt], 4)
        start = time.perf_counter()
        answers[name] = (
            session.decode([prompt], new_tokens, ignore_eos=True)[0],
            time.perf_counter() - start,
        )
    (reference, plain_seconds), (answer, seconds) = answers["plain"], answers["drafted"]
    return {
        "tokens": sum(answer.round_lengths),
        "rounds": len(answer.round_lengths),
        "plain_seconds": plain_seconds,
        "seconds": seconds,
        "identical": answer.output == reference.output,
    }


def summarize_rows(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Return tokens per forward and speedup with their intervals."""

    def ratio(above: str, below: str) -> list[float]:
        columns = np.array([[row[above], row[below]] for row in rows], dtype=np.float64)
        low, high = interval(columns, (1, -1)) or (np.nan, np.nan)
        return [
            round(float(value), 3)
            for value in (columns[:, 0].sum() / columns[:, 1].sum(), low, high)
        ]

    return {
        "acceptance_length": ratio("tokens", "rounds"),
        "speedup": ratio("plain_seconds", "seconds"),
        "identical": sum(bool(row["identical"]) for row in rows),
        "checked": len(rows),
    }


if __name__ == "__main__":
    run_benchmark(VisionDrafting)
