"""Prompts of chosen lengths: documents stand before a question, so that a drafter is tested at any
length of text.

A prompt of 4k has 4,096 tokens, those of the chat template included, so its answer begins at
position 4,096. Documents are cut to the token; where the tokenizer joins the cut differently, a
prompt is a token or two shorter.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, islice
from typing import Any, Literal, get_args

from spectrain.data.images import content_text
from spectrain.data.readers import load_embedded
from spectrain.data.text import TextReader
from spectrain.errors import UserError
from spectrain.eval.prompts import Prompt
from spectrain.eval.tasks import reference_of
from spectrain.models.target import Target

ContextMethod = Literal["concatenated", "repeated", "needle"]
"""How documents fill a context: different ones in sequence, one of them again and again, or
different ones with a sentence among them that the question is about."""
DESCRIPTIONS = {
    "concatenated": "different documents in sequence before each question",
    "repeated": "one document, repeated, before each question",
    "needle": (
        "different documents in sequence, with the sentence among them that each question is about"
    ),
}
STRIDE = 37  # documents between the first ones of successive prompts
ATTEMPTS = 24  # cuts that are tried to reach a length exactly
THINGS = (
    "lighthouse",
    "orchard",
    "ferry",
    "archive",
    "workshop",
    "harbor",
    "observatory",
    "bakery",
    "quarry",
    "library",
)


def parse_length(value: int | str) -> int:
    """Return a number of tokens from 4096, "4096" or "4k", where k is 1,024; raise UserError for
    anything else.
    """
    match = re.fullmatch(r"([1-9]\d*)(k?)", str(value).strip().lower())
    if match is None:
        raise UserError(f"eval.context={value}: write a number of tokens, as in 4096 or 4k")
    return int(match[1]) * (1024 if match[2] else 1)


def format_length(tokens: int) -> str:
    """Format a number of tokens, as in 4k for 4,096."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


@dataclass(frozen=True)
class ContextFiller:
    """Documents before questions, in prompts of some lengths in tokens."""

    lengths: tuple[int, ...]
    method: ContextMethod
    # File or folder of the documents; None takes the embedded conversations.
    path: str | None
    # Whether lengths beyond the target's context are left out, because nobody asked for them.
    leaves_out_long: bool = False

    @classmethod
    def parse(
        cls,
        lengths: Sequence[int | str] | int | str | None,
        method: ContextMethod,
        path: str | None,
    ) -> "ContextFiller | None":
        """Return the filler that the settings describe; None without lengths."""
        if method not in get_args(ContextMethod):
            raise UserError(
                f"eval.context_method={method}: choose from {', '.join(get_args(ContextMethod))}"
            )
        if lengths is None:
            return None
        if isinstance(lengths, int | str):
            lengths = (lengths,)
        if not lengths:
            raise UserError(
                "eval.context=[]: name at least one length, as in eval.context=[4k], or leave it "
                "out"
            )
        return cls(tuple(sorted({parse_length(length) for length in lengths})), method, path)

    def describe(self) -> dict[str, Any]:
        """Return how the prompts were made, for summary.json."""
        return {
            "lengths": list(self.lengths),
            "method": self.method,
            "documents": "the embedded conversations" if self.path is None else self.path,
            "description": DESCRIPTIONS[self.method],
        }

    def fit_to(self, target: Target, max_new_tokens: int) -> "ContextFiller":
        """Return the filler without the lengths that leave the target no room for an answer; raise
        UserError for such a length that was asked for, or if there is no other.
        """
        room = target.max_length - max_new_tokens
        lengths = self.lengths
        if self.leaves_out_long:
            lengths = tuple(length for length in lengths if length <= room) or lengths[:1]
        if lengths[-1] > room:
            raise UserError(
                f"eval.context={format_length(lengths[-1])}: {target.name} takes "
                f"{target.max_length} tokens, {max_new_tokens} of them for the answer "
                f"(eval.max_new_tokens); use lengths of up to {max(0, room)}"
            )
        return replace(self, lengths=lengths)

    def fill_prompts(
        self, prompts: Sequence[Prompt], target: Target
    ) -> tuple[list[Prompt], dict[str, int]]:
        """Return every prompt at every length, and how many cannot be made, by reason. A
        prompt's category is its length.
        """
        filled = list[Prompt]()
        skipped = dict[str, int]()
        for length in self.lengths:
            for number, prompt in enumerate(prompts):
                made = self._fill_prompt(prompt, number, length, target)
                if isinstance(made, Prompt):
                    filled.append(made)
                else:
                    skipped[made] = skipped.get(made, 0) + 1
        if not filled:
            raise UserError(
                f"eval.context: no prompt can be extended ({', '.join(skipped)}); use other "
                "prompts or lengths"
            )
        return filled, skipped

    @cached_property
    def _documents(self) -> list[str]:
        """The texts that contexts are made of."""
        if self.path is None:
            chats = load_embedded()
            return [
                "\n".join(content_text(message["content"]) for message in chat.messages)
                for chat in chats
            ]
        texts = (conversation.text for conversation in TextReader(self.path).load_conversations())
        return [text.strip() for text in texts if text and text.strip()]

    def _fill_prompt(
        self, prompt: Prompt, number: int, length: int, target: Target
    ) -> Prompt | str:
        """Return a prompt of this length, or why there is none."""
        is_text = prompt.context.text is not None
        question = prompt.context.text if is_text else next(iter(prompt.turns), None)
        if not isinstance(question, str):
            return "without a question of text alone"
        name = format_length(length)
        prompt = replace(prompt, id=f"{prompt.id} at {name}", category=name, turns=prompt.turns[:1])
        sentence = ""
        if self.method == "needle":
            thing = THINGS[number % len(THINGS)]
            value = 10_000 + (4_211 + 7_919 * number) % 90_000
            sentence = f"The number of the {thing} is {value}."
            question = f"What is the number of the {thing}?"
            prompt = replace(prompt, reference=reference_of({"answer": value}))

        def make_prompt(filler: str) -> Prompt:
            text = f"{insert_sentence(filler, sentence, number)}\n\n{question}"
            if is_text:
                return replace(prompt, context=replace(prompt.context, text=text))
            return replace(prompt, turns=[text])

        def num_tokens(filler: str) -> int:
            return len(make_prompt(filler).tokenize_for(target))

        room = length - num_tokens("")
        if room < 1:
            return f"longer than {name}"
        tokens = list(islice(self._iterate_tokens(number, target), room + ATTEMPTS))
        best = ""
        for cut in propose_cuts(room, len(tokens)):
            filler = str(target.tokenizer.decode(tokens[:cut])).rstrip("\ufffd")
            missing = length - num_tokens(filler)
            if missing == 0:
                return make_prompt(filler)
            if missing > 0 and len(filler) > len(best):
                best = filler
        return make_prompt(best)

    def _iterate_tokens(self, number: int, target: Target) -> Iterator[int]:
        """Yield the tokens of the documents before a prompt, without end."""
        first = STRIDE * number
        documents = self._documents
        for step in count():
            text = documents[(first + (0 if self.method == "repeated" else step)) % len(documents)]
            tokens: list[int] = target.tokenizer(f"{text}\n\n", add_special_tokens=False)[
                "input_ids"
            ]
            target.template.check_embedded(tokens)
            yield from tokens


def propose_cuts(room: int, limit: int) -> Iterator[int]:
    """Yield numbers of tokens near `room` and up to `limit`, the nearest first."""
    yield from (
        cut
        for cut in sorted(range(room - ATTEMPTS, limit + 1), key=lambda cut: abs(cut - room))
        if cut > 0
    )


def insert_sentence(text: str, sentence: str, number: int) -> str:
    """Insert a sentence between two words of a text, at a depth that depends on the prompt's
    number.
    """
    if not sentence:
        return text
    words = text.split(" ")
    depth = round((0.5 + 0.618 * number) % 1 * len(words))
    return " ".join([*words[:depth], sentence, *words[depth:]])
