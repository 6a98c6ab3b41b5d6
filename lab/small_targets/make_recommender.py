"""Make a small recommender: a target whose answers are items, with interactions to train drafters
on and prompts to score.

    python -m lab.small_targets.make_recommender --out runs/recommender [--steps 400]

Every item is a code of three tokens, such as "a3 b1 c6" (a semantic id): a group, a kind within it
and a number. A user stays with a group for some items and walks through its kinds; sometimes
another group follows. A Llama of four layers of width 64 learns the sequences in about a minute on
one core. The folder then holds the target in transformers format, `train.jsonl` and `prompts.jsonl`
(texts), and `items.jsonl` (token ids) for `eval.items`. The script prints how often the next item
of held-out users is among ten beams.

    spectrain train recipe=atspeed target=hf target.model=runs/recommender data=text
    data.path=runs/recommender/train.jsonl spectrain eval run=RUN
    eval.prompts=runs/recommender/prompts.jsonl eval.beams=10
    eval.items=runs/recommender/items.jsonl
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spectrain.files import write_text
from spectrain.models.target import Target
from spectrain_research.beams.items import ItemTrie
from spectrain_research.beams.search import SearchSettings
from spectrain_research.beams.session import BeamSession

GROUPS = 16
KINDS = 8
NUMBERS = 8
NUM_ITEMS = 400
HISTORY = 12
STOP = "<end>"
Item = tuple[int, int, int]


def make_items(draw: random.Random) -> list[Item]:
    """Return the items that exist; the others of all codes do not."""
    codes = [
        (group, kind, number)
        for group in range(GROUPS)
        for kind in range(KINDS)
        for number in range(NUMBERS)
    ]
    return sorted(draw.sample(codes, NUM_ITEMS))


def make_user(items: list[Item], draw: random.Random) -> list[Item]:
    """Return the items that a user takes in turn."""
    history = [draw.choice(items)]
    while len(history) < HISTORY:
        group, kind, _ = history[-1]
        group = group if draw.random() < 0.85 else (group + draw.choice((1, 5))) % GROUPS
        kind = (kind + draw.choice((0, 1, 1, 1))) % KINDS
        near = [item for item in items if item[0] == group and item[1] == kind]
        history.append(
            near[min(int(draw.expovariate(0.9)), len(near) - 1)] if near else draw.choice(items)
        )
    return history


def format_items(history: list[Item]) -> str:
    """Return the text of a history."""
    return " ".join(f"a{group} b{kind} c{number}" for group, kind, number in history)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per part of a code, and a stop token."""
    words = [
        f"{letter}{number}"
        for letter, count in zip("abc", (GROUPS, KINDS, NUMBERS))
        for number in range(count)
    ]
    tokenizer = Tokenizer(
        WordLevel({word: index for index, word in enumerate([STOP, *words])}, unk_token=STOP)
    )
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=STOP, pad_token=STOP)


def train_model(rows: torch.Tensor, vocab_size: int, steps: int) -> LlamaForCausalLM:
    """Train a small Llama on rows [N, T] of tokens, and print the loss per token in nats."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    start = time.perf_counter()
    for step in range(steps):
        batch = rows[torch.randint(len(rows), (48,))]
        loss = model(batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(
                f"step {step + 1}: {float(loss.detach()):.3f} nats per token, "
                f"{time.perf_counter() - start:.0f} s"
            )
    return model.eval()


def measure_hits(target: Target, trie: ItemTrie, histories: list[list[Item]]) -> float:
    """Return how often the last item of a history is among ten beams after the others."""
    session = BeamSession(target, SearchSettings(num_beams=10, max_new_tokens=3, constraint=trie))
    hits = 0
    for history in histories:
        tokens = target.tokenizer(format_items(history))["input_ids"]
        hits += tokens[-3:] in session.decode(tokens[:-3]).hypotheses
    return hits / len(histories)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/recommender"))
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    draw = random.Random(0)
    items = make_items(draw)
    tokenizer = make_tokenizer()
    training = [make_user(items, draw) for _ in range(3000)]
    held_out = [make_user(items, draw) for _ in range(64)]
    model = train_model(
        torch.tensor([tokenizer(format_items(user))["input_ids"] for user in training]),
        len(tokenizer),
        options.steps,
    )
    target = Target(model, tokenizer, "recommender", str(options.out))
    options.out.mkdir(parents=True, exist_ok=True)
    target.save(options.out)
    codes = [tokenizer(format_items([item]))["input_ids"] for item in items]
    files = {
        "train": [{"text": format_items(user)} for user in training],
        "prompts": [
            {"id": str(number), "text": format_items(user[:-1])}
            for number, user in enumerate(held_out)
        ],
        "items": codes,
    }
    for name, rows in files.items():
        write_text(options.out / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    print(
        "the next item is among ten beams for "
        f"{measure_hits(target, ItemTrie(codes), held_out):.0%} of held-out users"
    )


if __name__ == "__main__":
    main()
