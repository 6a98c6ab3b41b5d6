"""Drafting for targets of text and images: prompt variants, pruned image tokens and a supernet,
against plain versions.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.data.chat import tokenize_prompt
from spectrain.data.image_processor import get_images
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode, make_request, prefill_context
from spectrain.drafters.base import Drafter
from spectrain.drafters.causal import Causal
from spectrain.drafters.context import Context
from spectrain.drafters.eagle3 import Eagle3
from spectrain.errors import UserError
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, TreeBuilder
from spectrain_research.image_pruning.drafter import PrunedImages
from spectrain_research.prompt_variants.drafter import PromptVariants
from spectrain_research.supernet.drafter import Subnet, Supernet
from tests.models.visions import make_question, picture, seeing_target

LIMIT = 12
SMALL: dict[str, Any] = {
    "architecture": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return seeing_target("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture(scope="module")
def prompts(target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """A picture in the middle, two pictures, and text alone."""
    folder: Path = tmp_path_factory.mktemp("pictures")
    chats = [
        make_question("Look", picture(folder, 1), "What is it?"),
        make_question(picture(folder, 2), picture(folder, 3), "And these?"),
        make_question("No picture."),
    ]
    return [tokenize_prompt(target.template, chat, target.vision) for chat in chats]


@pytest.fixture(scope="module")
def outputs(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    with reference_model(target) as model:
        return [generate(model, prompt, LIMIT, target.stop_ids) for prompt in prompts]


def first_context(
    target: Target, drafter: Drafter, builder: TreeBuilder, prompts: list[list[int]]
) -> Context:
    """The context of the first round."""
    with torch.inference_mode():
        return prefill_context(
            target, Greedy(), make_request(target, prompts, LIMIT), drafter, builder
        )


def test_every_drafter_is_lossless(
    target: Target, prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    """Language-only drafters, variants, pruned images and a supernet, in chains and trees, over
    a ragged batch with images.
    """
    torch.manual_seed(0)
    drafters = [
        (Causal(target, **SMALL), Chain(3)),
        (PromptVariants(target, **SMALL), Eagle2(3, 8, 3)),
        (PromptVariants(target, ["dropped", "kept"], "recent", **SMALL), Chain(3)),
        (PrunedImages(target, 0.3, vocab_size=256), Eagle2(3, 8, 3)),
        (Supernet(target, 2, vocab_size=256, depth=1), Chain(3)),
    ]
    for drafter, builder in drafters:
        assert [
            row.output for row in decode(target, prompts, Greedy(), LIMIT, drafter.eval(), builder)
        ] == outputs


def test_variants_are_averaged(target: Target, prompts: list[list[int]]) -> None:
    """A variant's text is the prompt without its image tokens, or with four of each; q is the
    weighed mean of the model's distributions after the variants, which are run here alone."""
    drafter = PromptVariants(target, ["kept", "dropped", "pooled"], **SMALL).eval()
    context = first_context(target, drafter, Chain(2), prompts)
    image = drafter.placeholder_id
    root = context.root.tolist()
    texts = {
        "kept": [list(prompt) for prompt in prompts],
        "dropped": [[token for token in prompt if token != image] for prompt in prompts],
    }
    pooled = drafter.change_prompt(prompts[0], "pooled")
    assert (
        pooled.count(image) == 4 < prompts[0].count(image)
        and [t for t in pooled if t != image] == texts["dropped"][0]
    )
    with torch.inference_mode():
        rollout = drafter.draft(context).rollout
        assert rollout is not None
        log_q = rollout.start()[:, 0]
        for row, prompt in enumerate(prompts):
            variants = [
                texts["kept"][row],
                texts["dropped"][row],
                drafter.change_prompt(prompt, "pooled"),
            ]
            alone = [
                drafter.log_q(
                    drafter.model.features(torch.tensor([[*text, root[row]]]), ("final",)).at_layer(
                        "final"
                    )
                )[0, -1]
                for text in variants
            ]
            expected = torch.stack(alone).exp().mean(0).log()
            assert torch.allclose(log_q[row], expected, atol=1e-4)
    with pytest.raises(UserError, match="variants"):
        PromptVariants(target, ["other"], **SMALL)


def test_weights_follow_what_was_right(target: Target, prompts: list[list[int]]) -> None:
    """A variant whose likeliest token was right gains weight over one whose was wrong."""
    drafter = PromptVariants(target, ["kept", "dropped"], "recent", **SMALL).eval()
    context = first_context(target, drafter, Chain(2), prompts[:1])
    with torch.inference_mode():
        drafter.draft(context)
        before = drafter._variant_weights()
        drafter.guesses = torch.tensor([[7], [9]])
        length = int(context.lengths[0])
        drafter._record_round([[*context.tokens[0, : length + 1].tolist(), 9]], context)
    after = drafter._variant_weights()
    assert torch.allclose(before, torch.full_like(before, 0.5)) and after[1, 0] > after[0, 0]
    assert float(after.sum()) == pytest.approx(1.0)


def test_pruned_images_leave_the_chosen_tokens(target: Target, prompts: list[list[int]]) -> None:
    """The cache holds the text and a share of the image tokens, those with the largest products;
    all of them are EAGLE-3.
    """
    torch.manual_seed(0)
    full = Eagle3(target, vocab_size=256).eval()
    for keep, same in ((1.0, True), (0.3, False)):
        drafter = PrunedImages(target, keep, vocab_size=256).eval()
        drafter.load_state_dict(full.state_dict())
        rounds = [
            decode(target, prompts, Greedy(), LIMIT, model, Chain(3)) for model in (full, drafter)
        ]
        if same:
            assert [row.round_lengths for row in rounds[0]] == [
                row.round_lengths for row in rounds[1]
            ]
    context = first_context(target, drafter, Chain(2), prompts)
    final = context.new_features.at_layer("final")
    image = drafter.placeholder_id
    with torch.inference_mode():
        drafter.draft(context)
    assert drafter.cache is not None
    for row, prompt in enumerate(prompts):
        positions = [at - 1 for at in range(1, len(prompt)) if prompt[at] == image]
        assert int(drafter.cache.lengths[row]) == len(prompt) - len(positions) + -(
            -3 * len(positions) // 10
        )
        products = sorted(
            ((float(final[row, at] @ final[row, len(prompt) - 1]), at) for at in positions),
            reverse=True,
        )
        assert bool(products) == (get_images(prompt) is not None)


def test_subnets_are_eagle3_of_their_depth_and_the_search_takes_the_fastest(
    target: Target, prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    """A subnet of depth d drafts as EAGLE-3 with its first d layers; the search keeps the one of
    the best recorded speed.
    """
    torch.manual_seed(0)
    supernet = Supernet(target, 2, vocab_size=256, depth=None).eval()
    for depth in (1, 2):
        alone = Eagle3(target, vocab_size=256, num_layers=depth).eval()
        alone.load_state_dict(
            {
                name: weight
                for name, weight in supernet.state_dict().items()
                if name in alone.state_dict()
            }
        )
        supernet.subnet = Subnet(depth, supernet.largest.fused)
        rounds = [
            decode(target, prompts, Greedy(), LIMIT, model, Chain(3)) for model in (alone, supernet)
        ]
        assert [row.round_lengths for row in rounds[0]] == [row.round_lengths for row in rounds[1]]
    supernet.answer_tokens = 4
    supernet.search(target, [(prompts[2], outputs[2])], 2)
    assert (
        supernet.capabilities.search is None and len(supernet.trials) == len(supernet.subnets) > 3
    )
    assert supernet.subnet == max(supernet.trials, key=lambda trial: trial.speed).subnet
    assert {supernet.sample_subnet(step) for step in range(40)} == {*supernet.subnets}
