"""Train a tiny target whose tokens are codes: of images, of sounds, or of a robot's actions.

    python -m lab.small_targets.make_code_targets images --out runs/images-tiny

One to two minutes on one CPU core. The folder also holds conversations.jsonl, prompts.jsonl and
codebook.safetensors, whose vectors say which codes are alike. Images are noisy grids of 8 x 8
colours after a text such as "red square left"; sounds are frames of notes, each note with eight
codes that sound alike; actions are smooth paths of three joints, in 64 bins each.
"""

import argparse
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lab.small_targets.tiny_training import minimize_loss
from spectrain.models.bundled import load_tiny_tokenizer

# special tokens of the tiny tokenizer
NULL = 0
BEGIN = 1
END = 2
NUM_CODES = 64
GRID = 8
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<|im_start|>{{ "
    "message['content'] }}<|im_end|>{% else %}{{ message['content'] }}{% endif %}{% endfor %}{% "
    "if add_generation_prompt %}<|im_start|>{% endif %}"
)
COLOURS = {
    "red": (3, 0, 0),
    "green": (0, 3, 0),
    "blue": (0, 0, 3),
    "yellow": (3, 3, 0),
    "white": (3, 3, 3),
}
CENTRES = {"left": (2, 3), "right": (5, 3), "top": (3, 2), "bottom": (3, 5), "middle": (3, 3)}
SHAPES = ("square", "disc", "cross")
NOTES = ("do", "re", "mi", "fa", "sol", "la", "ti", "pause")
NOTE_COUNT = 10
FRAMES = 4
JOINTS = 3
STEPS = 16
SHOWN = 3
Sample = tuple[str, list[int]]
"""A prompt and the codes of its answer."""


def quantize_colour(colour: tuple[float, ...]) -> int:
    """Return the code of a colour with channels from 0 to 3: its place in a cube of 4 x 4 x 4."""
    red, green, blue = (min(3, max(0, round(value))) for value in colour)
    return 16 * red + 4 * green + blue


def draw_image(order: random.Random) -> Sample:
    """Return a text and the codes of its image, row by row: a shape over a dark ground, with
    noise in every cell.
    """
    name = order.choice([*COLOURS])
    shape = order.choice(SHAPES)
    position = order.choice([*CENTRES])
    x, y = CENTRES[position]
    codes = []
    for row in range(GRID):
        for column in range(GRID):
            dx = abs(column - x)
            dy = abs(row - y)
            inside = {
                "square": max(dx, dy) < 2,
                "disc": dx + dy < 3,
                "cross": min(dx, dy) < 1 and dx + dy < 3,
            }[shape]
            base = COLOURS[name] if inside else (0.5, 0.5, 0.5)
            codes.append(quantize_colour(tuple(value + order.gauss(0, 0.35) for value in base)))
    return f"{name} {shape} {position}", codes


def play_notes(order: random.Random) -> Sample:
    """Return notes and their frames: a frame is one of eight codes of its note, of which
    neighbours in time are near.
    """
    note = order.randrange(8)
    notes = []
    codes = []
    for _ in range(NOTE_COUNT):
        note = (note + order.choice((-1, 0, 1, 1))) % 8
        notes.append(NOTES[note])
        phase = order.randrange(8)
        for _ in range(FRAMES):
            codes.append(8 * note + phase)
            phase = (phase + order.choice((0, 1, 1, 2))) % 8
    return " ".join(notes), codes


def move_arm(order: random.Random) -> Sample:
    """Return an instruction with the first actions, and the bins of the later ones, joint by
    joint.
    """
    shapes = [
        (order.uniform(8, 28), order.uniform(0.15, 0.5), order.uniform(0, 6.28))
        for _ in range(JOINTS)
    ]
    bins = [
        min(
            NUM_CODES - 1,
            max(0, round(32 + size * math.sin(rate * step + phase) + order.gauss(0, 0.4))),
        )
        for step in range(STEPS)
        for size, rate, phase in shapes
    ]
    shown = JOINTS * SHOWN
    return "move " + "".join(f"<c{bin}>" for bin in bins[:shown]), bins[shown:]


def colour_vectors() -> Tensor:
    return torch.tensor(
        [[code // 16, code // 4 % 4, code % 4] for code in range(NUM_CODES)], dtype=torch.float32
    )


def note_vectors() -> Tensor:
    """Return a vector for each code: notes are far apart, and a note's codes lie on a small
    circle.
    """
    angle = torch.arange(NUM_CODES) % 8 * (math.pi / 4)
    return torch.stack([torch.arange(NUM_CODES) // 8 * 4.0, angle.sin(), angle.cos()], dim=1)


def bin_vectors() -> Tensor:
    return torch.arange(NUM_CODES, dtype=torch.float32)[:, None]


KINDS: dict[str, tuple[Callable[[random.Random], Sample], Callable[[], Tensor]]] = {
    "images": (draw_image, colour_vectors),
    "sounds": (play_notes, note_vectors),
    "actions": (move_arm, bin_vectors),
}


def write_samples(folder: Path, samples: list[Sample], held_out: list[Sample]) -> None:
    """Write conversations, whose answers are codes as text, and prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    chats = [
        {
            "messages": [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": "".join(f"<c{code}>" for code in codes)},
            ]
        }
        for prompt, codes in samples
    ]
    prompts = [
        {"id": number, "category": "codes", "turns": [prompt]}
        for number, (prompt, _) in enumerate(held_out)
    ]
    for file, rows in (("conversations.jsonl", chats), ("prompts.jsonl", prompts)):
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_rows(
    samples: list[Sample], tokenizer: Any, first: int
) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of prompts and of answers."""
    return [
        (
            tokenizer(prompt, add_special_tokens=False)["input_ids"],
            [BEGIN, *(first + code for code in codes), END],
        )
        for prompt, codes in samples
    ]


def train(model: Any, rows: list[tuple[list[int], list[int]]], steps: int, lr: float) -> None:
    """Minimise the cross-entropy of the answers; a sixth of the texts lose their prompts, for
    guidance.
    """
    order = random.Random(0)

    def compute_loss() -> torch.Tensor:
        batch = [
            ([NULL] * len(a) if order.random() < 1 / 6 else a, b) for a, b in order.sample(rows, 16)
        ]
        width = max(len(a) + len(b) for a, b in batch)
        tokens = torch.tensor([[*a, *b, *[NULL] * (width - len(a) - len(b))] for a, b in batch])
        labels = torch.tensor(
            [[-100] * (len(a) + 1) + b[1:] + [-100] * (width - len(a) - len(b)) for a, b in batch]
        )
        loss: torch.Tensor = model(tokens, labels=labels, use_cache=False).loss
        return loss

    minimize_loss(model, compute_loss, steps, lr)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    make_sample, make_vectors = KINDS[args.kind]
    torch.manual_seed(0)
    order = random.Random(0)
    tokenizer = load_tiny_tokenizer()
    first = len(tokenizer)
    tokenizer.add_tokens([f"<c{code}>" for code in range(NUM_CODES)])
    tokenizer.chat_template = TEMPLATE
    samples = [make_sample(order) for _ in range(1540)]
    write_samples(args.out, samples[:1500], samples[1500:])
    save_file(
        {"tokens": torch.arange(first, first + NUM_CODES), "vectors": make_vectors()},
        args.out / "codebook.safetensors",
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=END,
            pad_token_id=NULL,
        )
    )
    train(model, make_rows(samples[:1500], tokenizer, first), args.steps, 2e-3)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
