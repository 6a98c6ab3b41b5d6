"""Every architecture of transformers either decodes as transformers does, or is refused in a
sentence.

Each case is a small random model in a folder, loaded as a user's is. What is held against the
unmodified model: features and logits of whole texts, logits at every node of random trees over
three rounds of commits, and greedy decoding with copied n-grams and with a random EAGLE-3 drafter,
against `generate`.
"""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.session import Session
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.models.bundled import TINY_DIRECTORY
from spectrain.models.cache_arguments import cache_argument, read_cache
from spectrain.models.features import Layer
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.loading import load_hf, load_tokenizer
from spectrain.models.reference_model import generate, reference_model
from spectrain.trees import Chain, Eagle2
from spectrain.trees.token_tree import TokenTree

from .architectures import VOCAB, auto_class, names, save_small

# whose hidden states come after each layer, not before it
STATES_AFTER = ("mamba", "mamba2", "falcon_mamba")
STEPS_APART = (
    "nemotron_h",
    "zamba2",
)  # whose logits in transformers too differ by up to 5 % when a text is read token by token
IDENTICAL = "identical"
ERROR = "error"
NEW_TOKENS = 24


def save_model(name: str, folder: Path) -> Path:
    save_small(name, folder)
    load_tokenizer(str(TINY_DIRECTORY), False, True).save_pretrained(folder)
    return folder


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCAB, shape)


def largest_difference(actual: Tensor | None, expected: Tensor) -> float:
    """The largest, of what is about 1 in size."""
    assert actual is not None and actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1))


def random_tree(batch: int, num_nodes: int) -> TokenTree:
    parents = (torch.rand(batch, num_nodes) * torch.arange(num_nodes)).long()
    parents[:, 0] = -1
    return TokenTree.from_parents(random_tokens(batch, num_nodes), parents)


@torch.no_grad()
def stepped_after(plain: Any, sequences: list[list[int]], read: int) -> Tensor:
    """Return the same logits of a model that steps otherwise than it reads: the first `read` tokens
    run at once, each other alone."""
    results = []
    for sequence in sequences:
        tokens = torch.tensor([sequence])
        cache = None
        for part in (tokens[:, :read], *tokens[:, read:].split(1, dim=1)):
            output = plain(part, **{cache_argument(plain): cache}, use_cache=True)
            cache = read_cache(output)
        results.append(output.logits[0, -1].float())
    return torch.stack(results)


@torch.no_grad()
def logits_after(plain: Any, sequences: list[list[int]]) -> Tensor:
    """Return the unmodified model's logits after each sequence, [S, V]; sequences of a length
    are run together.
    """
    results: list[Tensor] = [torch.empty(0)] * len(sequences)
    for length in {len(sequence) for sequence in sequences}:
        rows = [row for row, sequence in enumerate(sequences) if len(sequence) == length]
        logits = (
            plain(torch.tensor([sequences[row] for row in rows]), use_cache=False)
            .logits[:, -1]
            .float()
        )
        for row, values in zip(rows, logits):
            results[row] = values
    return torch.stack(results)


class Trial:
    """One architecture, loaded twice."""

    def __init__(self, name: str, folder: Path) -> None:
        self.target = load_hf(str(folder), name, device="cpu")
        self.plain = (
            auto_class(self.target.model.config).from_pretrained(folder, dtype=torch.float32).eval()
        )

    def features(self) -> float:
        """Compare the residual stream entering every layer, the input of the head, and the
        logits.
        """
        tokens = random_tokens(2, 20)
        with torch.no_grad():
            states = self.plain(tokens, output_hidden_states=True, use_cache=False)
        several = not self.target.architecture.has_single_stream
        count = self.target.num_layers
        first = 1 if self.target.config.model_type in STATES_AFTER else 0
        layers: tuple[Layer, ...] = (
            ("final",) if several else (*range(first, first + count), "final")
        )
        outputs = self.target.run(tokens, ForwardPlan(layers=layers, logits=True))
        expected = () if several else states.hidden_states
        gaps = [
            largest_difference(outputs.hidden[:, :, layer], state)
            for layer, state in enumerate(expected)
        ]
        return max([*gaps, largest_difference(outputs.logits, states.logits.float())])

    def trees(self) -> float:
        return max(self.tree_rounds([21]), self.tree_rounds([5, 18, 9]))

    def tree_rounds(self, lengths: list[int]) -> float:
        """Run prompts, then three rounds of verify and commit; compare every node with the text
        that leads to it.
        """
        prompts = random_tokens(len(lengths), max(lengths))
        batch = len(lengths)
        texts = [prompt[:length].tolist() for prompt, length in zip(prompts, lengths)]
        cache = self.target.new_cache(batch, 64)
        outputs = self.target.prefill(prompts, torch.tensor(lengths), cache, ())
        assert outputs.logits is not None
        gaps = [largest_difference(outputs.logits[:, 0], logits_after(self.plain, texts))]
        for num_nodes in (9, 1, 7):
            tree = random_tree(batch, num_nodes)
            sequences = [
                text + row[ancestors[node]].tolist()
                for text, row, ancestors in zip(texts, tree.tokens, tree.ancestors)
                for node in range(num_nodes)
            ]
            outputs = self.target.verify(tree, cache)
            gaps.append(
                largest_difference(
                    outputs.logits,
                    self.expected_logits(sequences, lengths).view(batch, num_nodes, -1),
                )
            )
            counts = tree.ancestors[:, -1].sum(1)
            path = (~tree.ancestors[:, -1]).long().argsort(dim=1, stable=True)
            cache.commit(path, counts)
            texts = [
                text + row[accepted].tolist()
                for text, row, accepted in zip(texts, tree.tokens, tree.ancestors[:, -1])
            ]
        return max(gaps)

    def expected_logits(self, sequences: list[list[int]], lengths: list[int]) -> Tensor:
        """Return the logits after each of the sequences, of which each prompt of these lengths
        has equally many.
        """
        if self.target.config.model_type not in STEPS_APART:
            return logits_after(self.plain, sequences)
        each = len(sequences) // len(lengths)
        parts = zip(
            lengths, (sequences[start : start + each] for start in range(0, len(sequences), each))
        )
        return torch.cat([stepped_after(self.plain, part, length) for length, part in parts])

    def ngram(self) -> float:
        return self.count_differences(Session(self.target, Greedy(), Ngram(self.target), Chain(3)))

    def eagle3(self) -> float:
        drafter = Eagle3(self.target, vocab_size=VOCAB)
        drafter.prepare(self.target, torch.ones(self.target.head.vocab_size, dtype=torch.int64))
        return self.count_differences(Session(self.target, Greedy(), drafter, Eagle2(3, 8)))

    def count_differences(self, session: Session) -> float:
        """Count how many of two prompts are continued otherwise than by `generate`."""
        prompts = [(random_tokens(1, length)[0].tolist() * 2) for length in (9, 6)]
        generations = session.decode(prompts, NEW_TOKENS)
        expected = [
            generate(self.plain, prompt, NEW_TOKENS, self.target.stop_ids) for prompt in prompts
        ]
        with reference_model(self.target) as plain:  # what the identity check holds outputs against
            checked = [
                generate(plain, prompt, NEW_TOKENS, self.target.stop_ids) for prompt in prompts
            ]
        return float(
            sum(
                not generation.output == output == reference
                for generation, output, reference in zip(generations, expected, checked)
            )
        )


CHECKS: dict[str, Callable[[Trial], float]] = {
    "features": Trial.features,
    "trees": Trial.trees,
    "ngram": Trial.ngram,
    "eagle3": Trial.eagle3,
}


def run_check(act: Callable[[], float]) -> str:
    """Return `identical`, the size of the error, the sentence that refuses it, or where it
    broke.
    """
    torch.manual_seed(0)
    try:
        gap = act()
    except UserError as error:
        return f"refused: {error}"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"{ERROR}: {type(error).__name__} {error} ({Path(frame.filename).name}:{frame.lineno})"
        )
    return IDENTICAL if gap < 1e-4 else f"wrong by {gap:.2g}"


def outcomes(name: str, folder: Path) -> dict[str, str]:
    """Return the result of each check, or that of loading where loading ends it."""
    save_model(name, folder)
    trials: list[Trial] = []

    def load() -> float:
        trials.append(Trial(name, folder))
        return 0.0

    loaded = run_check(load)
    if not trials:
        return {"loading": loaded}
    return {check: run_check(lambda: run(trials[0])) for check, run in CHECKS.items()}  # noqa: B023


PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
SAMPLE = ("gpt_oss", "deepseek_v3", "gemma4_text", "llama4_text", "doge", "qwen3_vl", "qwen3_next")


def row(name: str, results: dict[str, str]) -> str:
    """A line of the page's table."""
    refusal = next(
        (
            result.removeprefix("refused: ")
            for result in results.values()
            if result.startswith("refused")
        ),
        None,
    )
    where = " ".join(check for check, result in results.items() if result == IDENTICAL)
    why = "" if refusal is None else refusal.split(": ", 1)[1].split("; ")[0].split(", so")[0]
    return (
        f"| {name} | "
        f"{'identical' if len(where.split()) == len(CHECKS) else where or 'refused'} | {why} |"
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.slow) for name in names()],
)
def test_a_target_decodes_as_transformers_does_or_is_refused(name: str, tmp_path: Path) -> None:
    """Nothing is wrong in silence, nothing ends in a traceback, and the page has these results."""
    results = outcomes(name, tmp_path)
    assert all(
        result == IDENTICAL or result.startswith("refused: ") for result in results.values()
    ), results
    if f"transformers {transformers.__version__}" in PAGE.read_text():
        assert row(name, results) in PAGE.read_text().splitlines()
