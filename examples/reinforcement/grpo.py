"""GRPO by TRL on the tiny target, with a drafter that learns beside the policy.

    pip install "spectrain-serve[trl]"
    spectrain train recipe=eagle3 target=tiny eval=none
    python examples/reinforcement/grpo.py --run runs/eagle3-tiny --out runs/grpo

The reward falls with the number of different tokens in an answer, so the policy changes fast. Every
line of OUT/drafter/ledger.jsonl is a batch of rollouts or a decision about a candidate.
"""

import argparse
import json
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from spectrain.export.targets import TargetFiles
from spectrain.integrations.trl import DrafterCallback

COLOURS = ["red", "blue", "green", "black", "white", "grey", "brown", "pink"]
THINGS = ["a bee", "tea", "the sea", "a tree", "rain", "bread", "a stone", "a boat"]


def reward_repetition(completion_ids: list[list[int]], **given: object) -> list[float]:
    """Reward answers of few different tokens."""
    return [-len(set(ids)) / len(ids) for ids in completion_ids]


def train_policy(run: Path, out: Path, steps: int) -> None:
    """Train the policy, and print what the drafter did."""
    folder = TargetFiles("tiny").directory
    prompts = [f"Is {thing} ever {colour}?" for colour in COLOURS for thing in THINGS]
    learner = DrafterCallback(run, out / "drafter", every=10, share=0.3, steps=30)
    args = GRPOConfig(
        output_dir=str(out / "policy"),
        max_steps=steps,
        per_device_train_batch_size=32,
        num_generations=4,
        max_completion_length=48,
        learning_rate=5e-4,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        report_to=[],
        save_strategy="no",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=args,
        reward_funcs=reward_repetition,
        train_dataset=Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": prompt}] for prompt in prompts]}
        ),
        processing_class=AutoTokenizer.from_pretrained(folder),
        rollout_func=learner.generate_rollouts,
        callbacks=[learner],
    )
    trainer.train()
    for line in (out / "drafter" / "ledger.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "rollouts":
            print(f"step {event['step']}: {event['tokens_per_forward']:.2f} tokens per forward")
        else:
            print(f"step {event['step']}: {event['event']}, {event.get('reason')}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True, help="run folder of the first drafter")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--steps", type=int, default=40)
    words = parser.parse_args()
    train_policy(words.run, words.out, words.steps)
