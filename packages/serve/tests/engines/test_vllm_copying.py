"""vLLM runs our copying drafters by `method: custom_class`: the same text as without, and the
rounds of our own decoding, one by one.

What is learned depends on the order of the texts, so vLLM answers one at a time here, in our order.
vLLM also shows the end of a text to the drafter, where our decoding drafts no more: ours is shown
it, too. vLLM counts the rounds that drafted something.
"""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from spectrain.cli.export import export_weightless
from spectrain.config.build import GroupSpec
from spectrain.data.chat import tokenize_prompt
from spectrain.data.datastore import hash_vocabulary, write_store
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter
from spectrain.drafters.retrieval import Retrieval
from spectrain.eval.prompts import read_prompts
from spectrain.models.loading import load_tiny
from spectrain.models.target import Target
from spectrain.trees import Chain

from .clients import Answers, answer_offline
from .test_vllm import PlainAnswers, assert_same

PROMPTS = 8
TOKENS = 64
CASES = {
    "ngram": ("ngram", False),
    "retrieval": ("retrieval", False),
    "retrieval with a store": ("retrieval", True),
}


@dataclass(frozen=True)
class Counts:
    """Rounds that drafted something, their draft tokens, and the accepted ones."""

    rounds: int
    drafted: int
    accepted: int


@pytest.fixture(scope="module")
def target() -> Target:
    return load_tiny(dtype="float32")


@pytest.fixture(scope="module")
def plain(target: Target, tmp_path_factory: pytest.TempPathFactory) -> PlainAnswers:
    """The tiny target, held-out prompts, and vLLM's answers without a drafter."""
    prompts = [
        tokenize_prompt(target.template, prompt.opening_conversation)
        for prompt in read_prompts(None, PROMPTS).prompts
    ]
    folder = tmp_path_factory.mktemp("plain")
    limits = [TOKENS] * len(prompts)
    return PlainAnswers(
        target, prompts, answer_offline(Path(target.path), None, prompts, limits, folder)
    )


@pytest.fixture(scope="module")
def store(plain: PlainAnswers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of every second answer, so that half of the texts are found in it."""
    folder = tmp_path_factory.mktemp("stores") / "store"
    facts = {"tokenizer": hash_vocabulary(plain.target.tokenizer)}
    write_store(folder, plain.plain.tokens[::2], ["q"], ["a"], facts)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_vllm_drafts_what_we_draft(
    case: str,
    plain: PlainAnswers,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the card's command, answers are vLLM's own without a drafter, and as many tokens are
    drafted and accepted as in our decoding, in as many rounds."""
    choice, has_store = CASES[case]
    spec = GroupSpec("drafter", choice, {"store": str(store)} if has_store else {})
    out = export_weightless(spec, "vllm", str(tmp_path / "out"), GroupSpec("target", "tiny"))
    command = re.search(r"^PYTHONPATH=.*$", (out / "README.md").read_text(), re.MULTILINE)
    assert command is not None
    path, *words = shlex.split(command[0])
    config: dict[str, Any] = json.loads(words[words.index("--speculative-config") + 1])
    ours = decode_in_turn(plain, spec.build(target=plain.target), config["num_speculative_tokens"])
    limits = [1 + sum(generation.complete_round_lengths) for generation in ours]
    monkeypatch.setenv("PYTHONPATH", path.removeprefix("PYTHONPATH="))
    answers = answer_offline(
        Path(plain.target.path), config, plain.prompts, limits, tmp_path, rows=1
    )
    assert_same(plain, answers.tokens, plain.plain.tokens)
    print(f"{case}: vLLM {count_vllm(answers)}, ours {count_ours(ours)}, {sum(limits)} tokens")
    assert count_vllm(answers) == count_ours(ours)
    assert count_ours(ours).accepted > 50


def decode_in_turn(plain: PlainAnswers, drafter: Drafter, num_tokens: int) -> list[Generation]:
    """Decode every prompt with one drafter, which sees the end of a text as vLLM shows it."""
    generations = []
    for prompt in plain.prompts:
        generation = decode(plain.target, [prompt], Greedy(), TOKENS, drafter, Chain(num_tokens))[0]
        generations.append(generation)
        if isinstance(drafter, Retrieval):
            length = generation.complete_round_lengths[-1]
            end = 1 + sum(generation.complete_round_lengths)
            if not generation.is_cut:
                drafter.copying.estimator.update_counts(
                    drafter.copying.proposals[0], generation.output[end - length : end]
                )
    return generations


def count_ours(generations: list[Generation]) -> Counts:
    rounds = [
        (length, depth)
        for generation in generations
        for length, depth in zip(generation.complete_round_lengths, generation.depths)
        if depth
    ]
    return Counts(
        len(rounds), sum(depth for _, depth in rounds), sum(length - 1 for length, _ in rounds)
    )


def count_vllm(answers: Answers) -> Counts:
    assert answers.counts is not None
    counts = answers.counts
    return Counts(counts.num_rounds, counts.num_drafted, sum(counts.accepted_by_position))
