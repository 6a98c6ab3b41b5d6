"""`spectrain data audit`: prints what a data set holds, what of it is trained on, and what is
wrong with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from spectrain.data.chat import Example
from spectrain.data.chat_template import KINDS, ChatTemplate
from spectrain.data.dataset import is_too_short, make_examples
from spectrain.data.hygiene import DuplicateIndex, list_texts
from spectrain.data.image_processor import ImageProcessor
from spectrain.data.messages import Conversation
from spectrain.data.readers import ConversationReader, DataSource
from spectrain.data.tokens import check_vocabulary
from spectrain.errors import UserError
from spectrain.output.console import make_console
from spectrain.output.verbosity import print_json

from .prompt_index import PromptIndex

SHOWN_REASONS = 5  # of unusable rows, for each source
ROWS = {"conversations": "conversations", "tokens": "tokens", "content": "  content",
    "reasoning": "  reasoning",
        "tool_calls": "  tool calls", "context": "  context", "supervised": "tokens with loss",
        "cut": "cut to max_length",
        "dropped": "without an answer after the cut", "short": "shorter than min_length",
        "exact": "exact duplicates",
        "near": "near duplicates", "contaminated": "share text with a scored prompt",
        "unread": "not used by reader or template", "unusable": "unusable rows"}  # fmt: skip
"""The counts of a source and their names in the table."""
SHARES = {
    **dict.fromkeys((*KINDS, "context", "supervised"), "tokens"),
    **dict.fromkeys(("exact", "near", "contaminated"), "conversations"),
}
"""The count that another one is a share of."""


@dataclass
class SourceAudit:
    """The counts of one source, and the reasons for its unusable rows."""

    name: str
    weight: float = 1.0
    counts: Counter[str] = field(default_factory=Counter)
    # What the rows say and nothing reads, with counts.
    unread: Counter[str] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)
    # The numbers of the prompts that conversations overlap with.
    prompts: set[int] = field(default_factory=set)

    def to_json(self) -> dict[str, Any]:
        """Return the audit in JSON types."""
        return {
            "name": self.name,
            "weight": self.weight,
            **{key: self.counts[key] for key in ROWS},
            "contaminated_prompts": sorted(self.prompts),
            "unread_by_name": dict(sorted(self.unread.items())),
            "reasons": self.reasons[:SHOWN_REASONS],
        }


def audit_command(target: Any, data: Any, prompt_texts: Sequence[str]) -> None:
    """Print the audit of a data set; `prompt_texts` are the prompts of a scoring."""
    reader: ConversationReader = data.build()
    model: Any = target.build()
    prompts = PromptIndex(prompt_texts)
    audits = audit_sources(reader, model.template, model.vision, prompts)
    print_json(
        {
            "sources": [audit.to_json() for audit in audits],
            "total": {key: sum(audit.counts[key] for audit in audits) for key in ROWS},
            "prompts": prompts.num_texts,
        }
    )
    print_audit(audits, prompts.num_texts)


def audit_sources(
    reader: ConversationReader,
    template: ChatTemplate,
    vision: ImageProcessor | None,
    prompts: PromptIndex,
) -> list[SourceAudit]:
    """Audit every source; a duplicate counts for the source that repeats an earlier one."""
    duplicates = DuplicateIndex("near", reader.near_threshold)
    return [
        audit_source(source, template, vision, prompts, duplicates)
        for source in reader.list_sources()
    ]


def audit_source(
    source: DataSource,
    template: ChatTemplate,
    vision: ImageProcessor | None,
    prompts: PromptIndex,
    duplicates: DuplicateIndex,
) -> SourceAudit:
    """Read and tokenize a source as a training does, counting its faults instead of stopping at
    the first.
    """
    reader = source.reader
    audit = SourceAudit(source.name, source.weight)
    template = reader.apply_arguments(template)
    conversations, errors = load_tolerantly(reader)
    audit.reasons += errors
    for number, conversation in enumerate(conversations, 1):
        audit.counts["conversations"] += 1
        if (kind := duplicates.add(conversation)) is not None:
            audit.counts[kind] += 1
        texts = list_texts(conversation) or [
            template.tokenizer.decode(getattr(conversation, "tokens", []))
        ]
        overlap = prompts.find_overlap(texts)
        audit.counts["contaminated"] += bool(overlap)
        audit.prompts |= overlap
        try:
            if isinstance(conversation, Example):
                check_vocabulary(conversation, template.vocab_size)
            examples, num_cut, num_dropped = make_examples(
                template, conversation, reader.max_length, vision, reader.train_on, audit.unread
            )
        except UserError as error:
            audit.reasons.append(
                str(error) if conversation.origin else f"conversation {number}: {error}"
            )
            continue
        audit.counts.update(
            cut=num_cut, dropped=num_dropped, short=is_too_short(examples, reader.min_length)
        )
        for example in examples:
            audit.counts.update(count_kinds(example))
    audit.unread += reader.unread
    audit.counts.update(unread=audit.unread.total(), unusable=len(audit.reasons))
    return audit


def load_tolerantly(
    reader: ConversationReader,
) -> tuple[Sequence[Conversation | Example], list[str]]:
    """Return the conversations of a source with all duplicates, and the errors of its unusable
    rows.
    """
    errors: list[UserError] = []
    reader.row_errors, reader.duplicate_index = (
        errors,
        DuplicateIndex("none", reader.near_threshold),
    )
    try:
        conversations = reader.load_conversations()
    except UserError:
        if not errors:
            raise
        conversations = []
    return conversations, [str(error) for error in errors]


def count_kinds(example: Example) -> Counter[str]:
    """Count the tokens of each kind, all tokens, and those with loss."""
    return Counter(example.kind_names) + Counter(
        tokens=len(example.tokens), supervised=sum(example.mask)
    )


def print_audit(audits: list[SourceAudit], num_prompts: int) -> None:
    """Print one table with a column for each source, then what is not used and the first reasons
    for unusable rows.
    """
    columns = [(audit.name, audit.counts) for audit in audits]
    if len(audits) > 1:
        columns.append(("total", sum((audit.counts for audit in audits), Counter())))
    table = Table(title=None, highlight=False)
    table.add_column("", no_wrap=True)
    for name, _ in columns:
        table.add_column(name, justify="right", overflow="fold")
    if len(audits) > 1:
        table.add_row("times seen in an epoch", *(f"{audit.weight:g}" for audit in audits), "")
    for key, label in ROWS.items():
        table.add_row(label, *(format_count(counts, key) for _, counts in columns))
    console = make_console(highlight=False)
    if not console.is_terminal:
        # A file or a pipe has no width to fit.
        console.width = 40 + 24 * len(columns)
    console.print(table)
    overlapping = set().union(*(audit.prompts for audit in audits))
    console.print(
        f"{len(overlapping)} of {num_prompts} scored prompts share text with a conversation",
        markup=False,
        soft_wrap=True,
    )
    for audit in audits:
        for name, count in sorted(audit.unread.items()):
            console.print(f"{audit.name}: not used: {count} x {name}", markup=False, soft_wrap=True)
        for reason in audit.reasons[:SHOWN_REASONS]:
            console.print(f"unusable: {reason}", markup=False, soft_wrap=True)
        if len(audit.reasons) > SHOWN_REASONS:
            console.print(
                f"{audit.name}: {len(audit.reasons) - SHOWN_REASONS} more unusable rows",
                markup=False,
                soft_wrap=True,
            )


def format_count(counts: Counter[str], key: str) -> str:
    """Format a count, with its share where it is a part of another count."""
    total = counts[SHARES[key]] if key in SHARES else 0
    return f"{counts[key]:,}" + (f" ({counts[key] / total:.1%})" if total else "")
