"""Layers that sequences drop equal x + M f(x) on the unmodified model, and cost only what the kept rows cost."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Olmo2Config

from spectrain.models.forward_plan import ForwardPlan, LayerSpan
from spectrain.models.target import Target

from .test_target import ARCHITECTURES, EVERY, LAYERS, SIZE, VOCAB, build

MODELS = {**ARCHITECTURES, "olmo2": Olmo2Config(**SIZE)}  # whose norms come after the layers' parts
ROWS = 4
NONE = torch.zeros(LAYERS, ROWS, dtype=torch.bool)
ALL = torch.ones(LAYERS, ROWS, dtype=torch.bool)
MIXED = torch.tensor([[0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 1, 1]]).bool()  # row 3 drops every layer, layer 1 is no row's
SOME = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 1], [0, 1, 0, 1]]).bool()
FIRST = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 0], [1, 1, 0, 1]]).bool()  # no row goes through the first layer
MASKS = pytest.mark.parametrize("dropped", [NONE, ALL, MIXED, SOME, FIRST], ids=["none", "all", "mixed", "some", "first"])


@pytest.fixture(scope="module", params=MODELS)
def models(request: pytest.FixtureRequest, tiny: Target) -> tuple[Target, Any]:
    """Every architecture in turn."""
    return build(request.param, MODELS[request.param], tiny)


def words(*shape: int) -> Tensor:
    return torch.randint(3, VOCAB, shape)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=2e-4, rtol=1e-4)


@contextmanager
def masked(reference: Any, dropped: Tensor) -> Iterator[list[Tensor]]:
    """Every layer f of the unmodified model computes x + M (f(x) - x) for a row's M; yields the layers' outputs."""
    states: list[Tensor] = []

    def mask(layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            x = args[0] if args else kwargs["hidden_states"]
            f = (output[0] if isinstance(output, tuple) else output) - x
            states.append(x + (~dropped[layer])[:, None, None] * f)
            return (states[-1], *output[1:]) if isinstance(output, tuple) else states[-1]

        return hook

    handles = [layer.register_forward_hook(mask(n), with_kwargs=True) for n, layer in enumerate(reference.model.layers)]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def attended(target: Target) -> Iterator[list[tuple[int, int]]]:
    """Which layer's attention is called, with how many rows."""
    calls: list[tuple[int, int]] = []

    def count(layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append((layer, len(args[0] if args else kwargs["hidden_states"])))

        return hook

    handles = [layer.self_attn.register_forward_pre_hook(count(n), with_kwargs=True) for n, layer in enumerate(target.layers)]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.sweep(12)
@MASKS
@pytest.mark.parametrize("length", [9, ROWS, 1])
def test_dropped_rows_equal_a_masked_model(models: tuple[Target, Any], dropped: Tensor, length: int) -> None:
    """Every layer's features, and the logits, are those of x + M f(x), also where there are as many tokens as rows."""
    target, reference = models
    tokens = words(ROWS, length)
    with masked(reference, dropped) as states, torch.no_grad():
        logits = reference(tokens, use_cache=False).logits
    found = target.run(tokens, ForwardPlan(layers=EVERY, logits=True, span=LayerSpan(dropped=dropped)))
    assert found.logits is not None
    for layer, state in enumerate(states):
        close(found.at_layer(layer + 1), state)
    close(found.at_layer(0), target.run(tokens, ForwardPlan(layers=(0,))).at_layer(0))
    close(found.logits, logits)


def test_dropping_layers_equals_a_loop_over_the_layers(models: tuple[Target, Any]) -> None:
    """Row by row, the layers that the row keeps, one after another, and no other."""
    target, _ = models
    tokens = words(ROWS, 9)
    found = target.run(tokens, ForwardPlan(layers=EVERY, span=LayerSpan(dropped=MIXED)))
    for row in range(ROWS):
        state = target.run(tokens[row : row + 1], ForwardPlan(layers=(0,))).at_layer(0)
        for layer in range(LAYERS):
            if not MIXED[layer, row]:
                part = target.run(
                    tokens[row : row + 1],
                    ForwardPlan(layers=(layer + 1,), span=LayerSpan(first=layer, last=layer + 1, hidden=state)),
                )
                state = part.at_layer(layer + 1)
            close(found.at_layer(layer + 1)[row], state[0])
        close(found.at_layer("final")[row], target.apply_final_norm(state)[0])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi", "mixtral", "olmo2"])
@pytest.mark.parametrize("dropped", [MIXED, SOME, FIRST], ids=["mixed", "some", "first"])
def test_gradients_are_those_of_a_masked_model(name: str, dropped: Tensor, tiny: Target) -> None:
    """The gradient of every parameter, of a loss that reads every layer, is that of x + M f(x); none means zero."""
    target, reference = build(name, MODELS[name], tiny)
    tokens = words(ROWS, 7)
    weights = torch.randn(LAYERS, ROWS, 7, 32, dtype=target.dtype)
    target.requires_grad_(True)
    found = target.run(tokens, ForwardPlan(layers=EVERY, logits=True, grad=True, span=LayerSpan(dropped=dropped)))
    assert found.logits is not None
    (sum((found.at_layer(n + 1) * weights[n]).sum() for n in range(LAYERS)) + found.logits.logsumexp(-1).sum()).backward()
    reference.requires_grad_(True)
    with masked(reference, dropped) as states:
        logits = reference(tokens, use_cache=False).logits
        loss = sum((state * weight).sum() for state, weight in zip(states, weights)) + logits.float().logsumexp(-1).sum()
        loss.backward()  # type: ignore[union-attr]
    expected = dict(reference.named_parameters())
    nonzero = 0
    for path, parameter in target.model.named_parameters():
        wanted = expected[path].grad
        if wanted is None or parameter.grad is None:
            assert all(grad is None or not grad.any() for grad in (wanted, parameter.grad)), path
            continue
        close(parameter.grad, wanted)
        nonzero += bool(wanted.any())
    assert nonzero > 10


@pytest.mark.sweep(12)
@MASKS
def test_a_layer_runs_only_the_rows_that_do_not_drop_it(models: tuple[Target, Any], dropped: Tensor) -> None:
    """Attention of layer l is called once with as many rows as keep l, and not at all where none does."""
    target, _ = models
    with attended(target) as calls:
        target.run(words(ROWS, 6), ForwardPlan(layers=EVERY, span=LayerSpan(dropped=dropped)))
    kept = (~dropped).sum(1).tolist()
    assert calls == [(layer, rows) for layer, rows in enumerate(kept) if rows]


def test_skipped_layers_are_dropped_by_every_row(models: tuple[Target, Any]) -> None:
    """`skipped` is `dropped` for all rows, and both together are either."""
    target, _ = models
    tokens = words(ROWS, 6)
    both = SOME.clone()
    both[1] = True
    wanted = target.run(tokens, ForwardPlan(layers=EVERY, span=LayerSpan(dropped=both)))
    with attended(target) as calls:
        found = target.run(tokens, ForwardPlan(layers=EVERY, span=LayerSpan(skipped={1}, dropped=SOME)))
    assert torch.equal(found.hidden, wanted.hidden) and {layer for layer, _ in calls} == {0, 2}
    alone = NONE.clone()
    alone[1] = True
    skipped = target.run(tokens, ForwardPlan(layers=EVERY, span=LayerSpan(skipped=(1,))))
    close(skipped.hidden, target.run(tokens, ForwardPlan(layers=EVERY, span=LayerSpan(dropped=alone))).hidden)


def test_rows_do_not_see_each_other(models: tuple[Target, Any]) -> None:
    """A row's features with its own mask are what it gives alone, and another order of rows orders them so."""
    target, _ = models
    tokens, order = words(ROWS, 6), torch.tensor([2, 0, 3, 1])
    whole = target.run(tokens, ForwardPlan(layers=EVERY, span=LayerSpan(dropped=SOME))).hidden
    close(target.run(tokens[order], ForwardPlan(layers=EVERY, span=LayerSpan(dropped=SOME[:, order]))).hidden, whole[order])
    for row in range(ROWS):
        alone = target.run(
            tokens[row : row + 1], ForwardPlan(layers=EVERY, span=LayerSpan(dropped=SOME[:, row : row + 1]))
        ).hidden
        close(alone[0], whole[row])


def test_dropping_layers_leaves_the_model_unchanged(models: tuple[Target, Any]) -> None:
    """After a run with dropped rows, also one that broke, no layer has another forward and a plain run says the same."""
    target, _ = models
    tokens = words(ROWS, 6)
    before = target.run(tokens, ForwardPlan(layers=EVERY, logits=True))
    target.run(tokens, ForwardPlan(layers=EVERY, span=LayerSpan(dropped=MIXED)))

    def fail(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        raise ZeroDivisionError

    handle = target.layers[-1].register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        target.run(tokens, ForwardPlan(span=LayerSpan(dropped=MIXED)))
    handle.remove()
    assert not any("forward" in layer.__dict__ for layer in target.layers)
    after = target.run(tokens, ForwardPlan(layers=EVERY, logits=True))
    assert before.logits is not None and after.logits is not None
    assert torch.equal(before.hidden, after.hidden) and torch.equal(before.logits, after.logits)


def test_final_norm_of_any_layer_equals_the_models(models: tuple[Target, Any]) -> None:
    """`normed` is the model's own norm layer on the states, with its gradient, and runs no layer."""
    target, reference = models
    hidden = torch.randn(2, 5, 32, dtype=target.dtype)
    norm = reference.model.final_layernorm if target.name == "phi" else reference.model.norm
    one, two = hidden.clone().requires_grad_(True), hidden.clone().requires_grad_(True)
    with attended(target) as calls:
        found = target.apply_final_norm(one, grad=True)
    wanted = norm(two)
    assert not calls
    close(found.detach(), wanted.detach())
    weights = torch.randn_like(found)
    close(*(torch.autograd.grad((value * weights).sum(), leaf)[0] for value, leaf in ((found, one), (wanted, two))))
    assert not target.apply_final_norm(one).requires_grad
