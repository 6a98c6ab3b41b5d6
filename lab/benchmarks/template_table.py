"""What becomes of each kind of row with each chat template: `python -m
lab.benchmarks.template_table` prints Markdown.
"""

from collections import Counter

from lab.pages.render import format_table
from spectrain.data.chat import tokenize_conversation
from spectrain.data.messages import parse_conversation
from spectrain.errors import UserError
from tests.data.chat_templates import SOURCES, make_template
from tests.data.test_templates import ROWS


def describe_row(name: str, row: str) -> str:
    """Return how many tokens a row has and how many carry loss, what is reported, or why it is
    refused.
    """
    unread: Counter[str] = Counter()
    try:
        examples = tokenize_conversation(
            make_template(name), parse_conversation(ROWS[row], "row", unread=unread), unread=unread
        )
    except UserError as error:
        reason = (
            "the template renders no tool call"
            if "tool calls" in str(error)
            else "the template refuses its roles"
        )
        return f"refused: {reason}"
    tokens = sum(len(example.tokens) for example in examples)
    text = f"{sum(sum(example.mask) for example in examples)} of {tokens} tokens"
    notes = sorted({line.split(",")[0] for line in unread})
    return f"{text}; reported: {', '.join(notes)}" if notes else text


def main() -> None:
    rows = ([row, *(describe_row(name, row) for name in SOURCES)] for row in ROWS)
    print(format_table(("row", *SOURCES), rows))


if __name__ == "__main__":
    main()
