"""The interface to the compiled kernels of drafting on a CPU: calls that take tensors.

Shapes: F nodes, P tokens, N nodes of a draft, D width, O output width, H query heads, K key-value
heads, d head size, I inner width, V draft vocabulary. Numba is imported at the first use, as
`cpu_kernels` describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .cpu_kernels import (
    attention_size,
    count_members,
    current_team,
    has_cpu_kernels,
    working_memory,
    working_sums,
)

PANEL_COLUMNS = 32
INPUT_STEP = 4
"""Divisors of a linear's output and input width."""
MIN_ROWS = 16
"""Nodes that the working memory of a drafter has room for at least."""
BEST_COUNT = 64
"""Numbers that are selected from a row at most."""
FLOAT_BYTES = 4


@cache
def _import_kernels() -> Any:
    from . import cpu_eagle

    return cpu_eagle


def has_drafting_kernels() -> bool:
    """Return whether drafters with 8-bit weights can run by compiled kernels."""
    return torch.cpu._is_vnni_supported() and has_cpu_kernels(torch.bfloat16, torch.device("cpu"))


class ByteWeights:
    """The 8-bit weights [O, D] of an FBGEMM linear in panels, for rows of float32."""

    def __init__(self, packed: Any) -> None:
        weight, _ = torch.ops.quantized.linear_unpack(packed)
        numbers, (outputs, width) = weight.int_repr(), weight.shape
        blocks = numbers.view(
            outputs // PANEL_COLUMNS, 2, PANEL_COLUMNS // 2, width // INPUT_STEP, INPUT_STEP
        )
        self.panels = blocks.permute(0, 3, 1, 2, 4).contiguous()
        self.scales = weight.q_per_channel_scales().float()
        self.sums = numbers.sum(1, dtype=torch.int32)
        self.sizes = width, outputs

    @staticmethod
    def supports(linear: nn.Linear) -> bool:
        """Return whether the weights of a linear can be stored in panels."""
        return linear.out_features % PANEL_COLUMNS == linear.in_features % INPUT_STEP == 0

    @property
    def linear(self) -> Any:
        """Return the addresses and sizes, for kernels."""
        from .cpu_int8 import ByteLinear

        return ByteLinear(
            self.panels.data_ptr(), self.scales.data_ptr(), self.sums.data_ptr(), *self.sizes
        )


class EagleShape(NamedTuple):
    """The heads of a layer, and the epsilon of its norms."""

    num_heads: int
    num_key_heads: int
    head_size: int
    eps: float


class EagleKernels:
    """The kernels of EAGLE's layer with its weights: `norms` are input, hidden, later and final,
    `linears` qkv, output, gate_up, down and head."""

    def __init__(
        self,
        embedding: Tensor,
        norms: Mapping[str, Tensor],
        linears: Mapping[str, ByteWeights],
        shape: EagleShape,
    ) -> None:
        self.kernels = _import_kernels()
        self.shape = shape
        self.embedding = embedding.detach()
        self.linears = linears
        self.norms = {f"{name}_norm": norm.detach().float() for name, norm in norms.items()}
        self.vocab_size = linears["head"].sizes[1]
        self.width = linears["output"].sizes[1]
        self.num_positions = self.num_rows = self.num_slots = self.num_members = 0

    def use_angles(self, cos: Tensor, sin: Tensor) -> None:
        """Use the cosines and sines [1, positions, d] of all positions of a text."""
        self.angles = torch.cat([cos, sin]).float()
        self.num_positions = cos.shape[1]
        shape = self.shape
        linears = {name: weights.linear for name, weights in self.linears.items()}
        self.layer = self.kernels.EagleLayer(
            embedding=self.embedding.data_ptr(),
            is_half=self.embedding.dtype == torch.bfloat16,
            **shape._asdict(),
            **linears,
            **{name: norm.data_ptr() for name, norm in self.norms.items()},
            cos=self.angles[0].data_ptr(),
            sin=self.angles[1].data_ptr(),
        )

    def read_tokens(
        self, tokens: Tensor, hidden: Tensor, slots: Tensor, num_committed: int
    ) -> Tensor:
        """Run the next tokens [1, P] of a text with hidden states [1, P, D], and return their
        states. `slots` [2, T, K, d] are those of the text."""
        count = tokens.shape[1]
        tokens = tokens.contiguous()
        states = hidden.float().contiguous()
        states = states.clone() if states is hidden else states
        self._reserve(count, count)
        viewed = self._view_slots(slots, num_committed, count, count)
        no_nodes = self.kernels.EagleNodes(0, 0, 0, 0)
        self.kernels.run_nodes(
            self.layer,
            self.memory,
            viewed,
            no_nodes,
            tokens.data_ptr(),
            0,
            count,
            states.data_ptr(),
            0,
        )
        return states

    def score_states(self, states: Tensor) -> Tensor:
        """Return the log-probabilities [1, F, V] after nodes with states [1, F, D]."""
        count = states.shape[1]
        kernels = self.kernels
        self._reserve(count, 1)
        log_q = torch.empty(1, count, self.vocab_size)
        states = states.contiguous()
        no_slots = kernels.EagleSlots(0, 0, 0, 0, 0)
        no_nodes = kernels.EagleNodes(0, 0, 0, 0)
        kernels.run_nodes(
            self.layer,
            self.memory,
            no_slots,
            no_nodes,
            0,
            0,
            count,
            states.data_ptr(),
            log_q.data_ptr(),
        )
        return log_q

    def _view_slots(
        self, slots: Tensor, num_committed: int, num_appended: int, num_new: int
    ) -> Any:
        """Return what kernels are told of the slots and of the working memory of attention."""
        num_heads, num_key_heads, size, _ = self.shape
        rows = num_new * (num_heads // num_key_heads)
        length = num_committed + num_appended
        memory = working_memory(attention_size(rows, length, size))
        keys = slots.data_ptr()
        values = keys + slots.stride(0) * FLOAT_BYTES
        return self.kernels.EagleSlots(keys, values, num_committed, num_appended, memory.data_ptr())

    def _reserve(self, num_rows: int, num_slots: int) -> None:
        """Make the working memory large enough for calls over so many nodes, of so many that are
        appended, by as many threads as torch uses."""
        members = count_members()
        if (
            num_rows <= self.num_rows
            and num_slots <= self.num_slots
            and members == self.num_members
        ):
            return
        from .cpu_int8 import TeamProduct, multiply_bytes_part

        self.num_members = members
        rows = max(MIN_ROWS, num_rows, self.num_rows)
        self.num_slots = max(MIN_ROWS, num_slots, self.num_slots)
        self.num_rows = rows
        linears = self.linears
        widest = max(weights.sizes[0] for weights in linears.values())
        floats = {
            "hidden": self.width,
            "inputs": widest,
            "heads": linears["qkv"].sizes[1],
            "attended": linears["output"].sizes[0],
            "summed": self.width,
            "inner": linears["gate_up"].sizes[1],
            "angles": 2 * self.shape.head_size,
        }
        self.buffers = {name: torch.empty(rows, size) for name, size in floats.items()}
        self.buffers["positions"] = torch.empty(rows, dtype=torch.int64)
        self.buffers["mask"] = torch.empty(rows, self.num_slots, dtype=torch.uint8)
        self.rounded = torch.empty(rows * widest, dtype=torch.uint8)
        self.sums = working_sums()
        function = multiply_bytes_part().address
        team = current_team().address
        product = TeamProduct(
            function, self.rounded.data_ptr(), self.sums.data_ptr(), team, members
        )
        self.memory = self.kernels.EagleMemory(
            **{name: buffer.data_ptr() for name, buffer in self.buffers.items()}, product=product
        )


class EagleDraft:
    """The nodes of one draft of one text, which kernels extend. The root is the first."""

    def __init__(
        self, kernels: EagleKernels, root: Tensor, slots: Tensor, num_committed: int, capacity: int
    ) -> None:
        """Start from the root's state [1, 1, D], with room for `capacity` nodes, the root
        included.
        """
        self.kernels = kernels
        self.slots = slots
        self.num_committed = num_committed
        self.capacity = capacity
        self.num_nodes = 1
        self.states = torch.empty(capacity, kernels.width)
        self.states[0] = root[0, 0]
        self.depths = torch.zeros(capacity, dtype=torch.int64)
        self.ancestors = torch.empty(capacity, capacity, dtype=torch.uint8)
        addresses = (part.data_ptr() for part in (self.states, self.depths, self.ancestors))
        self.nodes = kernels.kernels.EagleNodes(*addresses, capacity)

    def score_root(self) -> Tensor:
        """Return the log-probabilities [1, 1, V] after the root."""
        return self.kernels.score_states(self.states[None, :1])

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Add nodes with tokens [1, F] below `parents` [1, F], and return the log-probabilities
        [1, F, V] after them.
        """
        kernels = self.kernels
        count = tokens.shape[1]
        num_appended = self.num_nodes - 1 + count
        assert num_appended < self.capacity, f"a draft of {self.capacity} nodes is full"
        kernels._reserve(count, num_appended)
        tokens = tokens.contiguous()
        parents = parents.contiguous()
        log_q = torch.empty(1, count, kernels.vocab_size)
        slots = kernels._view_slots(self.slots, self.num_committed, num_appended, count)
        states = self.states[self.num_nodes].data_ptr()
        kernels.kernels.run_nodes(
            kernels.layer,
            kernels.memory,
            slots,
            self.nodes,
            tokens.data_ptr(),
            parents.data_ptr(),
            count,
            states,
            log_q.data_ptr(),
        )
        self.num_nodes += count
        return log_q
