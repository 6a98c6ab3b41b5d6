"""Every kernel against its definition in float64, on the same inputs widened; path verification
against its reference.

A check lists cases; a case returns the actual and the expected outputs and whether the kernel ran.
Memory that outputs are likely to be allocated from holds NaN beforehand, and so do cache slots that
nothing may read.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from spectrain.kernels import (
    add_norm,
    append_children,
    counter,
    draft_input,
    gated_unit,
    kv_append,
    kv_commit,
    later_keys,
    linear_divergence,
    norm_gradients,
    rotate_append,
    rotate_heads,
    round_commit,
    row_kl,
    sampling_cuts,
    token_commit,
    tree_attention,
    tree_masks,
    tree_recursive,
    tree_selection,
    tree_verify,
    tree_walks,
)
from spectrain.kernels.counter import host_key
from spectrain.kernels.dispatch import runs_on, takes_gradients
from spectrain.trees.token_tree import TokenTree

from .attention import random_tree
from .measure import relative_error

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class KernelOutcome:
    """The outputs of a kernel, by name, and those of float64."""

    actual: dict[str, Tensor]
    expected: dict[str, Tensor]
    by_kernel: bool  # False if the reference ran


Case = Callable[[torch.dtype, torch.device], KernelOutcome]


@dataclass(frozen=True)
class KernelCheck:
    """The cases of one kernel, by name, and the tolerance relative to an output's size."""

    modules: tuple[ModuleType, ...]  # a change of these voids an old result
    cases: dict[str, Case]
    toy_cases: dict[str, Case]
    tolerance: dict[torch.dtype, float] = field(default_factory=lambda: dict.fromkeys(DTYPES, 0.0))


def check_case(
    check: KernelCheck, case: Case, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Return the row of a case: the largest error of any output, absolute and relative, against
    the tolerance.
    """
    torch.manual_seed(0)
    outcome = case(dtype, device)
    errors = []
    largest = []
    for name, expected in outcome.expected.items():
        actual = outcome.actual[name]
        assert actual.shape == expected.shape, name
        errors.append(relative_error(actual, expected))
        largest.append(float((actual.double() - expected.double()).abs().max()))
    within = max(errors) <= check.tolerance[dtype]
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "by_kernel": outcome.by_kernel,
        "tolerance": check.tolerance[dtype],
        "max_error": finite_or_none(max(largest)),
        "relative_error": finite_or_none(max(errors)),
        "within": within,
    }


def finite_or_none(number: float) -> float | None:
    """Return a finite number, or None for NaN and infinity, which JSON lacks."""
    return number if math.isfinite(number) else None


def poison_memory(device: torch.device, *sizes: int) -> None:
    """Leave NaN in the memory that the next outputs of these sizes in bytes will probably get."""
    blocks = [
        torch.full((size // 4 + 1,), float("nan"), device=device)
        for size in sizes
        for _ in range(2)
    ]
    blocks.clear()


def attention_case(
    dtype: torch.dtype,
    device: torch.device,
    lengths: tuple[int, ...],
    nodes: int,
    heads: tuple[int, int] = (32, 8),
    widths: tuple[int, int] = (128, 128),
    **extra_options: Any,
) -> KernelOutcome:
    """Run tree attention over ragged prefixes with keys and values of these widths; `sinks=True`
    draws a sink for each head.
    """
    batch = len(lengths)
    longest = max(lengths)
    tree: TokenTree = random_tree(batch, nodes, device)
    rows = torch.tensor(lengths, device=device)
    positions = rows[:, None] + tree.depths
    visibility = tree_attention.Visibility(rows, longest, tree.ancestors, positions, positions)
    query = torch.randn(batch, nodes, heads[0], widths[0], device=device).to(dtype).transpose(1, 2)
    storage = torch.randn(batch, longest + nodes, heads[1], sum(widths), device=device).to(dtype)
    keys, values = storage.transpose(1, 2).split(widths, -1)
    options = {"scale": widths[0] ** -0.5} | extra_options
    if extra_options.get("sinks"):
        options["sinks"] = torch.randn(heads[0], device=device).to(dtype)
    expected = tree_attention.tree_attention_reference(
        query.double(), keys.double(), values.double(), visibility, **options
    )
    by_kernel = tree_attention._can_run_kernel(query, keys, values)
    # Only for the kernel: the reference's dense mask gives these slots a weight of 0, and 0 NaN is
    # NaN.
    if by_kernel:
        for row, length in enumerate(lengths):
            storage[row, length + nodes :] = float("nan")
    poison_memory(device, query.numel() * dtype.itemsize, query.numel() * 4)
    return KernelOutcome(
        {"out": tree_attention.tree_attention(query, keys, values, visibility, **options)},
        {"out": expected},
        by_kernel,
    )


def row_kl_case(
    dtype: torch.dtype, device: torch.device, rows: int, vocab: int, by_tokens: bool = False
) -> KernelOutcome:
    """Compute losses and gradients of rows of logits with the row kernel."""
    logits = torch.randn(rows, vocab, device=device).mul_(3).to(dtype)
    tokens = log_p = wide_log_p = None
    if by_tokens:
        tokens = torch.randint(vocab, (rows,), device=device)
    else:
        log_p = torch.randn(rows, vocab, device=device).mul_(3).log_softmax(-1)
        wide_log_p = log_p.double()
    weight = torch.rand(rows, device=device)
    wide = logits.double()
    expected = row_kl.row_kl_reference(wide, wide_log_p, tokens, weight.double(), 0.8, 30.0, True)
    by_kernel = row_kl.can_run_kernel(logits)
    run = row_kl.row_kl if by_kernel else row_kl.row_kl_reference
    poison_memory(device, rows * 4, rows * 8)
    outputs = run(logits, log_p, tokens, weight, 0.8, 30.0, True)
    return KernelOutcome(
        {"loss": outputs[0], "gradient": logits}, {"loss": expected[0], "gradient": wide}, by_kernel
    )


def divergence_case(
    dtype: torch.dtype, device: torch.device, rows: int, width: int, vocab: int
) -> KernelOutcome:
    """Compute loss and gradients of the fused output layer and KL, against autograd over the
    full matrices.
    """
    hidden = torch.randn(rows, width, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, width, device=device) * width**-0.5).to(dtype).requires_grad_()
    final = torch.randn(rows, width, device=device).to(dtype)
    target_weight = (torch.randn(vocab, width, device=device) * width**-0.5).to(dtype)
    target = linear_divergence.HeadTarget(final, linear_divergence.Projection(target_weight))
    wide_hidden, wide_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    log_q = (wide_hidden @ wide_weight.t()).log_softmax(-1)
    log_p = (final.double() @ target_weight.double().t()).log_softmax(-1)
    wide_loss = (log_p.exp() * (log_p - log_q)).sum()
    expected = wide_loss.detach(), *torch.autograd.grad(wide_loss, (wide_hidden, wide_weight))
    poison_memory(device, hidden.numel() * 4, weight.numel() * 4)
    loss = linear_divergence.linear_divergence(
        hidden, linear_divergence.Projection(weight), target, chunk=rows // 2 + 1
    ).loss
    outputs = loss.detach(), *torch.autograd.grad(loss, (hidden, weight))
    names = ("loss", "of hidden", "of weight")
    return KernelOutcome(
        dict(zip(names, outputs)), dict(zip(names, expected)), row_kl.can_run_kernel(hidden)
    )


def commit_case(
    dtype: torch.dtype,
    device: torch.device,
    nodes: int,
    counts: tuple[int, ...],
    layers: int,
    heads: int,
    width: int,
) -> KernelOutcome:
    """Move the accepted path: cache, features and lengths, which are copies and must be equal."""
    batch = len(counts)
    steps = max(1, *counts)
    storage = torch.randn(layers, 2, batch, 300 + nodes, heads, width, device=device).to(dtype)
    lengths = torch.randint(0, 300, (batch,), device=device)
    moves = torch.stack([torch.randperm(nodes)[:steps].sort().values for _ in counts]).to(device)
    hidden = torch.randn(batch, nodes, 3, heads * width, device=device).to(dtype)
    new_features = hidden.new_full((batch, steps, *hidden.shape[2:]), float("nan"))
    wide = (
        storage.double(),
        lengths.clone(),
        moves,
        torch.tensor(counts, device=device),
        hidden.double(),
        new_features.double(),
    )
    kv_commit.kv_commit_reference(*wide)
    kv_commit.kv_commit(storage, lengths, moves, wide[3], hidden, new_features)
    names = ("storage", "lengths", "fresh")
    outputs = dict(zip(names, (storage, lengths, new_features)))
    return KernelOutcome(
        outputs, dict(zip(names, (wide[0], wide[1], wide[4 + 1]))), runs_on(storage.device)
    )


def append_case(
    dtype: torch.dtype, device: torch.device, batch: int, nodes: int, heads: int, width: int
) -> KernelOutcome:
    """Write new keys and values after ragged rows: copies, which must be equal."""
    store = torch.randn(2, batch, 300 + nodes, heads, width, device=device).to(dtype)
    keys, values = (
        torch.randn(batch, nodes, heads, width, device=device).to(dtype).transpose(1, 2)
        for _ in range(2)
    )
    lengths = torch.randint(0, 290, (batch,), device=device)
    wide = store.double()
    kv_append.kv_append_reference(wide, keys.double(), values.double(), lengths, 10)
    kv_append.kv_append(store, keys, values, lengths, 10)
    return KernelOutcome({"store": store}, {"store": wide}, runs_on(store.device))


def emit_case(
    dtype: torch.dtype, device: torch.device, counts: tuple[int, ...], nodes: int, stops: int
) -> KernelOutcome:
    """Commit a round's tokens: its emitted tokens, the changed texts and the round's log, equal
    in every dtype.
    """
    batch = len(counts)
    steps = max(counts)
    tree = random_tree(batch, nodes, device)
    path = torch.stack([torch.randperm(nodes)[:steps].sort().values for _ in counts]).to(device)
    rows = torch.arange(batch, device=device)
    numbers = tree.tokens % 50, path, torch.tensor(counts, device=device), rows % 50
    trees = round_commit.LoggedTrees(tree.depths, tree.valid, tree.tokens % 2 > 0)
    outputs: list[dict[str, Tensor]] = []
    for commit in (round_commit.round_commit, round_commit.round_commit_reference):
        texts = token_commit.TextBatch(
            rows.new_zeros(batch, 400),
            3 * rows,
            rows % 3 != 1,
            5 + 3 * rows,
            torch.arange(stops, device=device),
        )
        buffers = round_commit.RoundBuffers(
            rows.new_zeros(4, batch, steps + 4),
            rows.new_full((batch,), 6),
            torch.zeros_like(path),
            torch.zeros_like(rows),
        )
        tokens, *verdict = numbers
        emitted, counts_left = commit(
            tokens, round_commit.Verdicts(*verdict), trees, texts, buffers
        )
        drafted = {"path_tokens": buffers.path_tokens, "path_counts": buffers.path_counts}
        record = {"lines": buffers.lines, "next_lines": buffers.next_lines}
        record |= {name: part for name, part in drafted.items() if part is not None}
        outputs.append({"emitted": emitted, "kept": counts_left, **texts._asdict(), **record})
    actual, expected = outputs
    return KernelOutcome(actual, expected, runs_on(device))


def children_case(
    dtype: torch.dtype, device: torch.device, batch: int, frontier: int, width: int, vocab: int
) -> KernelOutcome:
    """Append the likeliest children of a level: the same tokens and parents as by a sort in
    float64, on logits apart enough for any rounding.
    """
    order = torch.stack([torch.randperm(vocab) for _ in range(batch * frontier)])
    logits = torch.zeros(batch * frontier, vocab).scatter_(
        1, order[:, : 4 * width], torch.arange(4 * width, 0, -1).float().expand(len(order), -1)
    )
    logits[:, : vocab // 3] -= 50  # which leaves some parts without a likely token
    logits = logits.view(batch, frontier, vocab).to(device, dtype)
    tokens = torch.randint(0, 50, (batch, frontier + 1), device=device)
    nodes = append_children.Nodes(
        tokens, tokens - 1, -torch.rand(batch, frontier + 1, device=device)
    )
    ids = torch.randperm(vocab, device=device)
    nodes_before = torch.arange(frontier, device=device).expand(batch, -1).contiguous()
    outputs: list[dict[str, Tensor]] = []
    for append in (append_children.append_children, append_children.append_children_reference):
        grown = append(logits, width, ids, nodes_before, nodes)
        outputs.append(grown._asdict())
    actual, expected = outputs
    return KernelOutcome(actual, expected, append_children.can_append(device, width))


def step_case(
    dtype: torch.dtype,
    device: torch.device,
    batch: int,
    nodes: int,
    width: int,
    heads: tuple[int, int, int],
) -> KernelOutcome:
    """Compute what lies between the products of a draft step: inputs of nodes and of accepted
    tokens, norms, rotation and gated unit, for query heads, key-value heads and a head size, and
    the selection of nodes."""
    num_heads, kv_heads, size = heads
    wide = torch.float64

    def draw(*shape: int) -> tuple[Tensor, Tensor]:
        rounded = torch.randn(*shape, device=device).to(dtype)
        return rounded, rounded.to(wide)

    embedding, norms = draw(50, width), draw(2, width)
    x, residual = draw(batch, nodes, width), draw(batch, nodes, width)
    states = draw(batch, 1 + nodes, width)
    queries, values = draw(batch, nodes, num_heads * size), draw(batch, nodes, kv_heads * size)
    table = draw(99, 2, size // 2)
    slots = draw(2, batch, 200, kv_heads, size)
    tokens = torch.randint(0, 50, (batch, nodes), device=device)
    text = torch.randint(0, 50, (batch, 99), device=device)
    lengths = torch.randint(nodes, 60, (batch,), device=device)
    words = torch.zeros(batch, 1 + nodes, -(-nodes // 64), dtype=torch.int64, device=device)
    tree = random_tree(batch, 4 * nodes, device)
    scores = (-tree.depths - tree.tokens % 2).float()
    outputs: list[dict[str, Tensor]] = []
    for kind, by_kernels in enumerate((True, False)):
        suffix = "" if by_kernels else "_reference"
        layers = draft_input.InputLayers(
            embedding[kind], norms[kind][0], norms[kind][1], 1e-5, False
        )
        rows = draft_input.DraftedRows(
            states[kind].clone(), words.clone(), torch.zeros_like(words[..., 0])
        )
        inputs = getattr(draft_input, f"node_input{suffix}")(
            tokens, torch.zeros_like(tokens), lengths, rows, 1, layers
        )
        read = getattr(draft_input, f"accepted_input{suffix}")(
            text, lengths, lengths - lengths // 2, lengths, x[kind], layers
        )
        sums = x[kind], residual[kind], norms[kind][0], 1e-5
        total, normed = getattr(add_norm, f"add_norm{suffix}")(*sums)
        getattr(add_norm, f"store_states{suffix}")(rows.states, *sums, 1, None, False)
        store = slots[kind].clone()
        rotated = getattr(rotate_append, f"rotate_append{suffix}")(
            store, queries[kind], values[kind], values[kind], table[kind], tokens, lengths, 3
        )
        cos, sin = table[kind][tokens].unbind(2)
        store_by_angles = slots[kind].clone()
        rotated_by_angles = getattr(rotate_append, f"rotate_append_angles{suffix}")(
            store_by_angles, queries[kind], values[kind], values[kind], cos, sin, lengths, 3
        )
        nodes_of_tree = append_children.Nodes(tree.tokens, tree.parents, scores)
        best = getattr(tree_selection, f"select_best{suffix}")(nodes_of_tree, nodes)
        mask, depths = getattr(tree_masks, f"find_ancestors{suffix}")(tree.parents, 4 * nodes)
        frontier = getattr(tree_selection, f"select_frontier{suffix}")(
            tree.tokens, scores, 1, 2, 1, min(nodes, 8)
        )
        outputs.append(
            {
                **{f"node {name}": part for name, part in inputs._asdict().items()},
                **{f"read {name}": part for name, part in read._asdict().items()},
                **{f"row {name}": part for name, part in rows._asdict().items()},
                **{f"best {name}": part for name, part in best._asdict().items()},
                **{f"frontier {name}": part for name, part in frontier._asdict().items()},
                "mask": mask,
                "depths": depths,
                "words": getattr(tree_masks, f"pack_words{suffix}")(mask),
                "total": total,
                "normed": normed,
                "unit": getattr(gated_unit, f"gated_unit{suffix}")(x[kind], residual[kind]),
                "rotated": rotated,
                "store": store,
                "rotated by angles": rotated_by_angles,
                "store by angles": store_by_angles,
            }
        )
    return KernelOutcome(outputs[0], outputs[1], runs_on(device))


def training_case(
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, int],
    width: int,
    heads: tuple[int, int, int],
    steps: int,
) -> KernelOutcome:
    """Compute what lies between the products of a training, and its gradients: norms side by side,
    the gated unit, the rotation of query heads and key-value heads of a size, and the keys of later
    steps, over texts of equal length."""
    num_heads, kv_heads, size = heads
    wide = torch.float64

    def draw(*sizes: int) -> tuple[Tensor, Tensor]:
        rounded = torch.randn(*sizes, device=device).to(dtype)
        return rounded.requires_grad_(), rounded.detach().to(wide).requires_grad_()

    hidden, embedded, up = draw(*shape, width), draw(*shape, width), draw(*shape, width)
    weights = draw(2, width)
    products = [draw(*shape, count * size) for count in (num_heads, kv_heads, kv_heads)]
    angles = torch.rand(*shape, size // 2, device=device).mul(9).repeat(1, 1, 2)
    q, first, grad, grad_q = (draw(shape[0], num_heads, shape[1], size) for _ in range(4))
    later = [draw(shape[0], kv_heads, steps, shape[1], size) for _ in range(2)]
    lse = torch.randn(shape[0], num_heads, shape[1], device=device)
    outputs: list[dict[str, Tensor]] = []
    for kind, by_kernels in enumerate((True, False)):
        norms = [weights[kind][0], weights[kind][1]]
        rotation = products[0][kind], products[1][kind], products[2][kind]
        cos, sin = angles.cos(), angles.sin()
        if by_kernels:
            parts = [embedded[kind], hidden[kind]]
            joined, stream = norm_gradients.join_norms(parts, norms, [1e-5, 1e-5], dtype)
            unit = gated_unit.gated_unit(hidden[kind], up[kind])
            rotated = rotate_heads.rotate_heads(*rotation, cos, sin)
        else:
            stream = hidden[kind]
            normed = [
                x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
                for x, weight in zip((embedded[kind], stream), norms)
            ]
            joined = torch.cat(normed, dim=-1)
            unit = stream * stream.sigmoid() * up[kind]
            rotated = rotate_heads.rotate_heads_reference(*rotation, cos.to(wide), sin.to(wide))
        # Gradients of half their outputs' size, which differ by place.
        total = sum((part * part.detach()).sum() for part in (joined, unit, *rotated)) / 2
        leaves = [embedded[kind], hidden[kind], up[kind], weights[kind], *rotation]
        gradients = torch.autograd.grad(total + stream.sum(), leaves)
        tensors = q[kind].detach(), first[kind].detach()
        keys, values = (part[kind].detach() for part in later)
        rest = keys, values, grad_q[kind].detach().clone(), 0.5 * size**-0.5
        if by_kernels:
            attended, log_sum, share = later_keys.add_later_keys(
                *tensors, lse, keys, values, rest[-1]
            )
        else:
            attended, log_sum, share = later_keys.add_later_keys_reference(
                *tensors, lse.to(wide), keys, values, rest[-1]
            )
        through = later_keys.later_gradients(
            grad[kind].detach(), tensors[0], attended, (log_sum, share), *rest
        )
        outputs.append(
            {
                "joined": joined.detach(),
                "unit": unit.detach(),
                "attended": attended,
                "log-sum-exp": log_sum,
                **{f"rotated {number}": part.detach() for number, part in enumerate(rotated)},
                **{f"gradient {number}": part for number, part in enumerate(gradients)},
                **{f"later gradient {number}": part for number, part in enumerate(through)},
            }
        )
    return KernelOutcome(outputs[0], outputs[1], takes_gradients(q[0]))


def verify_case(
    dtype: torch.dtype,
    device: torch.device,
    rule: str,
    batch: int,
    nodes: int,
    vocab: int,
    truncation: tuple[int, float] = (0, 1.0),
) -> KernelOutcome:
    """Verify trees by a rule: path, counts and next token equal the reference's, on logits apart
    enough for any rounding.
    """
    tree = random_tree(batch, nodes, device)
    logits = torch.randn(batch, nodes, vocab, device=device).mul_(2).to(dtype)
    likely = logits.argmax(-1).gather(1, tree.parents.clamp(min=0))
    tokens = torch.where(torch.rand(batch, nodes, device=device) < 0.6, likely, tree.tokens % vocab)
    height = int(tree.depths.max())
    trees = tree_walks.TreeNodes(
        tokens, tree.parents, torch.ones_like(tokens, dtype=torch.bool), height, nodes
    )
    positions = 100 + tree.depths
    draws = tree_walks.SamplingSpec(
        host_key(9, 1), torch.arange(batch, device=device), positions, 0.5, *truncation
    )
    q = torch.randn(batch, nodes, vocab, device=device).softmax(-1)
    arguments: dict[str, tuple[Any, ...]] = {
        "greedy": (),
        "match": (draws,),
        "recursive": (q, None, False, draws),
    }
    poison_memory(device, batch * nodes * 8, batch * vocab * 4)
    expected = getattr(tree_walks, f"tree_{rule}_reference")(trees, logits, *arguments[rule])
    outputs = getattr(tree_recursive if rule == "recursive" else tree_verify, f"tree_{rule}")(
        trees, logits, *arguments[rule]
    )
    return KernelOutcome(outputs._asdict(), expected._asdict(), tree_verify.can_run_kernel(logits))


CHECKS: dict[str, KernelCheck] = {
    "tree_attention": KernelCheck(
        (tree_attention,),
        {
            "B=1 prefix=8192 N=1": partial(attention_case, lengths=(8192,), nodes=1),
            "B=1 prefix=8192 N=64": partial(attention_case, lengths=(8192,), nodes=64),
            "B=1 prefix=32768 N=16": partial(attention_case, lengths=(32768,), nodes=16),
            "B=8 ragged to 1000 N=64": partial(
                attention_case, lengths=(1000, 0, 1, 63, 64, 65, 300, 999), nodes=64
            ),
            "B=3 ragged to 300 N=100 D=64": partial(
                attention_case, lengths=(300, 7, 128), nodes=100, heads=(8, 8), widths=(64, 64)
            ),
            "28 to 4 heads": partial(attention_case, lengths=(1000, 150), nodes=64, heads=(28, 4)),
            "16 to 2 heads of 256": partial(
                attention_case, lengths=(1000, 150), nodes=64, heads=(16, 2), widths=(256, 256)
            ),
            "8 heads of 80": partial(
                attention_case, lengths=(1000, 150), nodes=64, heads=(8, 8), widths=(80, 80)
            ),
            "window 200": partial(attention_case, lengths=(1000, 150), nodes=64, window=200),
            "softcap 2": partial(attention_case, lengths=(1000, 150), nodes=64, softcap=2.0),
            "sinks, window 128, 64 heads of 64": partial(
                attention_case,
                lengths=(1000, 150),
                nodes=64,
                heads=(64, 8),
                widths=(64, 64),
                window=128,
                sinks=True,
            ),
            "keys of 192, values of 128": partial(
                attention_case, lengths=(1000, 150), nodes=64, heads=(16, 16), widths=(192, 128)
            ),
        },
        {
            "B=1 N=1": partial(
                attention_case, lengths=(70,), nodes=1, heads=(4, 2), widths=(16, 16)
            ),
            "B=2 ragged N=9": partial(
                attention_case, lengths=(65, 3), nodes=9, heads=(4, 2), widths=(16, 16)
            ),
            "sinks, narrow values": partial(
                attention_case, lengths=(65,), nodes=5, heads=(4, 2), widths=(24, 16), sinks=True
            ),
        },
        {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3},
    ),
    "row_kl": KernelCheck(
        (row_kl,),
        {
            "2048 rows, V=32000": partial(row_kl_case, rows=2048, vocab=32000),
            "512 rows, V=128256": partial(row_kl_case, rows=512, vocab=128256),
            "512 rows, V=128256, tokens": partial(
                row_kl_case, rows=512, vocab=128256, by_tokens=True
            ),
        },
        {
            "5 rows, V=300": partial(row_kl_case, rows=5, vocab=300),
            "tokens": partial(row_kl_case, rows=5, vocab=300, by_tokens=True),
        },
        {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3},
    ),
    "linear_divergence": KernelCheck(
        (linear_divergence, row_kl),
        {
            "1024 rows, D=1024, V=32000": partial(
                divergence_case, rows=1024, width=1024, vocab=32000
            )
        },
        {"9 rows, D=16, V=50": partial(divergence_case, rows=9, width=16, vocab=50)},
        {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2},
    ),
    "kv_commit": KernelCheck(
        (kv_commit,),
        {
            "32 layers, N=64": partial(
                commit_case, nodes=64, counts=(1, 5, 9, 33), layers=32, heads=8, width=128
            ),
            "3 layers, N=100": partial(
                commit_case, nodes=100, counts=(0, 100), layers=3, heads=2, width=80
            ),
        },
        {
            "2 layers, N=9": partial(
                commit_case, nodes=9, counts=(1, 4), layers=2, heads=2, width=16
            )
        },
    ),
    "kv_append": KernelCheck(
        (kv_append,),
        {
            "B=8 N=64": partial(append_case, batch=8, nodes=64, heads=8, width=128),
            "B=2 N=3, 5 heads of 96": partial(append_case, batch=2, nodes=3, heads=5, width=96),
        },
        {"B=2 N=3": partial(append_case, batch=2, nodes=3, heads=2, width=16)},
    ),
    "token_commit": KernelCheck(
        (token_commit, round_commit),
        {
            "B=8 N=64": partial(emit_case, counts=(1, 2, 3, 4, 5, 6, 7, 8), nodes=64, stops=2),
            "B=1 N=256": partial(emit_case, counts=(17,), nodes=256, stops=1),
        },
        {"B=2 N=9": partial(emit_case, counts=(1, 4), nodes=9, stops=2)},
    ),
    "draft_step": KernelCheck(
        (draft_input, add_norm, gated_unit, rotate_append, tree_masks, tree_selection),
        {
            "B=1 F=10, 8B": partial(step_case, batch=1, nodes=10, width=4096, heads=(32, 8, 128)),
            "B=3 F=30, heads of 80": partial(
                step_case, batch=3, nodes=30, width=1000, heads=(14, 2, 80)
            ),
        },
        {"B=2 F=3": partial(step_case, batch=2, nodes=3, width=24, heads=(4, 2, 16))},
        {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2},
    ),
    "training_step": KernelCheck(
        (norm_gradients, gated_unit, rotate_heads, later_keys),
        {
            "4 texts, 8B": partial(
                training_case, shape=(4, 512), width=4096, heads=(32, 8, 128), steps=6
            ),
            "ragged, heads of 80": partial(
                training_case, shape=(3, 77), width=1000, heads=(14, 2, 80), steps=1
            ),
            "1 token, heads of 256": partial(
                training_case, shape=(1, 1), width=8192, heads=(16, 2, 256), steps=3
            ),
        },
        {"2 texts": partial(training_case, shape=(2, 3), width=24, heads=(4, 2, 16), steps=2)},
        {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2},
    ),
    "append_children": KernelCheck(
        (append_children,),
        {
            "B=1 F=4 K=4, V=32000": partial(
                children_case, batch=1, frontier=4, width=4, vocab=32000
            ),
            "B=8 F=10 K=10, V=128256": partial(
                children_case, batch=8, frontier=10, width=10, vocab=128256
            ),
        },
        {"B=2 F=3 K=2, V=50": partial(children_case, batch=2, frontier=3, width=2, vocab=50)},
    ),
    "tree_verify": KernelCheck(
        (tree_verify, tree_recursive, sampling_cuts, tree_walks, counter),
        {
            "greedy, B=8 N=64": partial(
                verify_case, rule="greedy", batch=8, nodes=64, vocab=128256
            ),
            "greedy, B=1 N=256": partial(
                verify_case, rule="greedy", batch=1, nodes=256, vocab=32000
            ),
            "match, B=8 N=64": partial(verify_case, rule="match", batch=8, nodes=64, vocab=128256),
            "match, top-k 50 top-p 0.9": partial(
                verify_case, rule="match", batch=4, nodes=16, vocab=128256, truncation=(50, 0.9)
            ),
            "recursive, B=4 N=16": partial(
                verify_case, rule="recursive", batch=4, nodes=16, vocab=128256
            ),
        },
        {
            "greedy": partial(verify_case, rule="greedy", batch=2, nodes=9, vocab=50),
            "match, top-k 9": partial(
                verify_case, rule="match", batch=2, nodes=9, vocab=50, truncation=(9, 1.0)
            ),
            "recursive": partial(verify_case, rule="recursive", batch=2, nodes=5, vocab=50),
        },
    ),
}
"""Kernel -> its check."""


def iterate_cases(toy: bool = False) -> Iterator[tuple[str, KernelCheck, Case, torch.dtype]]:
    """Yield every case of every kernel in every dtype, with the name of its row in the results."""
    for kernel, check in CHECKS.items():
        for dtype in DTYPES:
            for name, case in (check.toy_cases if toy else check.cases).items():
                yield (
                    f"correctness/{kernel}/{str(dtype).removeprefix('torch.')}/{name}",
                    check,
                    case,
                    dtype,
                )
