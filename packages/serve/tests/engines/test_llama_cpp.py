"""llama.cpp serves what we export: the text that it gives without a drafter, and the rounds of our
own chain, one by one.

How rounds are compared. Our chain decodes every prompt first, in float32, with the drafter as it is
loaded. The limit that the server is given for a prompt is one token behind the end of our last
complete round: it drafts no more than still fits, and nothing for a last token. The server streams
its answers, and the counts beside each token give its rounds. Prompts are token ids; weights and
caches are float32.

Seeded faults are scored as users score a server, by `spectrain eval`, on fewer prompts.

`make llama-cpp` installs the engine. The drafters are the shipped one and those of
runs/engines-tiny-eagle3, -tiny-gkd, -tiny-dflash, -tiny-dflash2 and -tiny-dspark, or of the folder
that SPECTRAIN_ENGINES_RUNS names; `make test-engines` trains them.
"""

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from torch import Tensor

from packages.serve.tests.export.gguf_files import Change, change_gguf, change_rows, separate
from spectrain.cli.export import export_command
from spectrain.data.chat import tokenize_prompt
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.eval.identity import first_difference, logit_gap
from spectrain.eval.prompts import read_prompts
from spectrain.export.converter import read_drafter
from spectrain.export.layouts import detect_layout, read_files
from spectrain.export.measure import load_drafter
from spectrain.export.targets import TargetFiles
from spectrain.models.bundled import find_smollm2
from spectrain.models.loading import load_smollm2, load_tiny
from spectrain.models.target import Target
from spectrain.servers.commands import DrafterLaunch, EngineLaunch
from spectrain.servers.ports import find_free_port
from spectrain.trees import Chain
from spectrain.trees.base import Prefix
from spectrain.trees.rollout import Rollout
from spectrain.trees.token_tree import TokenTree
from spectrain_serve.engines.launch import RunningEngine, start_engine
from spectrain_serve.engines.llamacpp import find_program
from spectrain_serve.engines.llamacpp_command import LlamaCppSettings
from spectrain_serve.engines.llamacpp_server import LlamaCppServer
from spectrain_serve.layouts.gguf_model import write_target
from spectrain_serve.scoring.agreement import list_rounds
from spectrain_serve.scoring.requests import ServedAnswer, ServedRequest
from spectrain_serve.scoring.rounds import to_generation
from spectrain_serve.servers.base import Completion, CompletionRequest

from .faults import check_cause

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_program(None) is None, reason="make llama-cpp installs llama.cpp"),
]

RUNS = Path(os.environ.get("SPECTRAIN_ENGINES_RUNS", "runs"))
PROMPTS = 24
TOKENS = 64
# Two logits that differ by less may change places, because llama.cpp adds in another order than
# torch; texts parted at 0.00017.
TIE = 0.0005
# The same of draft logits: in 755 rounds of the shipped EAGLE-3 one draft token parted, at 0.00048,
# and in 670 of a GKD draft another one, at 0.00056.
DRAFT_TIE = 0.001
LOADERS = {"smollm2": load_smollm2, "tiny": load_tiny}
CASES = {
    "EAGLE-3, shipped": ("smollm2", "smollm2-eagle3"),
    "EAGLE-3, tiny": ("tiny", "engines-tiny-eagle3"),
    "GKD draft": ("tiny", "engines-tiny-gkd"),
    "DFlash": ("tiny", "engines-tiny-dflash"),
    "DFlash2": ("tiny", "engines-tiny-dflash2"),
    "DSpark": ("tiny", "engines-tiny-dspark"),
}
# Fault -> the cause that `spectrain eval` must name, and the change of the drafter's file.
FAULTS: dict[str, tuple[str | None, Change]] = {
    "none": (None, lambda keys, tensors: None),
    "queries and keys in transformers' order": (
        "heads-permuted", lambda keys, tensors: change_rows(tensors, separate, 64)),
    "layers one lower": (
        "layer-ids-off-by-one", lambda keys,
        tensors: keys.update({"eagle3.target_layers": [1, 14, 26]})),
    "layers one higher": (
        "layer-ids-off-by-one", lambda keys,
        tensors: keys.update({"eagle3.target_layers": [3, 16, 28]})),
    "offsets in place of ids": (
        "d2t-as-ids", lambda keys,
        tensors: tensors.update(d2t=tensors["d2t"] - torch.arange(len(tensors["d2t"])))),
    "the other residual": (
        "norm-before-residual-swapped", lambda keys,
        tensors: keys.update({"eagle3.norm_before_residual": True})),
}  # fmt: skip


@dataclass(frozen=True)
class Reference:
    """A target, prompts, and our float32 decoding of them."""

    name: str
    target: Target
    prompts: list[list[int]]
    generations: list[Generation]

    @property
    def rounds(self) -> list[list[int]]:
        """Return the tokens of each complete round."""
        return [generation.complete_round_lengths for generation in self.generations]


@dataclass(frozen=True)
class Case:
    """A drafter's chain, and the launch of the server with its export."""

    reference: Reference
    drafter: DrafterLaunch
    gaps: list[list[list[float]]]
    """Distances of the two best draft logits, by prompt, round and draft token."""

    @property
    def lengths(self) -> list[int]:
        """Return the number of tokens up to the end of the last complete round."""
        return [1 + sum(rounds) for rounds in self.reference.rounds]

    @property
    def limits(self) -> list[int]:
        """Return the numbers of tokens to request."""
        return [length + 1 for length in self.lengths]


class RecordedChain(Chain):
    """A chain that keeps the distance of the two best draft logits of every token that it drafts,
    by round.
    """

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.gaps: list[list[float]] = []

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        gaps: list[float] = []

        def record(draft: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def run(*args: Any) -> Tensor:
                outputs = draft(*args)
                first, second = outputs[0, -1].topk(2).values.tolist()
                gaps.append(first - second)
                return outputs

            return run

        rollout.start = record(rollout.start)  # type: ignore[method-assign]
        rollout.extend = record(rollout.extend)  # type: ignore[method-assign]
        tree = super().expand(prefix, rollout)
        self.gaps.append(gaps)
        return tree


@pytest.fixture(scope="module")
def plain() -> Callable[[str], Reference]:
    """Return our decoding without a drafter, by target."""

    @cache
    def decode_plain(name: str) -> Reference:
        target = LOADERS[name](dtype="float32")
        target.pack_weights()
        prompts = [
            tokenize_prompt(target.template, row.opening_conversation)
            for row in read_prompts(None, PROMPTS).prompts
        ]
        return Reference(name, target, prompts, decode(target, prompts, Greedy(), TOKENS))

    return decode_plain


@pytest.fixture(scope="module")
def target_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Write a target as a GGUF file, by its name and the type of its weights."""

    @cache
    def write(name: str, dtype: str = "float32") -> str:
        return str(
            write_target(TargetFiles(name), tmp_path_factory.mktemp(f"{name}-{dtype}"), dtype)
        )

    return write


@pytest.fixture(scope="module")
def make_case(
    plain: Callable[[str], Reference], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Case]:
    """Export a drafter, and decode with what was exported, read back; by the name in CASES."""

    @cache
    def make(name: str) -> Case:
        target_name, run = CASES[name]
        if run != "smollm2-eagle3":
            run = str(RUNS / run)
            if not Path(run).exists():
                pytest.skip(f"{run}: there is no such run")
        out = export_command(
            run, "gguf", str(tmp_path_factory.mktemp("case") / "gguf"), dtype="float32"
        )
        reference = plain(target_name)
        launch = make_launch(target_name, out)
        module = load_drafter(read_drafter(out, TargetFiles(target_name)), reference.target)
        chains = [RecordedChain(launch.num_tokens) for _ in reference.prompts]
        generations = [
            decode(reference.target, [prompt], Greedy(), TOKENS, module, chain)[0]
            for prompt, chain in zip(reference.prompts, chains)
        ]
        gaps = [chain.gaps for chain in chains]
        return Case(replace(reference, generations=generations), launch, gaps)

    return make


def make_launch(target_name: str, out: Path) -> DrafterLaunch:
    files = TargetFiles(target_name)
    return detect_layout(read_files(out)).drafter_launches(
        read_drafter(out, files), files, str(out)
    )["llamacpp"]


def start_server(
    target: str, drafter: DrafterLaunch | None, dtype: str = "float32"
) -> AbstractContextManager[RunningEngine]:
    settings = LlamaCppSettings(port=find_free_port(), slots=1, threads=1, max_length=1024)
    return start_engine(LlamaCppServer(settings), EngineLaunch(target, "served", dtype, drafter))


def answer(
    target: str,
    drafter: DrafterLaunch | None,
    prompts: Sequence[list[int]],
    limits: Sequence[int],
    dtype: str = "float32",
) -> list[Completion]:
    """Return the answers of a server that is started for them."""

    async def ask(server: LlamaCppServer) -> list[Completion]:
        async with server:
            return [
                await server.complete(CompletionRequest(prompt, limit))
                for prompt, limit in zip(prompts, limits)
            ]

    with start_server(target, drafter, dtype) as engine:
        assert isinstance(engine.server, LlamaCppServer)
        engine.server.check_ready()
        return asyncio.run(ask(engine.server))


def find_same_texts(
    reference: Reference, answers: Sequence[Completion], lengths: Sequence[int]
) -> list[int]:
    """Return the prompts whose answers are ours; another one may part from ours only where the
    two best logits nearly tie.
    """
    same = []
    for index, (generation, completion, length) in enumerate(
        zip(reference.generations, answers, lengths, strict=True)
    ):
        assert completion.token_ids is not None
        position = first_difference(completion.token_ids[:length], generation.output[:length])
        if position is None:
            same.append(index)
        else:
            gap = logit_gap(reference.target, generation.prompt + generation.output[:position])
            assert gap.size < TIE, (index, position, gap)
    assert len(same) >= PROMPTS - 2
    return same


def rounds_of(completion: Completion) -> list[int]:
    """Return the tokens of each round, the bonus token included."""
    return (
        []
        if completion.rounds is None
        else [accepted + 1 for accepted in completion.rounds.accepted]
    )


def count_by_position(rounds: Sequence[Sequence[int]]) -> list[int]:
    """Return how many rounds accepted the draft token at each position."""
    lengths = [length for prompt in rounds for length in prompt]
    return [
        sum(length > position for length in lengths)
        for position in range(1, max(lengths, default=1))
    ]


def report(name: str, **numbers: Any) -> None:
    """Print what was measured, which pytest shows with -s."""
    print(json.dumps({"case": name, "prompts": PROMPTS, "tokens": TOKENS, **numbers}))


@pytest.mark.parametrize("name", ["smollm2", "tiny"])
def test_plain_decoding_is_ours(
    name: str, plain: Callable[[str], Reference], target_file: Callable[..., str]
) -> None:
    """Without a drafter, an exported float32 target gives our text, token by token."""
    reference = plain(name)
    answers = answer(target_file(name), None, reference.prompts, [TOKENS] * PROMPTS)
    report(name, same_text=len(find_same_texts(reference, answers, [TOKENS] * PROMPTS)))


@pytest.mark.parametrize("name", CASES)
def test_rounds_are_those_of_our_chain(
    name: str,
    plain: Callable[[str], Reference],
    make_case: Callable[[str], Case],
    target_file: Callable[..., str],
) -> None:
    """With the exported drafter the text is that of plain decoding, and every round accepts as
    many tokens as ours, up to a round whose first other draft token stands at a near tie of two
    draft logits; at most two prompts have one.
    """
    case = make_case(name)
    reference = case.reference
    answers = answer(target_file(reference.name), case.drafter, reference.prompts, case.limits)
    rounds = [rounds_of(completion) for completion in answers]
    ties = {
        index: find_draft_gap(left, right, gaps)
        for index, (left, right, gaps) in enumerate(zip(rounds, reference.rounds, case.gaps))
        if left != right
    }
    report(
        name,
        rounds=sum(map(len, rounds)),
        accepted=count_by_position(rounds),
        ours=count_by_position(reference.rounds),
        prompts_with_the_same_rounds=PROMPTS - len(ties),
        gaps_of_others=ties,
    )
    same_texts = find_same_texts(plain(reference.name), answers, case.lengths)
    parted = {index: gap for index, gap in ties.items() if index in same_texts}
    assert len(parted) <= 2
    assert all(gap < DRAFT_TIE for gap in parted.values()), parted
    assert count_by_position(rounds)[0] >= 50


def find_draft_gap(
    served: Sequence[int], own: Sequence[int], gaps: Sequence[Sequence[float]]
) -> float:
    """Return the distance of our two best draft logits where the first draft token differs.

    The first round of another length accepted fewer draft tokens in one of two decodings, so the
    next one is another token there.
    """
    position = first_difference([*served], [*own])
    assert position is not None and position < min(len(served), len(own))
    accepted = min(served[position], own[position]) - 1
    return gaps[position][accepted]


@pytest.mark.parametrize("fault", FAULTS)
def test_seeded_faults_are_named(
    fault: str, target_file: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`spectrain eval` compares the rounds of a running server with our chain's, and names the
    fault of its drafter.
    """
    name, change = FAULTS[fault]
    out = export_command("smollm2-eagle3", "gguf", str(tmp_path / "gguf"), dtype="float32")
    target = target_file("smollm2")
    drafter = make_launch("smollm2", out)
    change_gguf(out, change)
    # The score of a shipped drafter is written below the current folder.
    monkeypatch.chdir(tmp_path)
    with start_server(target, drafter) as engine:
        check_cause("llamacpp", engine.url, fault, name)


# Types of the target and of the drafter. Q4_1 is the file that the shipped target is made from,
# served as it is.
@pytest.mark.parametrize(
    ("target_type", "drafter_type"),
    [("q4_1", "float32"), ("q8_0", "q8_0"), ("bfloat16", "bfloat16")],
)
def test_other_types_of_weights(
    target_type: str,
    drafter_type: str,
    make_case: Callable[[str], Case],
    target_file: Callable[..., str],
    tmp_path: Path,
) -> None:
    """With rounded weights most texts are those of the engine's own plain decoding, and it accepts
    as many drafts as our chain.

    Our chain computes in float32, in Q4_1's case with the same weights. The engine rounds
    activations too, so that some texts are others. Up to there, nine in ten rounds are our chain's.
    At each position, the shares of rounds that accept the draft token may differ by twice the
    standard error of the difference of two shares over so many rounds: as much as two equal
    decodings of different texts differ by chance.
    """
    reference = make_case("EAGLE-3, shipped").reference
    drafter = make_launch(
        "smollm2",
        export_command("smollm2-eagle3", "gguf", str(tmp_path / "gguf"), dtype=drafter_type),
    )
    path = str(find_smollm2()) if target_type == "q4_1" else target_file("smollm2", target_type)
    limits = [TOKENS] * PROMPTS
    without = answer(path, None, reference.prompts, limits, target_type)
    answers = answer(path, drafter, reference.prompts, limits, target_type)
    same = sum(left.token_ids == right.token_ids for left, right in zip(answers, without))
    rounds = [rounds_of(completion) for completion in answers]
    shared = [
        count_shared_rounds(left, right) for left, right in zip(reference.generations, answers)
    ]
    counts, own = (np.array(count_by_position(group)[:3]) for group in (rounds, reference.rounds))
    num_rounds, num_own = (sum(map(len, group)) for group in (rounds, reference.rounds))
    shares = counts / num_rounds
    expected = own / num_own
    tolerance = 2 * np.sqrt(expected * (1 - expected) * (1 / num_own + 1 / num_rounds))
    equal_rounds, shared_rounds = (sum(counts) for counts in zip(*shared))
    report(
        f"{target_type}, drafter {drafter_type}",
        texts_of_plain_decoding=same,
        rounds=num_rounds,
        accepted=counts.tolist(),
        own_rounds=num_own,
        own_accepted=own.tolist(),
        shares=shares.round(3).tolist(),
        expected=expected.round(3).tolist(),
        tolerance=tolerance.round(3).tolist(),
        texts_of_ours=sum(
            left.output == right.token_ids for left, right in zip(reference.generations, answers)
        ),
        equal_rounds_of_shared_text=[equal_rounds, shared_rounds],
    )
    assert equal_rounds >= 0.9 * shared_rounds
    assert same >= PROMPTS // 2
    assert (abs(shares - expected) < tolerance).all()


def count_shared_rounds(own: Generation, completion: Completion) -> tuple[int, int]:
    """Return how many complete rounds of our chain a server has too, and how many there are,
    before the first other token.
    """
    generation = to_generation(
        ServedAnswer(ServedRequest("", 0, "", own.prompt), completion), 1, completion.rounds
    )
    served_rounds, own_rounds = list_rounds(generation, own)
    return len(served_rounds & own_rounds), len(own_rounds)


@pytest.fixture(scope="module", params=["smollm2", "tiny"])
def tokenizer_server(
    request: pytest.FixtureRequest, target_file: Callable[..., str]
) -> Iterator[tuple[str, Any]]:
    """Start a server without a drafter; yield its address and our tokenizer of its target."""
    settings = LlamaCppSettings(port=find_free_port(), slots=1, threads=1, max_length=256)
    with start_engine(
        LlamaCppServer(settings), EngineLaunch(target_file(request.param), "served", "float32")
    ) as engine:
        yield engine.url.removesuffix("/v1"), TargetFiles(request.param).tokenizer


def test_texts_have_our_tokens(tokenizer_server: tuple[str, Any]) -> None:
    """The tokenizer in the file splits texts as ours does: numbers, spaces, lines, contractions,
    accents and special tokens.
    """
    url, tokenizer = tokenizer_server
    texts = [
        "Hello, world! It's 12,345.67 days  and   counting.\n\n\tThe end.",
        "def f(x):\n    return x + 1  # café, naïve",
        "<|im_start|>user\nWhy? I'll don't<|im_end|>\n",
        "  leading",
        "trailing  ",
        "ÄÖÜ 日本語 🙂",
    ]
    for text in texts:
        body = {"content": text, "add_special": False, "parse_special": True}
        tokens = httpx.post(f"{url}/tokenize", json=body, trust_env=False).json()["tokens"]
        assert tokens == tokenizer(text, add_special_tokens=False).input_ids, text
