"""SlimSpec: an output layer of low rank equals the plain one at full rank, and is the nearest of
its rank below that.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.base import Drafter, TrainingState
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.layers.output_layer import (
    init_output_layer,
    make_output_layer,
    project_down,
)
from spectrain.drafters.medusa import Medusa
from spectrain.drafters.peagle import PEagle
from spectrain.errors import UserError
from spectrain.export.converter import convert, read_drafter
from spectrain.features.batch import Batch
from spectrain.models.target import Target
from spectrain.runs.drafters import load_weights
from spectrain.trees import Chain
from tests.export.test_converter import TINY, ours
from tests.installed import load_cases

# Cases of installed packages.
CASES = load_cases(__name__)

FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "eagle3": (Eagle3, {"ttt_steps": 2}),
    "peagle": (PEagle, {"num_drafts": 3, "num_layers": 1}),
    "medusa": (Medusa, {"num_heads": 2}),
    **CASES.get("FAMILIES", {}),
}


def make_drafter(family: str, target: Target, rank: int | None) -> Drafter:
    """Make a prepared drafter whose weights outside of the output layer are the same for every
    rank.
    """
    kind, options = FAMILIES[family]
    torch.manual_seed(3)
    drafter: Drafter = kind(target, **options, vocab_size=256, head_rank=rank)
    drafter.prepare(target, torch.arange(target.head.vocab_size))
    return drafter.eval()


def slim_and_plain(family: str, target: Target, rank: int) -> tuple[Drafter, Drafter]:
    """Make a drafter whose head has this rank and one with a plain head; all other weights are
    the same.
    """
    slim = make_drafter(family, target, rank)
    plain = make_drafter(family, target, None)
    heads = {name: tensor for name, tensor in plain.state_dict().items() if "lm_head" in name}
    plain.load_state_dict(
        heads | {name: x for name, x in slim.state_dict().items() if "lm_" not in name}, strict=True
    )
    return slim, plain


def compute_loss(drafter: Drafter, target: Target) -> Tensor:
    torch.manual_seed(5)
    tokens = torch.randint(target.head.vocab_size - 256, target.head.vocab_size, (2, 24))
    batch = Batch(
        tokens, torch.ones_like(tokens, dtype=torch.bool), target.features(tokens, drafter.layers)
    )
    return drafter.loss(batch, target, TrainingState()).total


@pytest.mark.parametrize("family", FAMILIES)
def test_of_full_rank_it_is_the_plain_head(family: str, shallow: Target) -> None:
    """A head of full rank has the same loss as the plain head."""
    slim, plain = slim_and_plain(family, shallow, shallow.width)
    assert any("lm_down" in name for name in slim.state_dict())
    torch.testing.assert_close(
        compute_loss(slim, shallow), compute_loss(plain, shallow), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_of_low_rank_it_is_the_plain_head_with_their_product(family: str, shallow: Target) -> None:
    """Loss and drafts are those of a plain head whose weight is the product U P."""
    slim, plain = slim_and_plain(family, shallow, 7)
    weights = slim.state_dict()
    for name in [name for name in weights if name.endswith("lm_head.weight")]:
        plain.state_dict()[name].copy_(weights[name] @ weights[name.replace("lm_head", "lm_down")])
    torch.testing.assert_close(
        compute_loss(slim, shallow), compute_loss(plain, shallow), rtol=1e-4, atol=1e-4
    )
    drafted = [decode(shallow, [[5, 6, 7, 8]], Greedy(), 8, d, Chain(2))[0] for d in (slim, plain)]
    assert (
        drafted[0].round_lengths == drafted[1].round_lengths
        and drafted[0].output == drafted[1].output
    )


@pytest.mark.parametrize("rank", [1, 5, 12])
def test_it_starts_as_near_as_its_rank_can_be(rank: int) -> None:
    """The squared distance to the weight is the sum of the squared singular values left out
    (Eckart and Young).
    """
    weight = torch.randn(40, 12) @ torch.diag(torch.logspace(0, -2, 12)) @ torch.randn(12, 12)
    down, head = make_output_layer(12, 40, rank)
    init_output_layer(down, head, weight)
    # row d: what the layer says of the d-th unit state
    product = project_down(down, torch.eye(12)) @ head.weight.T
    left_out = torch.linalg.svdvals(weight)[rank:].square().sum()
    torch.testing.assert_close((product.T - weight).square().sum(), left_out, rtol=1e-3, atol=1e-6)


def test_a_rank_above_the_width_is_refused(shallow: Target) -> None:
    with pytest.raises(
        UserError, match=f"drafter.head_rank={shallow.width + 1}: states are {shallow.width} wide"
    ):
        Eagle3(shallow, head_rank=shallow.width + 1)


@pytest.mark.parametrize(
    ("family", "form"), [("eagle3", "vllm"), ("eagle3", "sglang"), ("medusa", "vllm")]
)
def test_engines_get_the_product(family: str, form: str, tiny: Target, tmp_path: Path) -> None:
    """For engines a head of low rank is exported as a plain one with the same logits; our own
    layout keeps it as it is.
    """
    start = ours(tmp_path / "start", tiny, family, vocab_size=256, head_rank=6)
    own = read_drafter(convert(start, tmp_path / "own", "spectrain", TINY), TINY)
    saved = load_file(start / "model.safetensors")
    assert own.drafter["head_rank"] == 6
    assert all(torch.equal(own.tensors[name], tensor) for name, tensor in saved.items())
    exported = convert(start, tmp_path / "there", form, TINY)
    back = convert(exported, tmp_path / "back", "spectrain", TINY)
    tensors = load_file(back / "model.safetensors")
    assert not any("lm_down" in name for name in tensors)
    name = next(name for name in tensors if name.endswith("lm_head.weight"))
    torch.testing.assert_close(
        tensors[name], saved[name] @ saved[name.replace("lm_head", "lm_down")]
    )
    options = {"vocab_size": 256} if family == "eagle3" else {"vocab_size": 256, "num_heads": 3}
    drafter = {"eagle3": Eagle3, "medusa": Medusa}[family](tiny, **options)
    load_weights(drafter, back)
