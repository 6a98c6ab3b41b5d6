"""A drafter on another device: tensors are tagged by device, and nothing mixes them but copies."""

from collections.abc import Iterable
from copy import copy, deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.errors import UserError
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2
from spectrain_research.devices import drafter as module
from spectrain_research.devices.drafter import OtherDevice
from spectrain_research.devices.gating import GatedFusion
from tests.decoding.rounds import Keeping

PROMPTS = [[5, 6, 7, 8], [9, 10]]
INNER: list[dict[str, Any]] = [
    {"choice": "causal", "num_layers": 1},
    {"choice": "eagle3", "vocab_size": 512, "ttt_steps": 2},
]


class Devices(TorchDispatchMode):
    """Tags every storage with the device that its inputs are on, and refuses operations on tensors
    of two devices.

    A scalar belongs to no device, nor does a tensor that was made of none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tags: dict[int, str] = {}
        self.tensors: list[Tensor] = []  # so that no storage is used again
        self.num_copies = self.num_operations = 0

    def tag_tensors(self, tensors: Iterable[Tensor], name: str) -> None:
        for tensor in tensors:
            self.tensors.append(tensor)
            self.tags[tensor.untyped_storage()._cdata] = name

    def read_tags(self, values: Any) -> set[str]:
        tensors = [
            value for value in tree_leaves(values) if isinstance(value, Tensor) and value.dim()
        ]
        return {
            self.tags[t.untyped_storage()._cdata]
            for t in tensors
            if t.untyped_storage()._cdata in self.tags
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = self.read_tags((args, kwargs))
        assert len(names) < 2, f"{func} mixes devices"
        results = func(*args, **(kwargs or {}))
        self.num_operations += 1
        if names:
            self.tag_tensors(
                [value for value in tree_leaves(results) if isinstance(value, Tensor)], names.pop()
            )
        return results


def deepcopy_head(head: Any) -> Any:
    """The head that a drafter on another device has: with weights of its own."""
    other = copy(head)
    other.embedding = deepcopy(head.embedding)
    other.output = deepcopy(head.output)
    return other


@pytest.mark.parametrize("inner", INNER, ids=lambda inner: inner["choice"])
@pytest.mark.parametrize("builder", [Chain(3), Eagle2(3, 8, 3)], ids=["chain", "tree"])
def test_nothing_crosses_devices_but_copies(
    shallow: Target, inner: dict[str, Any], builder: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees and output are those of the drafter alone. With tags, the drafter's operations read
    no tensor of the target.
    """
    torch.manual_seed(0)
    drafter = OtherDevice(shallow, inner).eval()
    alone = Keeping(builder)
    apart = Keeping(builder)
    expected = [
        generation.output
        for generation in decode(
            shallow, PROMPTS, Greedy(), 8, drafter.inner, alone, ignore_eos=True
        )
    ]
    assert expected == [
        generation.output for generation in decode(shallow, PROMPTS, Greedy(), 8, ignore_eos=True)
    ]
    generations = decode(shallow, PROMPTS, Greedy(), 8, drafter, apart, ignore_eos=True)
    assert [generation.output for generation in generations] == expected
    assert all(
        torch.equal(a.tokens, b.tokens) for a, b in zip(alone.trees, apart.trees, strict=True)
    )

    devices = Devices()
    other = {"target": "drafter", "drafter": "target"}
    devices.tag_tensors(drafter.inner.state_dict().values(), "drafter")
    devices.tag_tensors(shallow.model.state_dict().values(), "target")
    if "head" in vars(drafter.inner):
        head = deepcopy_head(shallow.head)
        devices.tag_tensors([head.embedding.weight, head.output.weight], "drafter")
        drafter.inner.head = head

    def copy_tagged(tensor: Tensor, device: torch.device) -> Tensor:
        names = devices.read_tags([tensor])
        with torch.utils._python_dispatch._disable_current_modes():
            copied = tensor.clone()
        if names:
            devices.num_copies += 1
            devices.tag_tensors([copied], other[names.pop()])
        return copied

    monkeypatch.setattr(module, "copy_to_device", copy_tagged)
    with devices:
        again = decode(shallow, PROMPTS, Greedy(), 8, drafter, builder, ignore_eos=True)
    assert [generation.output for generation in again] == expected
    assert devices.num_copies > 8 and devices.num_operations > 200
    monkeypatch.setattr(module, "copy_to_device", lambda tensor, device: tensor)
    with devices, pytest.raises(AssertionError, match="mixes devices"):
        decode(shallow, PROMPTS, Greedy(), 8, drafter, builder, ignore_eos=True)


def test_the_gate_and_unknown_devices(shallow: Target) -> None:
    torch.manual_seed(0)
    fusion = GatedFusion(4)
    torch.nn.init.normal_(fusion.gate.weight)
    embedded = torch.randn(3, 4)
    feature = torch.randn(3, 4)
    g = 1 / (
        1
        + torch.exp(-(torch.cat([embedded, feature], -1) @ fusion.gate.weight.T + fusion.gate.bias))
    )
    expected = g * feature + (1 - g) * (embedded @ fusion.project.weight.T)
    torch.testing.assert_close(fusion(torch.cat([embedded, feature], -1)), expected)
    with pytest.raises(UserError, match="no such device"):
        OtherDevice(shallow, "ngram", device="nowhere")
