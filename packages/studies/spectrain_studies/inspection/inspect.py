"""`spectrain data inspect`: prints one conversation as the trainer reads it, with a colour for
each kind of token.
"""

from itertools import groupby
from typing import Any

from rich.text import Text

from spectrain.config.build import GroupSpec
from spectrain.data.chat import Example, tokenize_conversation
from spectrain.data.messages import Conversation
from spectrain.data.readers import ConversationReader
from spectrain.errors import UserError
from spectrain.output.console import make_console
from spectrain.output.verbosity import print_json

STYLES = {"content": "green", "reasoning": "cyan", "tool_calls": "magenta", "context": "dim"}


def inspect_command(target: GroupSpec, data: GroupSpec, index: int) -> None:
    """Print one conversation, then a summary of the whole data set."""
    reader: ConversationReader = data.build()
    source, conversation = select_conversation(reader, index)
    model: Any = target.build()
    template = source.apply_arguments(model.template)
    console = make_console(highlight=False)
    console.print(format_legend())
    examples = tokenize_conversation(template, conversation, model.vision, source.train_on)
    for number, example in enumerate(examples):
        if number:
            console.rule("the next assistant turn is an example of its own")
        console.print(format_example(example, model.tokenizer))
        console.print(
            Text()
            .append(f"{sum(example.mask)} supervised", "bold")
            .append(f" of {len(example.tokens)} tokens")
        )
    dataset = reader.make_dataset(model.template, model.vision)
    print_json(
        {
            "index": index,
            "data": reader.name,
            "examples": [describe_example(example) for example in examples],
            "conversations": dataset.num_conversations,
            "num_examples": len(dataset.examples),
            "tokens": dataset.num_tokens,
            "supervised": dataset.num_supervised,
            "cut": dataset.num_cut,
            "dropped": dataset.num_dropped,
            "left_out": reader.num_left_out,
            "duplicates": dict(reader.num_duplicates),
        }
    )
    console.rule(f"{reader.name}")
    console.print(
        f"{dataset.num_conversations} conversations, {len(dataset.examples)} examples, "
        f"{dataset.num_tokens} tokens, {dataset.num_supervised} supervised; {dataset.num_cut} cut "
        f"to {reader.max_length} tokens, {dataset.num_dropped} dropped, {reader.num_left_out} "
        "unusable conversations left out"
        + "".join(
            f", {count} {kind} duplicates left out"
            for kind, count in sorted(reader.num_duplicates.items())
        )
    )
    for line in [*dataset.source_lines, *dataset.unread_lines()]:
        console.print(line, markup=False, soft_wrap=True)


def describe_example(example: Example) -> dict[str, Any]:
    """Return the tokens of an example, with the kind and the loss mask of each."""
    return {
        "tokens": [*example.tokens],
        "kinds": [*example.kind_names],
        "supervised": [bool(loss) for loss in example.mask],
    }


def select_conversation(
    reader: ConversationReader, index: int
) -> tuple[ConversationReader, Conversation | Example]:
    """Return the conversation of this number, counted over all sources, and the reader of its
    source.
    """
    conversations = reader.load_conversations()
    if not 0 <= index < len(conversations):
        raise UserError(
            f"index={index}: the data holds {len(conversations)} conversations; use 0 to "
            f"{len(conversations) - 1}"
        )
    sources = [
        source.reader
        for source in reader.list_sources()
        for _ in source.reader.load_conversations()
    ]
    return sources[index], conversations[index]


def format_legend() -> Text:
    """Return the names of the kinds in their colours."""
    legend = Text()
    for kind, style in STYLES.items():
        legend.append(kind.replace("_", " "), style=style).append("  ")
    return legend.append("generated, without loss", style="underline")


def format_example(example: Example, tokenizer: Any) -> Text:
    """Return the text of an example, coloured by kind; what is generated and carries no loss is
    underlined.
    """
    text = Text()
    for style, pairs in groupby(
        zip(example.tokens, token_styles(example)), key=lambda pair: pair[1]
    ):
        text.append(
            tokenizer.decode([token for token, _ in pairs], clean_up_tokenization_spaces=False),
            style=style,
        )
    return text


def token_styles(example: Example) -> list[str]:
    """Return the style of each token."""
    pairs = zip(example.kind_names, example.mask)
    return [STYLES[kind] + " underline" * (kind != "context" and not loss) for kind, loss in pairs]
