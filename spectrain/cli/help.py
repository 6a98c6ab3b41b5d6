"""What `--help` says: examples first, then every key with its default and its meaning, then where results go."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field

from spectrain.errors import UserError, nearest
from spectrain.settings.schema import choice_files, chosen, conf_folders, header, load, schema, settings
from spectrain.settings.signatures import Key

HELP = ("-h", "--help", "help")


@dataclass(frozen=True)
class Command:
    """What a command is for, in a line; examples, each with what it does; where its results go."""

    about: str
    examples: dict[str, str]
    results: str
    flags: dict[str, str] = field(default_factory=dict)


COMMANDS: dict[str, Command] = {
    "train": Command(
        "train a drafter, then score it",
        {
            "recipe=eagle3": "an EAGLE-3 drafter for the default target on the data that ships",
            "recipe=medusa1 target=hf target.model=ORG/NAME data=jsonl data.path=chats.jsonl": "your own target and data",
            "recipe=eagle3 run=runs/NAME trainer.resume=auto": "start, or go on where it was killed",
            "recipe=eagle3 drafter.init=runs/NAME trainer.lr=1e-4": "go on training a drafter, ours or another project's",
            "-m recipe=eagle3,medusa1 trainer.lr=1e-3,2e-3": "a sweep: every combination is a run",
        },
        "runs/RECIPE-TARGET/ or run=DIR: config.yaml, metrics.jsonl, checkpoints/, drafter/, and eval/heldout/ with "
        "summary.json and report.html",
        {"-m": "a run for every combination of values that commas part", "--cfg job": "only show the composed configuration"},
    ),
    "plan": Command(
        "what training takes: memory, disk, arithmetic, hours",
        {
            "recipe=eagle3": "on this machine",
            "recipe=eagle3 target=hf target.model=ORG/NAME plan.device=cuda plan.devices=8 plan.device_gb=80": "on another one",
            "recipe=medusa1 target=tiny --json": "as JSON",
        },
        "printed, and with plan.out=FILE written as JSON",
        {"--json": "print JSON"},
    ),
    "compare": Command(
        "which drafter for this target: recipes trained on one budget, in one table",
        {
            "target=tiny recipes=all run=runs/compare": "train all recipes, score them with the same prompts",
            "runs/eagle3-tiny runs/medusa1-tiny": "finished runs",
        },
        "run=DIR: a run folder for each recipe, and report.html",
    ),
    "eval": Command(
        "score a drafter by decoding: prompts, tree and acceptance rule of your choice",
        {
            "run=runs/NAME": "as at the end of training",
            "run=runs/NAME eval.prompts=prompts.jsonl eval.limit=40": "on your own prompts",
            "run=runs/NAME acceptance=match acceptance.temperature=1.0 eval.name=sampled": "sampled, not greedy",
            "run=runs/NAME eval.sweep=tree eval.name=trees": "which tree is the fastest",
            "drafter=ngram target=tiny": "a drafter that needs no training",
        },
        "run=DIR: DIR/eval/NAME/ with summary.json, samples.jsonl, rounds.parquet and report.html",
    ),
    "chat": Command(
        "talk to the target through a drafter, accepted runs in colour",
        {
            "run=runs/NAME": "with a run, or any drafter directory",
            "run=runs/NAME acceptance=match acceptance.temperature=0.7 tree=chain": "sampled, with another tree",
            "run=runs/NAME 'chat.system=Answer in one sentence.' chat.max_new_tokens=100": "with a system message",
            "drafter=ngram target=tiny --once 'What is a bee?'": "one answer, for a script; or lines on stdin",
        },
        "nothing is written; off a terminal stdout holds the answers alone",
        {"--once TEXT": "answer this and leave"},
    ),
    "data inspect": Command(
        "a conversation as the trainer sees it, supervised tokens in colour",
        {
            "target=tiny": "the first of the data that ships",
            "data=jsonl data.path=chats.jsonl index=3": "the fourth of your own",
        },
        "printed",
    ),
    "data regenerate": Command(
        "answers by the target itself, so that a drafter learns what it will be asked for",
        {
            "data=jsonl data.path=chats.jsonl out=DIR": "by our own engine",
            "target=tiny data.limit=20 out=DIR sampling.temperature=0": "a few, greedily",
            "data=jsonl data.path=chats.jsonl out=DIR writer=openai writer.model=ORG/NAME": "by a server such as vLLM",
            "out=DIR check=true": "which shards are whole",
        },
        "out=DIR: shards of conversations; the same command goes on after a stop, and data=jsonl data.path=DIR reads them",
    ),
    "data store": Command(
        "the target's features on disk, captured once for many trainings",
        {
            "recipe=eagle3 source.path=DIR": "what recipe=eagle3 reads of the default target",
            "recipe=eagle3 target=tiny source.path=DIR source.dtype=int8": "in a quarter of the space",
        },
        "source.path=DIR; spectrain train with the same settings and source=store reads it",
    ),
    "data verify": Command(
        "whether a feature store is whole",
        {"path=DIR": "name what is missing or damaged", "path=DIR drop=true": "and leave it behind, to be captured anew"},
        "printed; status 1 where something is damaged",
    ),
    "bench decode": Command(
        "time of a forward against the number of rows",
        {"target=tiny": "a target here", "recipe=eagle3 target=smollm2": "with what that recipe decodes"},
        "printed",
    ),
    "bench train": Command(
        "training tokens per second, and what takes the time",
        {"recipe=eagle3 target=tiny": "a recipe", "recipe=eagle3 trainer.batch_tokens=2048": "with larger batches"},
        "printed",
    ),
    "bench kernels": Command(
        "kernels against their references",
        {"bench.toy=true": "in seconds", "bench.out=DIR": "and keep the numbers"},
        "printed; with bench.out=DIR as JSON",
    ),
    "bench engine": Command(
        "the decoding engine against its floor",
        {"bench.toy=true": "in seconds", "bench.out=DIR": "and keep the numbers"},
        "printed; with bench.out=DIR as JSON",
    ),
    "bench report": Command(
        "what eval/results holds, against its goals",
        {"": "the results that ship", "bench.results=DIR": "your own"},
        "printed",
    ),
    "export": Command(
        "write a drafter for vllm, sglang, transformers (hf), medusa or peft",
        {
            "run=runs/NAME format=vllm out=DIR": "for vLLM, with a model card that says how to serve it",
            "run=runs/NAME format=hf out=DIR push=ORG/NAME": "and upload it",
        },
        "out=DIR: config.json, model.safetensors, README.md",
    ),
    "convert": Command(
        "from one project's layout to another's",
        {
            "IN OUT --to vllm": "a drafter directory, ours or another project's",
            "IN OUT --to sglang --target tiny": "say its target",
        },
        "OUT",
        {"--to FORMAT": "the layout to write", "--target TARGET": "tiny, smollm2, a directory or a name on the hub"},
    ),
    "lint": Command(
        "what is wrong with a drafter's files, why, and the mend",
        {"DIR": "a drafter directory, ours or another project's", "DIR --target tiny": "against its target"},
        "printed; status 1 where there is an error",
        {"--target TARGET": "tiny, smollm2, a directory or a name on the hub"},
    ),
    "recipes": Command(
        "the recipes, and when to choose which",
        {"": "a line each", "eagle3": "all that is said of one, and its settings"},
        "printed",
    ),
    "doctor": Command(
        "what this machine has, and what is missing",
        {"": "a line each, with the mend", "--json": "one JSON object"},
        "printed; status 1 where something that spectrain train recipe=eagle3 needs is missing",
        {"--json": "print JSON"},
    ),
    "completion": Command(
        "tab completion for bash, zsh or fish",
        {
            "bash": 'eval "$(spectrain completion bash)" in ~/.bashrc',
            "zsh": 'eval "$(spectrain completion zsh)" in ~/.zshrc, after compinit',
            "fish": "spectrain completion fish | source in ~/.config/fish/config.fish",
        },
        "printed: a script for the shell to read",
    ),
}
"""In the order of a project: train, look, serve, find out."""

COMMON = {
    "seed": "the same seed repeats the same random draws",
    "temperature": "of the distribution that is drawn from",
    "top_k": "how many likeliest tokens are looked at; 0 or null: all",
    "top_p": "draw only from the likeliest tokens that hold so much probability together",
    "depth": "drafted tokens on the longest path",
    "budget": "nodes that the target verifies a round, the root included",
    "children": "how a node's children are chosen; drawn ones suit the rules that weigh p against q",
    "loss": "what a draft is trained to match the target's distribution by",
    "vocab_size": "tokens that can be drafted, those that the assistant uses most",
    "num_heads": "heads, each a token further ahead",
    "num_layers": "layers of the drafter, or of each head",
    "head_decay": "weight of each head's loss against the one before it",
    "layers": "of the target, whose features are read; null: early, middle and late",
    "exit_layer": "draft after so many layers of the target; null: chosen for it",
    "rank": "of LoRA's matrices",
    "alpha": "LoRA's scale is alpha / rank",
    "adapt": "how the target is trained: its weights (full), or adapters (lora)",
    "self_distillation": "hold the trained target to its own former distribution",
    "path": "a file or a folder, or where it says so a name on the hub",
    "split": "of the data set",
    "subset": "of the data set",
    "limit": "at most so many, in turn from every category",
    "model": "a name on the hub or a directory in transformers format; a server's own name for it",
    "name": "what it is called in results",
    "dtype": "float32, bfloat16 or float16; auto: bfloat16 on a GPU, float32 on a CPU",
    "device": "cpu, cuda, cuda:1 ..; auto: a GPU where there is one",
    "sharding": "how the processes of a launch hold the weights together",
    "trust_remote_code": "run code that comes with the model",
    "engine": "captured: rounds replayed as CUDA graphs; eager: a loop; auto: captured on a GPU",
    "architecture": "keys of the drafter's own configuration, instead of the target's",
    "max_new_tokens": "the longest answer",
    "batch_size": "prompts decoded together",
    "json": "print JSON",
    "max_length": "tokens that a conversation is cut to",
    "categories": "of the prompts; null: all",
    "calibration_limit": "how many of them",
    "online_lr": "of a drafter that learns while it decodes",
    "online_every": "prompts between two of its steps",
    "online_learn": "what it learns from: corrections of its drafts, whole answers, or replayed drafts (split)",
    "by": "who writes; replay: what the drafter proposed, with what the target made of it",
    "project": "the tracker's project",
    "entity": "the account or team that the project belongs to",
    "mode": "online or offline; null: online where there is an account",
    "window": "columns that guess ahead, side by side",
    "ngram": "length of the n-grams",
    "part": "one of the measurements; null: all",
    "toy": "small sizes, in seconds: whether it runs, not how fast",
    "base_url": "where the server listens",
    "timeout": "seconds that an answer may take",
    "retries": "how often a request is made again",
    "turns": "which answers of a conversation are written anew",
    "shard_size": "conversations of a shard",
    "memory": "rounds that are remembered",
    "out": "where to write",
}
"""What keys mean wherever they appear; what a constructor says of one comes before it."""


def overview() -> str:
    """All commands, a line each."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  spectrain {name:{width}}{command.about}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "spectrain: train drafters for speculative decoding and prove what they gain",
            "",
            "  spectrain train recipe=eagle3 target=tiny       a drafter for a small target that ships: a minute",
            "  spectrain chat run=runs/eagle3-tiny             talk to it",
            "",
            *lines,
            "",
            "Settings are key=value. spectrain COMMAND --help has examples, every key and its default; spectrain --version.",
        ]
    )


def explain(name: str, config: str | None, words: list[str]) -> str:
    """The help of one command; choices and a recipe among its other `words` say whose keys are shown."""
    command = COMMANDS[name]
    parts = [f"spectrain {name}: {command.about}", examples(name, command)]
    if config is not None:
        parts += reference(name, config, words)
    if command.flags:
        parts.append(titled("Flags", listed(command.flags)))
    parts.append(titled("Results", wrapped(command.results, "  ")))
    return "\n\n".join(parts)


def examples(name: str, command: Command) -> str:
    lines = [f"  spectrain {name} {words}".rstrip() + f"\n      {meaning}" for words, meaning in command.examples.items()]
    return titled("Examples", "\n".join(lines))


def reference(name: str, config: str, words: list[str]) -> list[str]:
    """The groups with their choices, and every key."""
    asked, folders = schema(config), conf_folders(words)
    choices, parts = chosen(asked, words), []
    if asked.groups:
        found = []
        for group in sorted(asked.groups, key=lambda group: group != "recipe"):
            files = choice_files(group, folders)
            found.append(f"  {group}={choices.get(group, '')}")
            found.append(listed({choice: first_sentence(header(path)) for choice, path in files.items()}, "    "))
        parts.append(titled("Groups: GROUP=CHOICE, each with what it is now", "\n".join(found)))
    if asked.keys:
        parts.append(titled("Keys: KEY=VALUE", described({key.name: key for key in asked.keys})))
    for group, keys in settings(asked, words).items():
        if keys:
            whose = f" ({group}={choices[group]})" if group in choices and len(choice_files(group, folders)) > 1 else ""
            parts.append(titled(f"{group}.KEY=VALUE{whose}", described({f"{group}.{key.name}": key for key in keys})))
    if "drafter" in asked.groups and "drafter" not in choices:
        parts.append(
            f"The keys of a drafter: spectrain {name} {'recipe=eagle3' if 'recipe' in asked.groups else 'drafter=ngram'} --help"
        )
    return parts


def described(keys: Mapping[str, Key]) -> str:
    """Keys, each with its default and what it means."""
    found = {}
    for name, key in keys.items():
        meaning = meaning_of(key)
        values = " | ".join(key.choices) if key.choices and key.choices != ("true", "false") else ""
        found[f"{name}={'???' if key.default is None else key.default}"] = "; ".join(
            part for part in ("must be given" if key.default is None else "", meaning, values) if part
        )
    return listed(found)


def meaning_of(key: Key) -> str:
    """A line on a key, from where most is said of it."""
    return key.meaning or COMMON.get(key.name) or key.beside


def listed(entries: Mapping[str, str], indent: str = "  ") -> str:
    """Names with what they mean beside them, or below where a name is long."""
    column = min(30, max((len(name) for name in entries), default=0) + 2)
    lines = []
    for name, meaning in entries.items():
        if len(name) + 2 > column and meaning:
            lines += [indent + name, wrapped(meaning, indent + " " * column)]
        else:
            lines.append(wrapped(meaning, indent + " " * column, indent + name.ljust(column)))
    return "\n".join(line.rstrip() for line in lines)


def wrapped(text: str, indent: str, first: str | None = None) -> str:
    width = max(60, min(120, shutil.get_terminal_size((120, 24)).columns))
    opening = indent if first is None else first
    return textwrap.fill(text, width, initial_indent=opening, subsequent_indent=indent, break_on_hyphens=False) or opening


def titled(title: str, body: str) -> str:
    return f"{title}\n{body}"


def first_sentence(text: str) -> str:
    """Up to the first full stop that ends one."""
    end = text.find(". ")
    return text if end < 0 else text[:end]


def advice(text: str) -> str:
    """The sentence that says when to choose a recipe."""
    start = text.find("Choose it")
    return text[start:] if start >= 0 else ""


def recipes(words: list[str]) -> str:
    """What every recipe is for, or all about one."""
    files = choice_files("recipe", conf_folders(words))
    if not words:
        found = {name: f"{first_sentence(header(path))}. {advice(header(path))}".strip() for name, path in files.items()}
        return f"{titled('recipe', listed(found))}\n\nspectrain recipes NAME says more; spectrain compare measures."
    name = words[0].removeprefix("recipe=")
    if name not in files:
        raise UserError(f"recipes {words[0]}: there is no such recipe; {nearest(name, files)}")
    values = {key: value for key, value in load(files[name]).items() if key != "defaults"}
    lines = [f"  {group}.{key}={value}" for group, node in values.items() for key, value in node.items()]
    return f"recipe={name}\n{wrapped(header(files[name]), '  ')}\n\nSettings\n" + "\n".join(lines)


def version() -> str:
    """spectrain's own version."""
    import importlib.metadata

    try:
        return importlib.metadata.version("spectrain")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"
