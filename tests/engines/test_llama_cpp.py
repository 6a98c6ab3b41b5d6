"""llama.cpp serves what we export: the text that it gives without a drafter, and the rounds of our own chain, one by one.

How rounds are compared. Our chain decodes every prompt first, in float32, with the drafter as it is loaded. The limit that the
server is given for a prompt is one token behind the end of our last complete round: it drafts no more than still fits, and
nothing for a last token. The server streams its answers, and the counts beside each token give its rounds. Prompts are token
ids; weights and caches are float32.

`make llama-cpp` installs the engine. The drafters are the shipped one and those of runs/engines-tiny-eagle3, -tiny-gkd,
-tiny-dflash, -tiny-dflash2 and -tiny-dspark, or of the folder that SPECTRAIN_ENGINES_RUNS names; a missing run skips its case.
"""

import asyncio
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from spectrain.cli.export import export_command
from spectrain.data.chat import tokenize_prompt
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.eval.identity import first_difference, logit_gap
from spectrain.eval.prompts import read_prompts
from spectrain.export.converter import read_drafter
from spectrain.export.gguf_model import write_target
from spectrain.export.layouts import detect_layout, read_files
from spectrain.export.measure import load_drafter
from spectrain.export.targets import TargetFiles
from spectrain.models.loading import load_smollm2, load_tiny
from spectrain.models.target import Target
from spectrain.servers.base import Completion, CompletionRequest
from spectrain.servers.commands import DrafterLaunch, EngineLaunch
from spectrain.servers.launch import start_engine
from spectrain.servers.llamacpp import LlamaCppServer
from spectrain.servers.llamacpp_command import LlamaCppSettings, find_program
from spectrain.trees import Chain
from tests.export.gguf_files import Change, change_gguf, change_rows, separate

pytestmark = pytest.mark.skipif(find_program(None) is None, reason="make llama-cpp installs llama.cpp")

RUNS = Path(os.environ.get("SPECTRAIN_ENGINES_RUNS", "runs"))
PROMPTS, TOKENS = 24, 64
# Two logits that differ by less may change places, because llama.cpp adds in another order than torch; texts parted at 0.00017.
TIE = 0.0005
LOADERS = {"smollm2": load_smollm2, "tiny": load_tiny}
CASES = {
    "EAGLE-3, shipped": ("smollm2", "smollm2-eagle3"),
    "EAGLE-3, tiny": ("tiny", "engines-tiny-eagle3"),
    "GKD draft": ("tiny", "engines-tiny-gkd"),
    "DFlash": ("tiny", "engines-tiny-dflash"),
    "DFlash2": ("tiny", "engines-tiny-dflash2"),
    "DSpark": ("tiny", "engines-tiny-dspark"),
}
FAULTS: dict[str, Change] = {
    "queries and keys in transformers' order": lambda keys, tensors: change_rows(tensors, separate, 64),
    "layers one lower": lambda keys, tensors: keys.update({"eagle3.target_layers": [1, 14, 26]}),
    "layers one higher": lambda keys, tensors: keys.update({"eagle3.target_layers": [3, 16, 28]}),
    "the other residual": lambda keys, tensors: keys.update({"eagle3.norm_before_residual": True}),
}


@dataclass(frozen=True)
class Reference:
    """A target, prompts, and our float32 decoding of them."""

    name: str
    target: Target
    prompts: list[list[int]]
    generations: list[Generation]

    @property
    def rounds(self) -> list[list[int]]:
        """Tokens of each complete round."""
        return [generation.complete_round_lengths for generation in self.generations]


@dataclass(frozen=True)
class Case:
    """A drafter's chain, and the launch of the server with its export."""

    reference: Reference
    drafter: DrafterLaunch

    @property
    def lengths(self) -> list[int]:
        """Tokens up to the end of the last complete round."""
        return [1 + sum(rounds) for rounds in self.reference.rounds]

    @property
    def limits(self) -> list[int]:
        """Tokens to request."""
        return [length + 1 for length in self.lengths]


@pytest.fixture(scope="module")
def plain() -> Callable[[str], Reference]:
    """Our decoding without a drafter, by target."""

    @cache
    def decode_plain(name: str) -> Reference:
        target = LOADERS[name](dtype="float32")
        target.pack_weights()
        prompts = [tokenize_prompt(target.template, row.opening_conversation) for row in read_prompts(None, PROMPTS).prompts]
        return Reference(name, target, prompts, decode(target, prompts, Greedy(), TOKENS))

    return decode_plain


@pytest.fixture(scope="module")
def target_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A target as a GGUF file, by its name and the type of its weights."""

    @cache
    def write(name: str, dtype: str = "float32") -> str:
        return str(write_target(TargetFiles(name), tmp_path_factory.mktemp(f"{name}-{dtype}"), dtype))

    return write


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, plain: Callable[[str], Reference], tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, run = CASES[request.param]
    if run.startswith("engines") and not (RUNS / run).exists():
        pytest.skip(f"{RUNS / run}: there is no such run")
    return make_case(plain(name), run if run == "smollm2-eagle3" else str(RUNS / run), tmp_path_factory.mktemp("case"))


def make_case(plain: Reference, run: str, folder: Path) -> Case:
    """Export a drafter, and decode with what was exported, read back."""
    out = export_command(run, "gguf", str(folder / "gguf"), dtype="float32")
    files, target_files = read_files(out), TargetFiles(plain.name)
    layout, checkpoint = detect_layout(files), read_drafter(out, target_files)
    launch = layout.drafter_launches(checkpoint, target_files, str(out))["llamacpp"]
    module = load_drafter(checkpoint, plain.target)
    generations = [
        decode(plain.target, [prompt], Greedy(), TOKENS, module, Chain(launch.num_tokens))[0] for prompt in plain.prompts
    ]
    return Case(replace(plain, generations=generations), launch)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answer(
    target: str, drafter: DrafterLaunch | None, prompts: Sequence[list[int]], limits: Sequence[int], dtype: str = "float32"
) -> list[Completion]:
    """Return the answers of a server that is started for them."""
    settings = LlamaCppSettings(port=free_port(), slots=1, threads=1, max_length=1024)
    launch = EngineLaunch(target, "served", dtype, drafter)

    async def ask(server: LlamaCppServer) -> list[Completion]:
        async with server:
            return [await server.complete(CompletionRequest(prompt, limit)) for prompt, limit in zip(prompts, limits)]

    with start_engine(LlamaCppServer(settings), launch) as engine:
        assert isinstance(engine.server, LlamaCppServer)
        engine.server.check_ready()
        return asyncio.run(ask(engine.server))


def find_same_texts(reference: Reference, answers: Sequence[Completion], lengths: Sequence[int]) -> list[int]:
    """Return the prompts whose answers are ours; another one may part from ours only where the two best logits nearly tie."""
    same = []
    for index, (generation, completion, length) in enumerate(zip(reference.generations, answers, lengths, strict=True)):
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
    return [] if completion.rounds is None else [accepted + 1 for accepted in completion.rounds.accepted]


def count_by_position(rounds: Sequence[Sequence[int]]) -> list[int]:
    """Return how many rounds accepted the draft token at each position."""
    lengths = [length for prompt in rounds for length in prompt]
    return [sum(length > position for length in lengths) for position in range(1, max(lengths, default=1))]


def report(name: str, **numbers: Any) -> None:
    """Print what was measured, which pytest shows with -s."""
    print(json.dumps({"case": name, "prompts": PROMPTS, "tokens": TOKENS, **numbers}))


@pytest.mark.parametrize("name", ["smollm2", "tiny"])
def test_plain_decoding_is_ours(name: str, plain: Callable[[str], Reference], target_file: Callable[..., str]) -> None:
    """Without a drafter, an exported float32 target gives our text, token by token."""
    reference = plain(name)
    answers = answer(target_file(name), None, reference.prompts, [TOKENS] * PROMPTS)
    report(name, same_text=len(find_same_texts(reference, answers, [TOKENS] * PROMPTS)))


def test_rounds_are_those_of_our_chain(
    case: Case, plain: Callable[[str], Reference], target_file: Callable[..., str], request: pytest.FixtureRequest
) -> None:
    """With the exported drafter the text is that of plain decoding, and every round accepts as many tokens as ours."""
    reference = case.reference
    answers = answer(target_file(reference.name), case.drafter, reference.prompts, case.limits)
    rounds = [rounds_of(completion) for completion in answers]
    same = sum(left == right for left, right in zip(rounds, reference.rounds))
    report(request.node.name, rounds=sum(map(len, rounds)), accepted=count_by_position(rounds),
           ours=count_by_position(reference.rounds), prompts_with_the_same_rounds=same)  # fmt: skip
    for index in find_same_texts(plain(reference.name), answers, case.lengths):
        assert rounds[index] == reference.rounds[index]
    assert count_by_position(rounds)[0] >= 50


@pytest.fixture(scope="module")
def shipped(plain: Callable[[str], Reference], tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(plain("smollm2"), "smollm2-eagle3", tmp_path_factory.mktemp("shipped"))


@pytest.mark.parametrize("fault", FAULTS)
def test_seeded_faults_change_rounds(fault: str, shipped: Case, target_file: Callable[..., str], tmp_path: Path) -> None:
    """A fault that acceptance hardly shows changes the rounds of most prompts, and never the text."""
    out = export_command("smollm2-eagle3", "gguf", str(tmp_path / "gguf"), dtype="float32")
    change_gguf(out, FAULTS[fault])
    reference, drafter = shipped.reference, replace(shipped.drafter, path=str(out))
    answers = answer(target_file("smollm2"), drafter, reference.prompts, shipped.limits)
    rounds = [rounds_of(completion) for completion in answers]
    same = sum(left == right for left, right in zip(rounds, reference.rounds))
    report(fault, rounds=sum(map(len, rounds)), accepted=count_by_position(rounds), prompts_with_the_same_rounds=same,
           right=count_by_position(reference.rounds))  # fmt: skip
    find_same_texts(reference, answers, shipped.lengths)
    assert same <= PROMPTS // 4


@pytest.mark.parametrize(("target_type", "drafter_type"), [("bfloat16", "bfloat16"), ("q8_0", "q8_0"), ("q4_0", "q8_0")])
def test_other_types_of_weights(
    target_type: str, drafter_type: str, shipped: Case, target_file: Callable[..., str], tmp_path: Path
) -> None:
    """With rounded weights most texts are those of the engine's own plain decoding, and acceptance is near float32's."""
    out = export_command("smollm2-eagle3", "gguf", str(tmp_path / "gguf"), dtype=drafter_type)
    reference, path = shipped.reference, target_file("smollm2", target_type)
    limits = [TOKENS] * PROMPTS
    without = answer(path, None, reference.prompts, limits, target_type)
    answers = answer(path, replace(shipped.drafter, path=str(out)), reference.prompts, limits, target_type)
    same = sum(left.token_ids == right.token_ids for left, right in zip(answers, without))
    rounds = [rounds_of(completion) for completion in answers]
    lengths, ours = ([length for prompt in group for length in prompt] for group in (rounds, reference.rounds))
    mean, expected = sum(lengths) / len(lengths), sum(ours) / len(ours)
    report(f"{target_type}, drafter {drafter_type}", same_text=same, rounds=len(lengths), accepted=count_by_position(rounds),
           tokens_per_forward=round(mean, 3), ours_in_float32=round(expected, 3))  # fmt: skip
    assert same >= PROMPTS // 2
    assert abs(mean - expected) < 0.1 * expected


@pytest.fixture(scope="module", params=["smollm2", "tiny"])
def tokenizing(request: pytest.FixtureRequest, target_file: Callable[..., str]) -> Iterator[tuple[str, Any]]:
    """The address of a server without a drafter, and our tokenizer of its target."""
    settings = LlamaCppSettings(port=free_port(), slots=1, threads=1, max_length=256)
    with start_engine(LlamaCppServer(settings), EngineLaunch(target_file(request.param), "served", "float32")) as engine:
        yield engine.url.removesuffix("/v1"), TargetFiles(request.param).tokenizer


def test_texts_have_our_tokens(tokenizing: tuple[str, Any]) -> None:
    """The tokenizer in the file splits texts as ours does: numbers, spaces, lines, contractions, accents and special tokens."""
    url, tokenizer = tokenizing
    texts = ["Hello, world! It's 12,345.67 days  and   counting.\n\n\tThe end.", "def f(x):\n    return x + 1  # café, naïve",
             "<|im_start|>user\nWhy? I'll don't<|im_end|>\n", "  leading", "trailing  ", "ÄÖÜ 日本語 🙂"]  # fmt: skip
    for text in texts:
        body = {"content": text, "add_special": False, "parse_special": True}
        tokens = httpx.post(f"{url}/tokenize", json=body, trust_env=False).json()["tokens"]
        assert tokens == tokenizer(text, add_special_tokens=False).input_ids, text
