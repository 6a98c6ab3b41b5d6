"""ViSpec: images are compressed to a few vectors, in training as in decoding."""

from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.data.chat import tokenize_conversation, tokenize_prompt
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.session import Session
from spectrain.drafters.base import TrainingState
from spectrain.drafters.eagle1 import Eagle1
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from spectrain.trees.base import Prefix
from spectrain.trees.rollout import Rollout
from spectrain.trees.token_tree import TokenTree
from spectrain_research.vispec.drafter import ViSpec, ViSpecConfig, list_mle
from spectrain_research.vispec.images import ImageAdaptor, ImageSpans
from tests.factories import add_noise, random_batch
from tests.models.visions import make_question, picture, seeing_target

QUERIES = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return seeing_target("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("pictures")
    first = picture(folder, 1)
    second = picture(folder, 2, (56, 112))
    questions = [
        make_question("What is this?", first),
        make_question(first, "and", second, "Which?"),
        [{"role": "user", "content": "Hello"}],
    ]
    return [
        [*question, {"role": "assistant", "content": "A house by the sea."}]
        for question in questions
    ]


def make_drafter(target: Target) -> ViSpec:
    torch.manual_seed(3)
    drafter = ViSpec(target, ViSpecConfig(num_queries=QUERIES))
    drafter.prepare(target, torch.ones(target.head.vocab_size, dtype=torch.int64))
    add_noise(parameter for parameter in drafter.parameters() if parameter.dim() > 1)
    return drafter.eval()


def batch_of(target: Target, drafter: ViSpec, messages: list[Any], packed: bool = False) -> Batch:
    examples = [tokenize_conversation(target.template, part, target.vision)[0] for part in messages]
    return LiveSource().make_batch(BatchRequest(examples, target, drafter.layers, packed))


def test_text_is_read_as_eagle_reads_it(shallow: Target) -> None:
    """At first img_fc passes the feature on, so the layer equals EAGLE's."""
    torch.manual_seed(0)
    drafter = ViSpec(shallow, ViSpecConfig())
    eagle = Eagle1(shallow)
    drafter.prepare(shallow, torch.ones(shallow.head.vocab_size))
    eagle.load_state_dict({name: drafter.state_dict()[name] for name in eagle.state_dict()})
    batch = random_batch(shallow, drafter.layers)
    assert batch.features is not None
    final = batch.features.at_layer("final")
    ours, reference = (module.run_step(batch, final, 0, [])[0] for module in (drafter, eagle))
    torch.testing.assert_close(ours, reference)


@torch.no_grad()
def test_the_order_of_an_images_tokens_is_not_read() -> None:
    adaptor = ImageAdaptor(QUERIES, 4, 32)
    embedded = torch.randn(9, 32)
    torch.testing.assert_close(adaptor(embedded[torch.randperm(9)]), adaptor(embedded))


def test_an_image_leaves_its_last_rows() -> None:
    """An image of four rows and one of three, in two documents, keep their last rows; a shorter
    image is refused.
    """
    is_image = torch.tensor([[0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0]]).bool()
    is_start = torch.tensor([[1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]]).bool()
    spans = ImageSpans.find(is_image, is_start, 2)
    assert spans.remaining[0].tolist() == [
        True,
        False,
        False,
        True,
        True,
        True,
        True,
        False,
        True,
        True,
        True,
        True,
    ]
    assert spans.shorten_lengths((6, 6)) == (4, 5)
    vectors = [
        torch.full((3, 1), value) + torch.tensor([[0.0], [1], [2]]) for value in (10.0, 20.0)
    ]
    with_vectors, previous_vectors = spans.place_vectors(vectors, torch.zeros(1, 12, 1))
    assert with_vectors[0, :, 0].tolist() == [0, 0, 0, 10, 11, 0, 0, 0, 20, 21, 0, 0]
    assert previous_vectors[0, :, 0].tolist() == [0, 0, 0, 0, 0, 12, 0, 0, 0, 0, 22, 22]
    with pytest.raises(UserError, match="use fewer queries"):
        ImageSpans.find(is_image, is_start, 4)


@torch.no_grad()
def test_training_reads_images_as_decoding_does(target: Target, messages: list[Any]) -> None:
    """The log q after the last token of each prompt is the same in training and in drafting,
    whatever images came before.
    """
    drafter = make_drafter(target)
    prompts = [tokenize_prompt(target.template, part[:1], target.vision) for part in messages]
    starts: list[Tensor] = []

    class Recorder(Chain):
        def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
            starts.append(rollout.start()[:, 0])
            return super().expand(prefix, rollout)

    for part, prompt in zip(messages, prompts):
        starts.clear()
        answer = (
            Session(target, Greedy(), drafter, Recorder(2))
            .decode([prompt], 4, ignore_eos=True)[0]
            .output
        )
        batch = batch_of(target, drafter, [part])
        assert batch.features is not None
        # The answer of the conversation begins with another token than the target's.
        batch.tokens[0, len(prompt)] = answer[0]
        states, _ = drafter.run_step(batch, batch.features.at_layer("final"), 0, [])
        torch.testing.assert_close(
            drafter.log_q(states)[:, len(prompt) - 1], starts[0], rtol=1e-3, atol=1e-3
        )


@torch.no_grad()
def test_packed_equals_padded(target: Target, messages: list[Any]) -> None:
    drafter = make_drafter(target)
    totals = [
        drafter.loss(batch_of(target, drafter, messages, packed), target, TrainingState())
        for packed in (False, True)
    ]
    torch.testing.assert_close(totals[0].total, totals[1].total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("builder", [Chain(3), Eagle2(3, 8)], ids=["chain", "eagle2"])
def test_decoding_with_images_equals_generate(
    target: Target, messages: list[Any], builder: Any
) -> None:
    """Decoding alone and in a batch equals `generate`; the drafter's cache holds two rows for
    each image.
    """
    prompts = [tokenize_prompt(target.template, part[:1], target.vision) for part in messages]
    with reference_model(target) as model:
        expected = [generate(model, prompt, 8, target.stop_ids) for prompt in prompts]
    drafter = make_drafter(target)
    assert [
        row.output for row in Session(target, Greedy(), drafter, builder).decode(prompts, 8)
    ] == expected
    row = Session(target, Greedy(), drafter, builder).decode(prompts[1:2], 8)[0]
    assert row.output == expected[1]
    assert drafter.cache is not None
    num_images = sum(token == drafter.placeholder_id for token in prompts[1])
    assert int(drafter.num_skipped[0, 0]) == num_images - 2 * (QUERIES - 1)


def test_the_order_of_a_single_token_has_no_loss() -> None:
    log_p, log_q = (
        torch.randn(4, 6, generator=torch.Generator().manual_seed(n)).log_softmax(-1)
        for n in (1, 2)
    )
    assert not list_mle(log_p, log_q, 1).any()
    order = log_p.topk(3, dim=-1).indices
    for row in range(4):
        scores = log_q[row, order[row]]
        probability = (
            scores.exp() / torch.stack([scores[i:].exp().sum() for i in range(3)])
        ).prod()
        torch.testing.assert_close(list_mle(log_p, log_q, 3)[row], -probability.log())
