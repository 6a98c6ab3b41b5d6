"""`spectrain data inspect`: prints one conversation as the trainer reads it, supervised tokens in colour."""

from typing import Any

from rich.console import Console
from rich.text import Text

from spectrain.config.build import GroupSpec
from spectrain.errors import UserError

from .chat import tokenize_conversation


def inspect_command(target: GroupSpec, data: GroupSpec, index: int) -> None:
    """Print one conversation, then a summary of the whole data set."""
    reader = data.build()
    conversations = reader.load_conversations()
    if not 0 <= index < len(conversations):
        raise UserError(f"index={index}: the data holds {len(conversations)} conversations; use 0 to {len(conversations) - 1}")
    model: Any = target.build()
    template = reader.apply_arguments(model.template)
    tokenizer = model.tokenizer
    console = Console(highlight=False)
    for number, example in enumerate(tokenize_conversation(template, conversations[index], model.vision, reader.train_on)):
        if number:
            console.rule("the next assistant turn is an example of its own")
        text = Text()
        for token, supervised in zip(example.tokens, example.mask):
            text.append(tokenizer.decode([token]), style="bold green" if supervised else "dim")
        console.print(text)
        console.print(f"[bold green]{sum(example.mask)} supervised[/] of {len(example.tokens)} tokens")
    dataset = reader.make_dataset(model.template, model.vision)
    console.rule(f"{reader.name}")
    console.print(
        f"{dataset.num_conversations} conversations, {len(dataset.examples)} examples, {dataset.num_tokens} tokens, "
        f"{dataset.num_supervised} supervised; {dataset.num_cut} cut to {reader.max_length} tokens, "
        f"{dataset.num_dropped} dropped, "
        f"{reader.num_left_out} unusable conversations left out"
    )
