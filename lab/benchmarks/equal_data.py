"""`python -m lab.benchmarks.equal_data`: drafters and ways to train them beside their bases, after
the same tokens, on tiny.

Each group has a base and what differs from it by one part: DFlash's relatives (by `spectrain
compare`), the signals of a training that continues, learning while decoding, heads that train the
target too, raw text before answers, several drafters, copies beside a drafter, and lengths of the
text. Every row is trained and scored with several seeds on the same held-out prompts. What was
trained or scored before is not done again, and every row is written at once, so an interrupted run
goes on where it stopped.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from spectrain.cli.main import dispatch_command
from spectrain.data.readers import EmbeddedReader
from spectrain.eval.intervals import interval
from spectrain.files import write_text
from spectrain.models.bundled import TINY_DIRECTORY
from spectrain.provenance import collect_provenance

from .command import list_defaults, run_benchmark
from .systems import names_run

TOKENS = 150_000
"""Training tokens of each of DFlash's relatives."""
TRAINING = [
    "target=tiny",
    "data.max_length=512",
    "trainer.batch_tokens=512",
    "trainer.resume=auto",
    "trainer.save_every=null",
    "eval=none",
]
SCORING = [
    "eval.limit=32",
    "eval.max_new_tokens=48",
    "eval.repeats=1",
    "eval.baselines=[]",
    "eval.oracle=false",
    "eval.report=false",
    "acceptance=greedy",
]
BLOCKS = ("dflash", "dspark", "domino", "xpress", "lilicorr", "jetspec")
START = ["data.limit=null", "trainer.max_steps=300"]
MORE = ["data.limit=null", "trainer.max_steps=100", "trainer.lr=5e-4"]
REPLAY = ["source=generated", "source.by=replay"]
SMALL = (
    "drafter.architecture={model_type:llama,hidden_size:128,intermediate_size:352,"
    "num_hidden_layers:2,num_attention_heads:4}"
)
TEXT = [
    "recipe=gkd",
    SMALL,
    "data=text",
    "data.path=TEXTS",
    "drafter.loss=cross_entropy",
    "trainer.packing=true",
]
RUNS: dict[str, list[str]] = {
    "eagle3": ["recipe=eagle3", *START],
    "eagle3-more": ["recipe=eagle3", "drafter.init=WORK/eagle3", *MORE],
    "eagle3-groups": [
        "recipe=eagle3",
        "drafter.init=WORK/eagle3",
        *MORE,
        "source=generated",
        "source.by=policy",
        "source.group=8",
    ],
    "eagle3-replays": ["recipe=eagle3", "drafter.init=WORK/eagle3", *MORE, *REPLAY],
    "dflash": ["recipe=dflash", *START],
    "dflash-more": ["recipe=dflash", "drafter.init=WORK/dflash", *MORE],
    "dflash-replays": ["recipe=dflash", "drafter.init=WORK/dflash", *MORE, *REPLAY],
    "heads": ["recipe=transformer_heads", *START],
    "heads-full": ["recipe=transformer_heads", "drafter.adapt=full", *START],
    "heads-lora": ["recipe=transformer_heads", "drafter.adapt=lora", *START],
    "answers": ["recipe=gkd", SMALL, *START],
    "text": [*TEXT, "trainer.max_steps=150"],
    "text-answers": [
        "recipe=gkd",
        "drafter.init=WORK/text",
        "data.limit=null",
        "trainer.max_steps=150",
    ],
    "gkd": ["recipe=gkd", *START],
    "owl": ["recipe=owl", "target=hf", "target.model=LONG", *START],
    "eagle3-long": ["recipe=eagle3", "target=hf", "target.model=LONG", *START],
    "half": ["recipe=gkd", SMALL, "data.limit=null", "trainer.max_steps=150"],
}
"""What is trained, by name; WORK is the folder of the seed, TEXTS the file of raw texts, LONG
the target for long texts.
"""
CHAIN = ["tree=chain", "tree.depth=4"]
CHAIN_OF_3 = ["tree=chain", "tree.depth=3"]
TREE = ["tree=eagle2", "tree.depth=4", "tree.budget=16"]
FIXED = ["run=WORK/eagle3", *CHAIN, "eval.limit=64"]
ONLINE = [*FIXED, "eval.online=true", "eval.online_every=4", "eval.online_lr=3e-4"]
SHORT = ["eval.context=[512]", "eval.limit=16"]
LENGTHY = ["eval.context=[4k]", "eval.limit=16"]
EIGHT = ["target=tiny", *CHAIN, "eval.batch_size=8"]


def list_lengths(run: list[str]) -> dict[str, list[str]]:
    """Return the rows of a drafter behind short and long texts."""
    return {"512 tokens": [*run, *CHAIN, *SHORT], "4,096 tokens": [*run, *CHAIN, *LENGTHY]}


GROUPS: dict[str, dict[str, list[str]]] = {
    "blocks": {name: [f"run=WORK/blocks/{name}", *CHAIN] for name in BLOCKS},
    "blocks, trees": {
        **{name: [f"run=WORK/blocks/{name}", *TREE] for name in BLOCKS},
        "jetspec, one pass": [
            "run=WORK/blocks/jetspec",
            "tree=one_pass",
            "tree.depth=4",
            "tree.budget=16",
        ],
    },
    "policy gradients in groups": {
        name: [f"run=WORK/{name}", *CHAIN]
        for name in ("eagle3-more", "eagle3-groups", "eagle3-replays", "eagle3")
    },
    "replays of blocks": {
        name: [f"run=WORK/{name}", *CHAIN] for name in ("dflash-more", "dflash-replays", "dflash")
    },
    "online": {
        "fixed": FIXED,
        "corrections": [*ONLINE, "eval.online_learn=corrections"],
        "split": [*ONLINE, "eval.online_learn=split"],
        "dvi": [*ONLINE, "eval.online_learn=dvi"],
    },
    "joint training": {
        name: [f"run=WORK/{name}", *CHAIN] for name in ("heads", "heads-full", "heads-lora")
    },
    "two stages": {
        name: [f"run=WORK/{name}", *CHAIN] for name in ("answers", "text-answers", "text", "half")
    },
}
"""The rows of each group, the base first: the arguments of `spectrain eval`."""
GROUPS |= {
    "trees of several drafters": {
        "gkd": ["run=WORK/gkd", *TREE],
        "ngram": ["target=tiny", "drafter=ngram", *TREE],
        "union with ngram": [
            "target=tiny",
            "drafter=union",
            "drafter.inner=[ngram,WORK/gkd]",
            *TREE,
        ],
        "union with eagle3": [
            "target=tiny",
            "drafter=union",
            "drafter.inner=[WORK/eagle3,WORK/gkd]",
            *TREE,
        ],
        "cascade": [
            "target=tiny",
            "drafter=cascade",
            "drafter.inner=WORK/gkd",
            "drafter.helper=ngram",
            *TREE,
        ],
        "graph": ["target=tiny", "drafter=graph", "drafter.inner=WORK/gkd", *TREE],
    },
    "copies beside a drafter": {
        "eagle3": ["run=WORK/eagle3", *TREE],
        "hybrid": ["target=tiny", "drafter=hybrid", "drafter.inner=WORK/eagle3", *TREE],
        "respec": ["target=tiny", "drafter=respec", "drafter.inner=WORK/eagle3", *TREE],
        "respec, relaxed": [
            "target=tiny",
            "drafter=respec",
            "drafter.inner=WORK/eagle3",
            *TREE,
            "acceptance=relaxed_copies",
        ],
        "howl": ["target=tiny", "drafter=howl", "drafter.inner=WORK/eagle3", *TREE],
    },
    "phrases behind a draft": {
        "gkd": ["run=WORK/gkd", *CHAIN],
        "ouroboros": ["target=tiny", "drafter=ouroboros", "drafter.inner=WORK/gkd", *CHAIN],
    },
    "depth by a policy": {
        "eagle2": ["run=WORK/eagle3", "tree=eagle2", "tree.depth=5", "tree.budget=16"],
        "radar": ["run=WORK/eagle3", "tree=radar", "tree.policy=WORK/policy.json"],
    },
    "a drafter for each text": {
        "bandit": [
            *EIGHT,
            "drafter=chosen",
            "drafter.by=bandit",
            "drafter.inner=[ngram,WORK/gkd,WORK/eagle3]",
        ],
        "by row": [*EIGHT, "drafter=chosen_by_row", "drafter.inner=[ngram,WORK/gkd,WORK/eagle3]"],
        "gkd": ["run=WORK/gkd", *CHAIN, "eval.batch_size=8"],
        "ngram": [*EIGHT, "drafter=ngram"],
    },
    "owl by length": list_lengths(["run=WORK/owl"]),
    "eagle3 by length": list_lengths(["run=WORK/eagle3-long"]),
    "howl by length": list_lengths(
        ["target=hf", "target.model=LONG", "drafter=howl", "drafter.inner=WORK/owl"]
    ),
}


CLAIMS = (
    "eagle3",
    "dspark",
    "jump",
    "expected_length",
    "dfly",
    "two_stage_head",
    "no_positions",
    "sinks",
    "dflash",
    "dflare",
)
"""Recipes of 2026 whose authors claim more, behind those that they are compared with."""
RUNS |= {
    f"claims/{name}": [f"recipe={name}", "data.limit=320", "trainer.max_steps=100"]
    for name in CLAIMS
}
# The windows of a text of tiny must be short to leave out anything.
RUNS["claims/sinks"] += ["drafter.window=32"]
FEW = ["eval.limit=12", "eval.max_new_tokens=32"]
GROUPS |= {
    "claims": {name: [f"run=WORK/claims/{name}", *CHAIN_OF_3, *FEW] for name in CLAIMS},
    "claims, trees": {name: [f"run=WORK/claims/{name}", *TREE, *FEW] for name in CLAIMS},
}


@dataclass
class EqualDataBench:
    """Train and score what is missing, and write every row beside its base."""

    # Folder of the trained drafters and of the scores.
    work: str = "runs/equal-data"
    # JSON file of the results.
    out: str = "lab/results/equal-data.json"
    # Groups to measure; null measures all.
    groups: tuple[str, ...] | None = None
    # Seeds of the training, each of which trains every row once.
    seeds: tuple[int, ...] = (0, 1)

    def run(self) -> None:
        self.folder, out = Path(self.work).absolute(), Path(self.out)
        self.folder.mkdir(parents=True, exist_ok=True)
        for group in self.groups or GROUPS:
            summaries = [
                [self.score_row(group, name, words, seed) for seed in self.seeds]
                for name, words in GROUPS[group].items()
            ]
            rows = [
                {
                    "name": name,
                    "command": " ".join(["eval", *words, *SCORING]).replace("WORK", "runs"),
                    **entry,
                }
                for (name, words), entry in zip(GROUPS[group].items(), compare_with_base(summaries))
            ]
            groups: dict[str, Any] = json.loads(out.read_text())["groups"] if out.exists() else {}
            setting = {
                "target": "tiny",
                "tokens": TOKENS,
                "seeds": self.seeds,
                "training": TRAINING,
                "runs": RUNS,
                "scoring": SCORING,
                **collect_provenance(),
            }
            write_text(
                out,
                json.dumps({"setting": setting, "groups": {**groups, group: rows}}, indent=1)
                + "\n",
            )

    def score_row(self, group: str, name: str, words: list[str], seed: int) -> Path:
        """Return the folder of a row's score, after training and scoring it."""
        if words[0].startswith("run=WORK/blocks/"):
            self.compare_blocks(seed)
        for run in RUNS:
            if any(names_run(word, run) for word in words):
                self.train(run, seed)
        label = "-".join(
            "".join(sign if sign.isalnum() else " " for sign in f"{group} {name}").split()
        )
        run = words[0].removeprefix("run=WORK/") if words[0].startswith("run=") else "scores"
        folder = self.folder / str(seed) / run / "eval" / label
        if not (folder / "summary.json").exists():
            rest = list_defaults([*SCORING, f"run={self.folder / str(seed) / run}"], words)
            dispatch_command(["eval", *self.fill_words(words, seed), *rest, f"eval.name={label}"])
        return folder

    def compare_blocks(self, seed: int) -> None:
        """Train DFlash and its relatives by one command, `spectrain compare`."""
        folder = self.folder / str(seed) / "blocks"
        if not (folder / "comparison.json").exists():
            settings = [
                word
                for word in (*TRAINING, *SCORING)
                if word.split("=")[0] not in ("eval", "trainer.save_every")
            ]
            budget = [
                f"compare.tokens={TOKENS}",
                "compare.training_free=[]",
                "compare.batch=null",
                f"trainer.seed={seed}",
            ]
            recipes = f"recipes=[{','.join(BLOCKS)}]"
            dispatch_command(
                ["compare", recipes, *budget, *settings, *CHAIN, "data.limit=null", f"run={folder}"]
            )

    def train(self, name: str, seed: int) -> None:
        """Train a drafter, after the one that it starts from."""
        words = RUNS[name]
        for other in RUNS:
            if f"drafter.init=WORK/{other}" in words:
                self.train(other, seed)
        run = self.folder / str(seed) / name
        if not (run / "drafter").exists():
            rest = list_defaults(TRAINING, words)
            dispatch_command(
                [
                    "train",
                    *self.fill_words(words, seed),
                    *rest,
                    f"trainer.seed={seed}",
                    f"run={run}",
                ]
            )

    def fill_words(self, words: list[str], seed: int) -> list[str]:
        """Return arguments with the folder of a seed, the file of raw texts and the target for
        long ones, each written once.
        """
        texts = self.folder / "texts.jsonl"
        long_target = self.folder / "tiny-long"
        if not texts.exists():
            write_text(texts, "".join(json.dumps({"text": text}) + "\n" for text in read_texts()))
        if not long_target.exists():
            write_long_target(long_target)
        names = {"WORK": self.folder / str(seed), "TEXTS": texts, "LONG": long_target}
        for name, path in names.items():
            words = [word.replace(name, str(path)) for word in words]
        return words


def read_texts() -> Iterator[str]:
    """Read the answers of the embedded conversations as raw text, without the template."""
    for conversation in EmbeddedReader().read_conversations():
        yield "\n\n".join(
            message["content"]
            for message in conversation.messages
            if message["role"] == "assistant"
        )


def write_long_target(folder: Path) -> None:
    """Write the tiny target with YaRN's positions (Peng et al., 2023) for texts of up to 8,192
    tokens, without training.
    """
    shutil.copytree(TINY_DIRECTORY, folder)
    config = json.loads((TINY_DIRECTORY / "config.json").read_text())
    length = config["max_position_embeddings"]
    config["rope_parameters"] |= {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": length,
    }
    write_text(
        folder / "config.json",
        json.dumps({**config, "max_position_embeddings": 8 * length}, indent=2) + "\n",
    )


def compare_with_base(rows: list[list[Path]]) -> list[dict[str, Any]]:
    """Return the numbers of every row, from the folders of its seeds, and their ratios to those of
    the first row.

    The interval of a ratio is over prompts, each with the sums of all seeds. `differs` says that it
    excludes 1 and that the ratio of every seed lies on the same side.
    """
    base = [read_columns(folder) for folder in rows[0]]
    entries = []
    for folders in rows:
        columns = [read_columns(folder) for folder in folders]
        entry = summarize_row(folders, columns)
        if folders is not rows[0]:
            entry["tokens_ratio"] = ratio(columns, base, (0, 1), (1, -1))
            entry["speed_ratio"] = ratio(columns, base, (2, 3, 4, 5), (1, -1, -1, 1))
        entries.append(entry)
    return entries


def read_columns(folder: Path) -> np.ndarray:
    """Return, per prompt, tokens and rounds, and tokens and seconds with a drafter and without
    one [P, 6].
    """
    names = (
        "whole_tokens",
        "whole_rounds",
        "tokens",
        "seconds",
        "autoregressive_tokens",
        "autoregressive_seconds",
    )
    rows = [
        row
        for row in pq.read_table(folder / "prompts.parquet").to_pylist()
        if row["system"] == "drafter"
    ]
    return np.array([[row[name] for name in names] for row in rows], dtype=np.float64)


def summarize_row(folders: list[Path], columns: list[np.ndarray]) -> dict[str, Any]:
    """Return tokens per forward and speed over all seeds, and of each seed."""
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    total = np.sum(columns, axis=0)
    lengths = total[:, :2]
    speed = total[:, 2:]
    pooled = speed.sum(0)
    return {
        "acceptance_length": {
            "pooled": round(float(np.divide(*lengths.sum(0))), 4),
            "ci95": interval(lengths, (1, -1)),
        },
        "speedup": {
            "ratio": round(float(pooled[0] / pooled[1] * pooled[3] / pooled[2]), 4),
            "ci95": interval(speed, (1, -1, -1, 1)),
        },
        "by_seed": [summary["acceptance_length"]["pooled"] for summary in summaries],
        "acceptance_by_depth": [summary["acceptance_by_depth"] for summary in summaries],
        "drift": [summary.get("drift") for summary in summaries],
        "target_drift": [summary.get("target_drift") for summary in summaries],
        "lossless": [
            {key: summary["lossless"][key] for key in ("checked", "identical")}
            for summary in summaries
        ],
        "commit": summaries[0]["setting"]["commit"],
    }


def ratio(
    columns: list[np.ndarray], base: list[np.ndarray], used: tuple[int, ...], signs: tuple[int, ...]
) -> dict[str, Any]:
    """Return the ratio of a row's quotient of sums to that of the base, with its interval and
    the ratio of each seed.
    """
    first, second = (np.sum(part, axis=0)[:, used] for part in (columns, base))
    both = np.concatenate([first, second], axis=1), (*signs, *(-sign for sign in signs))
    by_seed = [
        float(quotient(row[:, used], signs) / quotient(other[:, used], signs))
        for row, other in zip(columns, base)
    ]
    ends = interval(*both)
    value = float(quotient(first, signs) / quotient(second, signs))
    is_outside = ends is not None and not ends[0] <= 1 <= ends[1]
    agree = len({part > 1 for part in by_seed}) == 1
    return {
        "ratio": round(value, 4),
        "ci95": ends,
        "by_seed": [round(part, 4) for part in by_seed],
        "differs": is_outside and agree,
    }


def quotient(columns: np.ndarray, signs: tuple[int, ...]) -> float:
    """Return the product of the columns' sums, each to the power of its sign."""
    return float(np.prod(columns.sum(0) ** np.array(signs, dtype=np.float64)))


if __name__ == "__main__":
    run_benchmark(EqualDataBench)
