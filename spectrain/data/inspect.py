"""`spectrain data inspect`: prints one conversation as the trainer reads it, supervised tokens in colour."""

from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from spectrain.config.build import build
from spectrain.errors import UserError

from .chat import tokenize_conversation


def inspect_command(config: DictConfig) -> None:
    """Print one conversation, then a summary of the whole data set."""
    data = build(config.data)
    conversations = data.load_conversations()
    if not 0 <= config.index < len(conversations):
        raise UserError(
            f"index={config.index}: the data holds {len(conversations)} conversations; use 0 to {len(conversations) - 1}"
        )
    target: Any = build(config.target)
    template = data.apply_arguments(target.template)
    tokenizer = target.tokenizer
    console = Console(highlight=False)
    for number, example in enumerate(
        tokenize_conversation(template, conversations[config.index], target.vision, data.train_on)
    ):
        if number:
            console.rule("the next assistant turn is an example of its own")
        text = Text()
        for token, supervised in zip(example.tokens, example.mask):
            text.append(tokenizer.decode([token]), style="bold green" if supervised else "dim")
        console.print(text)
        console.print(f"[bold green]{sum(example.mask)} supervised[/] of {len(example.tokens)} tokens")
    dataset = data.make_dataset(target.template, target.vision)
    console.rule(f"{data.name}")
    console.print(
        f"{dataset.num_conversations} conversations, {len(dataset.examples)} examples, {dataset.num_tokens} tokens, "
        f"{dataset.num_supervised} supervised; {dataset.num_cut} cut to {data.max_length} tokens, "
        f"{dataset.num_dropped} dropped, "
        f"{data.num_left_out} unusable conversations left out"
    )
