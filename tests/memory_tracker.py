"""Fake tensors, which have a shape and no data, and a tracker of the memory and work that a
computation on them would take.

Inside `MemoryTracker` every tensor that is made is a `FakeTensor`. Any model and any drafter runs
on them unchanged, on a device that need not be here; memory is counted as storages come and go,
FLOPs by torch's own formulas. What follows from small tensors of known values alone, such as tokens
and loss masks, is really computed, so masks select as many rows as they would. Where a size would
hang on values that nobody knows, the most is assumed, every row, and `MemoryTracker.assumed` counts
how often; a question about such values is answered with yes, and a number among them is 1.

torch's own `FakeTensorMode` with `MemTracker` gives the same peak where no size hangs on a value
(three linears, AdamW, two
steps: 57,738,272 bytes both). It follows no values, though, and every loss here selects supervised
rows: with torch 2.13 the first `int(mask.sum())` of EAGLE-3's loss ends in
DataDependentOutputException, with a ShapeEnv in GuardOnDataDependentSymNode; and moving a fake
model to a device fails in `nn.Module._apply`. So ours stays.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry, shape_wrapper

aten = torch.ops.aten

# elements up to which values are followed; a float needs them rarely, and weights shall not have
# any
MAX_FOLLOWED = 1 << 22
MAX_FOLLOWED_FLOATS = 1 << 10
BLOCK = 512  # bytes: a GPU's allocator gives no less

Shape = tuple[int, ...]


def attention_flops(query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    """Count scores and their weighted sums, [B, H, T, D] against [B, K, S, D]; masked or not, as
    torch counts them too.
    """
    return 2 * math.prod(query[:3]) * key[2] * (query[3] + value[3])


def attention_backward_flops(
    gradient: Shape, query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any
) -> int:
    """Count the backward: five products, one of which computes the scores again, for two of the
    forward.
    """
    return 5 * attention_flops(query, key, value) // 2


def documents_flops(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None, *args: Any, **kwargs: Any
) -> int:
    """Count flash attention by its own name, of [B, T, H, D] or of documents [T, H, D] packed
    from `starts` on.
    """
    heads, size = query.shape[-2:]
    lengths = [query.shape[1]] * query.shape[0] if starts is None else starts.diff().tolist()
    return sum(2 * heads * length**2 * (size + value.shape[-1]) for length in lengths)


def documents_backward_flops(gradient: Tensor, *args: Any, **kwargs: Any) -> int:
    query, key, value, _, _, starts = args[:6]
    return 5 * documents_flops(query, key, value, starts) // 2


def linear_flops(x: Shape, weight: Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(x) * weight[0]


def addmm_flops(total: Shape, left: Shape, right: Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(left) * right[1]


def cells_flops(x: Shape, inputs: Shape, states: Shape, *args: Any, **kwargs: Any) -> int:
    """Count recurrent cells over x [.., D] with weights [gates, D] and [gates, H]."""
    return 2 * math.prod(x[:-1]) * (math.prod(inputs) + math.prod(states))


def cells_backward_flops(*args: Any, **kwargs: Any) -> int:
    return 2 * cells_flops(*args, **kwargs)


FORMULAS: dict[Any, Any] = {
    aten.mkldnn_rnn_layer: cells_flops,
    aten.mkldnn_rnn_layer_backward: cells_backward_flops,
    aten.addmm: addmm_flops,
    aten._scaled_dot_product_flash_attention: attention_flops,
    aten._scaled_dot_product_efficient_attention: attention_flops,
    aten._scaled_dot_product_cudnn_attention: attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    aten._scaled_dot_product_flash_attention_backward: attention_backward_flops,
    aten._scaled_dot_product_efficient_attention_backward: attention_backward_flops,
    aten._scaled_dot_product_cudnn_attention_backward: attention_backward_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
    torch.ops.mkldnn._linear_pointwise: linear_flops,
}
"""What torch's own registry of FLOP formulas lacks, by the shapes of operands; its attention knows
no grouped heads, and its sums of products none in another type."""

OF_VALUES: dict[Any, Any] = {
    aten._flash_attention_forward: documents_flops,
    aten._flash_attention_backward: documents_backward_flops,
}
"""By the values of operands, which a plan follows where they are few."""

SELECTING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.empty_strided.default,
    aten.new_empty_strided.default,
}


class Storage:
    """One storage, for as long as a tensor is left that uses it."""

    def __init__(self, tracker: MemoryTracker, size: int, has_values: bool, part: str) -> None:
        self.tracker = tracker
        self.has_values = has_values
        self.index = len(tracker.sizes)
        tracker.sizes.append(size)
        tracker.parts.append(part)
        tracker.events.append(self.index)

    def __del__(self) -> None:
        self.tracker.events.append(~self.index)


class FakeTensor(Tensor):
    """A tensor without data, or with values that are followed; it says that it is on the planned
    device.
    """

    stands_for_plain = True  # for one of torch's own kind, not for one of few bits
    body: Tensor  # on the device "meta", or real where values are known
    held: Storage

    @staticmethod
    def __new__(cls, inner: Tensor, held: Storage) -> FakeTensor:
        size = inner.shape
        stride = inner.stride()
        offset = inner.storage_offset()
        wrapper: Any = Tensor._make_wrapper_subclass
        tensor: FakeTensor = wrapper(cls, size, stride, offset, dtype=inner.dtype, device="cpu")
        return tensor

    def __init__(self, inner: Tensor, held: Storage) -> None:
        self.body = inner
        self.held = held

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        tracker = next(
            leaf.held.tracker
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, FakeTensor)
        )
        return tracker.__torch_dispatch__(func, types, args, kwargs)

    @property
    def has_values(self) -> bool:
        return self.held.has_values and self.body.device.type == "cpu"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.held.tracker.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.device.type == "cuda"

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Any) -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.body, self.held = other.body, other.held

    def tolist(self) -> Any:
        # like `float` of each
        if not self.has_values and self.dtype.is_floating_point and self.dim() < 2:
            return torch.ones(self.shape).tolist()
        return self.numpy().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not self.has_values:
            raise RuntimeError("planning: its training step reads values that only a real run has")
        with _disable_current_modes():
            return self.body.numpy()

    def data_ptr(self) -> int:
        return id(self.held)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied = self.detach().clone()
            copied = (
                nn.Parameter(copied, self.requires_grad)
                if isinstance(self, nn.Parameter)
                else copied
            )
            memo[id(self)] = copied
        return memo[id(self)]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FakeTensor({list(self.shape)}, {self.dtype})"


class MemoryTracker(TorchDispatchMode):
    """Tracks the bytes held at every moment, by part, and the FLOPs done, by phase."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.part = "other"
        self.phase = "other"
        self.vocabularies: set[int] = set()  # widths that make a tensor one of logits
        self.flops: Counter[str] = Counter()
        self.formulas = {
            **flop_registry,
            **{packet: shape_wrapper(formula) for packet, formula in FORMULAS.items()},
            **OF_VALUES,
        }
        self.assumed = 0
        self.sizes: list[int] = []  # of every storage that there ever was
        self.parts: list[str] = []
        # a storage's number where it came, its complement where it went
        self.events: list[int] = []
        self._redirect = _Redirect(device)

    def __enter__(self) -> MemoryTracker:
        self._redirect.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._redirect.__exit__(*error)

    def name(self, tensor: Any, part: str) -> None:
        """Count this tensor's storage as another part, from its beginning."""
        if isinstance(tensor, FakeTensor):
            self.parts[tensor.held.index] = part

    def assume(self, answer: Any) -> Any:
        self.assumed += 1
        return answer

    def peak(self, first: int = 0) -> dict[str, int]:
        """Return bytes by part at the moment, from event `first` on, when most was held."""
        now = most = best = 0
        for moment, event in enumerate(self.events):
            now += self.sizes[event] if event >= 0 else -self.sizes[~event]
            if moment >= first and now > most:
                most = now
                best = moment
        sizes: Counter[str] = Counter()
        for event in self.events[: best + 1]:
            index = event if event >= 0 else ~event
            sizes[self.parts[index]] += self.sizes[index] if event >= 0 else -self.sizes[index]
        return {part: size for part, size in sizes.most_common() if size}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SELECTING:
            args = (args[0], self._select_rows(args[1]), *args[2:])
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        has_values = (
            all(_has_values(tensor) for tensor in taken)
            and sum(map(Tensor.numel, taken)) <= MAX_FOLLOWED
        )
        has_values = has_values and func not in EMPTY
        wrappers: dict[int, FakeTensor] = {}

        def inner(value: Any) -> Any:
            body = value.body if isinstance(value, FakeTensor) else value
            if isinstance(value, Tensor) and not has_values:
                body = _to_meta(body)
            if isinstance(value, FakeTensor):
                wrappers[id(body)] = value
            return body

        plain = tree_map(inner, args)
        options = tree_map(inner, kwargs)
        if not has_values and func._schema.is_mutable:
            self._forget_values(func, args, kwargs)
        if has_values and not self._is_large(func, taken, plain, options):
            out = func(*plain, **options)
        else:
            out = self._run_fake(func, tree_map(_to_meta, plain), tree_map(_to_meta, options))
        result = tree_map(
            lambda value: (
                self._wrap_output(value, wrappers, func) if isinstance(value, Tensor) else value
            ),
            out,
        )
        if func._overloadpacket in self.formulas:
            self.flops[self.phase] += self.formulas[func._overloadpacket](
                *args, **kwargs, out_val=result
            )
        return result

    def _is_large(self, func: Any, taken: list[Tensor], args: Any, kwargs: Any) -> bool:
        """Tell whether a new tensor, whose size only its fake tells, is too large to follow its
        values.
        """
        if taken or "device" not in kwargs:
            return False
        nobody = {"generator": None} if "generator" in kwargs else {}
        output = func(*args, **{**kwargs, **nobody, "device": "meta"})
        return not _may_have_values(output)

    def _run_fake(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation on unknown values; the largest, where the size
        depends on them.
        """
        first: Any = args[0] if args else None
        if func is aten._local_scalar_dense.default:
            return True if first.dtype == torch.bool else 1.0 if first.is_floating_point() else 1
        if func in (aten.equal.default, aten.allclose.default):
            return True
        if func is aten.nonzero.default:
            return self.assume(
                torch.empty(first.numel(), first.dim(), dtype=torch.int64, device="meta")
            )
        if func is aten.masked_select.default:
            return self.assume(torch.empty(first.numel(), dtype=first.dtype, device="meta"))
        if func is torch.ops.mkldnn._reorder_linear_weight.default:
            return torch.empty_like(first)
        # torch 2.11 knows none without data
        if func._overloadpacket is aten.addmm and func._overloadname == "dtype_out":
            return kwargs["out"]
        return func(*args, **kwargs)

    def _wrap_output(self, out: Tensor, wrappers: dict[int, FakeTensor], func: Any) -> Tensor:
        if id(out) in wrappers:  # it was written to in place
            wrappers[id(out)].body = out
            return wrappers[id(out)]
        storage = out.untyped_storage()
        for taken in wrappers.values():
            if taken.body.untyped_storage()._cdata == storage._cdata:
                return FakeTensor(out, taken.held)
        has_values = out.device.type == "cpu"
        size = storage.nbytes()
        if has_values and not _may_have_values(out):
            out = _to_meta(out)
            has_values = False
        part = self.part
        if func is torch.ops.mkldnn._reorder_linear_weight.default:
            part = "packed copies of weights"
        elif out.dim() > 1 and out.shape[-1] in self.vocabularies:
            part = "logits"
        return FakeTensor(
            out,
            Storage(
                self,
                -(-size // BLOCK) * BLOCK if self.device.type == "cuda" else size,
                has_values,
                part,
            ),
        )

    def _select_rows(self, indices: Any) -> list[Any]:
        """Return masks as the numbers of the rows that they select."""
        rows: list[Any] = []
        for index in indices:
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                rows += index.nonzero().unbind(1)
            else:
                rows.append(index)
        return rows

    def _forget_values(self, func: Any, args: Any, kwargs: Any) -> None:
        """Forget the values of tensors that unknown values are written to, and of all that share
        their storage.
        """
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                for leaf in tree_leaves(value):
                    if isinstance(leaf, FakeTensor):
                        leaf.held.has_values = False


def _has_values(tensor: Tensor) -> bool:
    return tensor.has_values if isinstance(tensor, FakeTensor) else tensor.device.type == "cpu"


def _may_have_values(tensor: Tensor) -> bool:
    return tensor.numel() <= (MAX_FOLLOWED_FLOATS if tensor.is_floating_point() else MAX_FOLLOWED)


def _to_meta(value: Any) -> Any:
    """Return a fake of a tensor on the device "meta", and that device for any other."""
    if isinstance(value, torch.device):
        return torch.device("meta")
    if not isinstance(value, Tensor) or value.device.type == "meta":
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


class _Redirect(TorchFunctionMode):
    """Does what a planned GPU would do, where torch without one would refuse, or do it as a CPU
    does.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.device.type == "cuda" and func is not torch.device:
            if any(map(self._is_planned, (*args, *kwargs.values()))):
                args = tuple(map(self._to_cpu, args))
                kwargs = {key: self._to_cpu(value) for key, value in kwargs.items()}
            if func is F.scaled_dot_product_attention:
                return _gpu_attention(*args, **kwargs)
            if func is F.rms_norm:
                return _gpu_rms_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def _is_planned(self, value: Any) -> bool:
        return (isinstance(value, torch.device) and value.type == "cuda") or (
            isinstance(value, str) and value[:4] == "cuda"
        )

    def _to_cpu(self, value: Any) -> Any:
        return torch.device("cpu") if self._is_planned(value) else value


def _gpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run fused attention as a GPU has it: flash attention, and with a mask or in float32 the
    memory-efficient kernel; for a mask with grouped heads cuDNN's, which `fused_attention` leaves
    nobody. None of them holds the scores.
    """
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (x.to(torch.get_autocast_dtype("cuda")) for x in (query, key, value))
    bias = attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = torch.where(attn_mask, query.new_zeros(()), -torch.inf).to(query.dtype)
    if query.dtype == torch.float32 or (bias is not None and query.shape[1] == key.shape[1]):
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
        learns = query.requires_grad
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, learns, dropout_p, is_causal, scale=scale
        )[0]
    if bias is None:
        return aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    return aten._scaled_dot_product_cudnn_attention(
        query, key, value, bias, True, dropout_p, is_causal, False, scale=scale
    )[0]


def _gpu_rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Run one kernel where the dtypes agree, as on a GPU; otherwise torch composes it."""
    if weight is not None and weight.dtype != input.dtype:
        return torch.rms_norm(input, normalized_shape, weight, eps)
    return aten._fused_rms_norm(input, normalized_shape, weight, eps)[0]


@contextmanager
def enable_autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """Enable autocast of a GPU that need not be here: a CPU's does the work, and torch reports
    the GPU's as enabled.
    """
    if dtype is None:
        yield
        return
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        with torch.autocast("cpu", dtype):
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
