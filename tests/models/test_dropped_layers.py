"""Layers that sequences drop equal x + M f(x) on the unmodified model, and cost only what the
remaining rows cost.
"""

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
# row 3 drops every layer, layer 1 is no row's
MIXED = torch.tensor([[0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 1, 1]]).bool()
SOME = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 1], [0, 1, 0, 1]]).bool()
# no row goes through the first layer
FIRST = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 0], [1, 1, 0, 1]]).bool()
MASKS = pytest.mark.parametrize(
    "dropped", [NONE, ALL, MIXED, SOME, FIRST], ids=["none", "all", "mixed", "some", "first"]
)


@pytest.fixture(scope="module", params=MODELS)
def models(request: pytest.FixtureRequest, tiny: Target) -> tuple[Target, Any]:
    """Every architecture in turn."""
    return build(request.param, MODELS[request.param], tiny)


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCAB, shape)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=2e-4, rtol=1e-4)


@contextmanager
def mask_layers(reference: Any, dropped: Tensor) -> Iterator[list[Tensor]]:
    """Every layer f of the unmodified model computes x + M (f(x) - x) for a row's M; yields the
    layers' outputs.
    """
    states: list[Tensor] = []

    def make_hook(layer: int) -> Any:
        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> Any:
            x = args[0] if args else kwargs["hidden_states"]
            f = (output[0] if isinstance(output, tuple) else output) - x
            states.append(x + (~dropped[layer])[:, None, None] * f)
            return (states[-1], *output[1:]) if isinstance(output, tuple) else states[-1]

        return hook

    handles = [
        layer.register_forward_hook(make_hook(n), with_kwargs=True)
        for n, layer in enumerate(reference.model.layers)
    ]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def record_attention(target: Target) -> Iterator[list[tuple[int, int]]]:
    """Record which layer's attention is called, with how many rows."""
    calls: list[tuple[int, int]] = []

    def make_hook(layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append((layer, len(args[0] if args else kwargs["hidden_states"])))

        return hook

    handles = [
        layer.self_attn.register_forward_pre_hook(make_hook(n), with_kwargs=True)
        for n, layer in enumerate(target.layers)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.sweep(12)
@MASKS
@pytest.mark.parametrize("length", [9, ROWS, 1])
def test_dropped_rows_equal_a_masked_model(
    models: tuple[Target, Any], dropped: Tensor, length: int
) -> None:
    """Every layer's features, and the logits, are those of x + M f(x), also where there are as
    many tokens as rows.
    """
    target, reference = models
    tokens = random_tokens(ROWS, length)
    with mask_layers(reference, dropped) as states, torch.no_grad():
        logits = reference(tokens, use_cache=False).logits
    actual = target.run(
        tokens, ForwardPlan(layers=EVERY, logits=True, span=LayerSpan(dropped=dropped))
    )
    assert actual.logits is not None
    for layer, state in enumerate(states):
        assert_close(actual.at_layer(layer + 1), state)
    assert_close(actual.at_layer(0), target.run(tokens, ForwardPlan(layers=(0,))).at_layer(0))
    assert_close(actual.logits, logits)


def test_dropping_layers_equals_a_loop_over_the_layers(models: tuple[Target, Any]) -> None:
    """Each row equals a loop over the layers that it does not drop."""
    target, _ = models
    tokens = random_tokens(ROWS, 9)
    actual = target.run(tokens, ForwardPlan(layers=EVERY, span=LayerSpan(dropped=MIXED)))
    for row in range(ROWS):
        state = target.run(tokens[row : row + 1], ForwardPlan(layers=(0,))).at_layer(0)
        for layer in range(LAYERS):
            if not MIXED[layer, row]:
                part = target.run(
                    tokens[row : row + 1],
                    ForwardPlan(
                        layers=(layer + 1,),
                        span=LayerSpan(first=layer, last=layer + 1, hidden=state),
                    ),
                )
                state = part.at_layer(layer + 1)
            assert_close(actual.at_layer(layer + 1)[row], state[0])
        assert_close(actual.at_layer("final")[row], target.apply_final_norm(state)[0])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi", "mixtral", "olmo2"])
@pytest.mark.parametrize("dropped", [MIXED, SOME, FIRST], ids=["mixed", "some", "first"])
def test_gradients_are_those_of_a_masked_model(name: str, dropped: Tensor, tiny: Target) -> None:
    """The gradient of every parameter, of a loss that reads every layer, is that of x + M f(x);
    none means zero.
    """
    target, reference = build(name, MODELS[name], tiny)
    tokens = random_tokens(ROWS, 7)
    weights = torch.randn(LAYERS, ROWS, 7, 32, dtype=target.dtype)
    target.requires_grad_(True)
    actual = target.run(
        tokens, ForwardPlan(layers=EVERY, logits=True, grad=True, span=LayerSpan(dropped=dropped))
    )
    assert actual.logits is not None
    (
        sum((actual.at_layer(n + 1) * weights[n]).sum() for n in range(LAYERS))
        + actual.logits.logsumexp(-1).sum()
    ).backward()
    reference.requires_grad_(True)
    with mask_layers(reference, dropped) as states:
        logits = reference(tokens, use_cache=False).logits
        loss = (
            sum((state * weight).sum() for state, weight in zip(states, weights))
            + logits.float().logsumexp(-1).sum()
        )
        loss.backward()  # type: ignore[union-attr]
    expected = dict(reference.named_parameters())
    nonzero = 0
    for path, parameter in target.model.named_parameters():
        gradient = expected[path].grad
        if gradient is None or parameter.grad is None:
            assert all(grad is None or not grad.any() for grad in (gradient, parameter.grad)), path
            continue
        assert_close(parameter.grad, gradient)
        nonzero += bool(gradient.any())
    assert nonzero > 10


@pytest.mark.sweep(12)
@MASKS
def test_a_layer_runs_only_the_rows_that_do_not_drop_it(
    models: tuple[Target, Any], dropped: Tensor
) -> None:
    """Attention of layer l is called once with as many rows as keep l, and not at all where none
    does.
    """
    target, _ = models
    with record_attention(target) as calls:
        target.run(
            random_tokens(ROWS, 6), ForwardPlan(layers=EVERY, span=LayerSpan(dropped=dropped))
        )
    counts = (~dropped).sum(1).tolist()
    assert calls == [(layer, rows) for layer, rows in enumerate(counts) if rows]


def test_skipped_layers_are_dropped_by_every_row(models: tuple[Target, Any]) -> None:
    """`skipped` is `dropped` for all rows, and both together are either."""
    target, _ = models
    tokens = random_tokens(ROWS, 6)
    both = SOME.clone()
    both[1] = True
    expected = target.run(tokens, ForwardPlan(layers=EVERY, span=LayerSpan(dropped=both)))
    with record_attention(target) as calls:
        actual = target.run(
            tokens, ForwardPlan(layers=EVERY, span=LayerSpan(skipped={1}, dropped=SOME))
        )
    assert torch.equal(actual.hidden, expected.hidden) and {layer for layer, _ in calls} == {0, 2}
    alone = NONE.clone()
    alone[1] = True
    skipped = target.run(tokens, ForwardPlan(layers=EVERY, span=LayerSpan(skipped=(1,))))
    assert_close(
        skipped.hidden,
        target.run(tokens, ForwardPlan(layers=EVERY, span=LayerSpan(dropped=alone))).hidden,
    )


def test_rows_do_not_see_each_other(models: tuple[Target, Any]) -> None:
    """A row's features with its own mask are what it gives alone, and another order of rows
    orders them so.
    """
    target, _ = models
    tokens = random_tokens(ROWS, 6)
    order = torch.tensor([2, 0, 3, 1])
    together = target.run(tokens, ForwardPlan(layers=EVERY, span=LayerSpan(dropped=SOME))).hidden
    assert_close(
        target.run(
            tokens[order], ForwardPlan(layers=EVERY, span=LayerSpan(dropped=SOME[:, order]))
        ).hidden,
        together[order],
    )
    for row in range(ROWS):
        alone = target.run(
            tokens[row : row + 1],
            ForwardPlan(layers=EVERY, span=LayerSpan(dropped=SOME[:, row : row + 1])),
        ).hidden
        assert_close(alone[0], together[row])


def test_dropping_layers_leaves_the_model_unchanged(models: tuple[Target, Any]) -> None:
    """After a run with dropped rows, also one that broke, no layer has another forward and a
    plain run says the same.
    """
    target, _ = models
    tokens = random_tokens(ROWS, 6)
    before = target.run(tokens, ForwardPlan(layers=EVERY, logits=True))
    target.run(tokens, ForwardPlan(layers=EVERY, span=LayerSpan(dropped=MIXED)))

    def raise_error(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        raise ZeroDivisionError

    handle = target.layers[-1].register_forward_hook(raise_error)
    with pytest.raises(ZeroDivisionError):
        target.run(tokens, ForwardPlan(span=LayerSpan(dropped=MIXED)))
    handle.remove()
    assert not any("forward" in layer.__dict__ for layer in target.layers)
    after = target.run(tokens, ForwardPlan(layers=EVERY, logits=True))
    assert before.logits is not None and after.logits is not None
    assert torch.equal(before.hidden, after.hidden) and torch.equal(before.logits, after.logits)


def test_final_norm_of_any_layer_equals_the_models(models: tuple[Target, Any]) -> None:
    """`apply_final_norm` is the model's own norm layer on the states, with its gradient, and
    runs no layer.
    """
    target, reference = models
    hidden = torch.randn(2, 5, 32, dtype=target.dtype)
    norm = reference.model.final_layernorm if target.name == "phi" else reference.model.norm
    first = hidden.clone().requires_grad_(True)
    second = hidden.clone().requires_grad_(True)
    with record_attention(target) as calls:
        actual = target.apply_final_norm(first, grad=True)
    expected = norm(second)
    assert not calls
    assert_close(actual.detach(), expected.detach())
    weights = torch.randn_like(actual)
    assert_close(
        *(
            torch.autograd.grad((value * weights).sum(), leaf)[0]
            for value, leaf in ((actual, first), (expected, second))
        )
    )
    assert not target.apply_final_norm(first).requires_grad
