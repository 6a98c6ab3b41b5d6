"""Encoder-decoder targets against transformers: features, trees over the cache, `generate`, and
drafters over them.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from packages.research.tests.ideas.encoder_models import KINDS, SOUND, save_model
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter, TrainingState
from spectrain.drafters.causal import Causal
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest
from spectrain.features.live_source import LiveSource
from spectrain.models.features import Features
from spectrain.models.reference_model import generate, reference_model
from spectrain.trees import Chain, Eagle2
from spectrain.trees.token_tree import TokenTree
from spectrain_research.encoder_decoder.loading import (
    check_encoder_decoder,
    load_encoder_decoder,
    make_target,
)
from spectrain_research.encoder_decoder.target import EncoderDecoderTarget

LIMIT = 20


@pytest.fixture(scope="module", params=KINDS)
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> EncoderDecoderTarget:
    """A random model, saved and loaded."""
    return load_encoder_decoder(
        str(save_model(request.param, tmp_path_factory.mktemp(request.param)))
    )


@pytest.fixture(scope="module")
def prompts(target: EncoderDecoderTarget) -> list[list[int]]:
    """Return sources of unequal length, one with two tokens of the decoder."""
    pair = [target.model.boundary.end, target.model.boundary.start]
    sources: list[list[int]] = [[5, 7, 9, 11, 9], [40, 50, 60], [70, 71]]
    if not target.model.reader.reads_tokens:
        names = [str(Path(target.path) / SOUND.format(number)) for number in range(3)]
        sources = [target.tokenizer(name)["input_ids"] for name in names]
    return [sources[0] + pair, sources[1] + pair, [*sources[2], *pair, 30, 31]]


@pytest.fixture(scope="module")
def outputs(target: EncoderDecoderTarget, prompts: list[list[int]]) -> list[list[int]]:
    with reference_model(target) as model:
        return [generate(model, prompt, LIMIT, target.stop_ids) for prompt in prompts]


def test_decoding_equals_generate(
    target: EncoderDecoderTarget, prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    """Plain, with copies in chains and with an untrained EAGLE-3 in trees, in a ragged batch and
    alone.
    """
    assert len({token for output in outputs for token in output}) > 3
    eagle = Eagle3(target, vocab_size=256, ttt_steps=2).eval()
    eagle.prepare(target, torch.arange(target.head.vocab_size))
    for drafter, builder in ((None, None), (Ngram(target), Chain(3)), (eagle, Eagle2(3, 8, 3))):
        decoded = decode(target, prompts, Greedy(), LIMIT, drafter, builder)
        assert [row.output for row in decoded] == outputs
    assert (
        decode(target, prompts[2:], Greedy(), LIMIT, Ngram(target), Chain(3))[0].output
        == outputs[2]
    )


def test_features_and_trees_equal_the_model(
    target: EncoderDecoderTarget, prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    """Logits of full texts, packed or padded, are the model's; then at all nodes of a tree with a
    wrong branch, before and after a commit."""
    texts = [prompt + output for prompt, output in zip(prompts, outputs)]
    with reference_model(target) as model:
        logits = [model(torch.tensor([text])).logits[0] for text in texts]
        states = [decoder_states(target, text) for text in texts]
    packed = target.features(
        torch.tensor([[token for text in texts for token in text]]),
        (1, "final"),
        tuple(map(len, texts)),
    )
    longest = max(map(len, texts))
    padded = target.features(
        torch.tensor([text + [0] * (longest - len(text)) for text in texts]), (1, "final")
    )
    pieces = packed.hidden[0].split([*map(len, texts)])
    for row, (text, piece) in enumerate(zip(texts, pieces)):
        start = target.model.boundary.find(text)
        assert torch.allclose(padded.hidden[row, : len(text)], piece, atol=1e-5)
        assert torch.allclose(target.head.logits(piece[start:, 1]), logits[row][start:], atol=2e-4)
        assert torch.allclose(piece[start:, 0], states[row], atol=1e-5)
    cache = target.new_cache(1, 64)
    text = texts[0]
    target.prefill(torch.tensor([prompts[0]]), torch.tensor([len(prompts[0])]), cache, ())
    nodes = [*outputs[0][:2], 77, outputs[0][2]]
    parents = [-1, 0, 0, 1]
    length = len(prompts[0])
    tree = target.verify(
        TokenTree.from_parents(torch.tensor([nodes]), torch.tensor([parents])), cache
    ).logits
    assert tree is not None and torch.allclose(
        tree[0, [0, 1, 3]], logits[0][length : length + 3], atol=2e-4
    )
    cache.commit(torch.tensor([[0, 1, 3]]), torch.tensor([3]))
    rest = target.verify(TokenTree.from_chain(torch.tensor([text[length + 3 :]])), cache).logits
    assert rest is not None and torch.allclose(rest[0], logits[0][length + 3 :], atol=2e-4)


def decoder_states(target: EncoderDecoderTarget, text: list[int]) -> Any:
    """Return the inputs of the second layer of transformers' decoder."""
    inputs: list[Any] = []
    handle = target.layers[1].register_forward_pre_hook(
        lambda module, args: inputs.append(args[0][0])
    )
    with torch.no_grad():
        target.model(torch.tensor([text]))
    handle.remove()
    return inputs[0]


@pytest.mark.parametrize(
    "settings",
    [{"num_layers": 1}, pytest.param({"architecture": {}}, marks=pytest.mark.slow)],
    ids=["cut", "new"],
)
def test_small_model_drafts_and_learns(
    target: EncoderDecoderTarget,
    prompts: list[list[int]],
    outputs: list[list[int]],
    settings: dict[str, Any],
) -> None:
    """A smaller model with an encoder learns, drafts without a change of the output, and is
    built again from its settings.
    """
    if "architecture" in settings:
        settings = {
            "architecture": {
                **target.saved_config.to_diff_dict(),
                "num_decoder_layers": 1,
                "decoder_layers": 1,
            }
        }
    drafter = Causal(target, **settings)
    examples = [
        Example(prompt + output, [False] * len(prompt) + [True] * len(output))
        for prompt, output in zip(prompts, outputs)
    ]
    batch = LiveSource().make_batch(BatchRequest(examples, target, ("final",), packed=True))
    losses = train_drafter(drafter, batch, target, 5)
    assert losses[-1] < 0.9 * losses[0]
    drafter.eval()
    decoded = decode(target, prompts, Greedy(), LIMIT, drafter, Chain(3))
    assert [row.output for row in decoded] == outputs
    again = Causal(target, **drafter.saved.settings)
    again.load_state_dict(drafter.state_dict())


def train_drafter(
    drafter: Drafter, batch: Any, target: EncoderDecoderTarget, steps: int
) -> list[float]:
    """Take steps of Adam and return the loss before each."""
    optimizer = torch.optim.Adam(
        [parameter for parameter in drafter.parameters() if parameter.requires_grad], 3e-3
    )
    losses = []
    for _ in range(steps):
        loss = drafter.loss(batch, target, TrainingState()).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_refused(target: EncoderDecoderTarget, prompts: list[list[int]]) -> None:
    """A prompt without a decoder start, and drafters that run a part of the layers, end with one
    sentence.
    """
    with pytest.raises(UserError, match="decoder start"):
        decode(target, [prompts[0][:-1]], Greedy(), 4)
    model = target.model.model
    if target.model.reader.reads_tokens:
        check_encoder_decoder(target)
    assert make_target(model, target.tokenizer, "again", target.path).stop_ids == target.stop_ids
    assert isinstance(target.features(torch.tensor([prompts[0]]), ("final",)), Features)
    assert Dataset([Example(prompts[0], [False] * len(prompts[0]))], 1, 0, 0).examples
