"""The target, on cached trees or some layers only, equals the unmodified model run over whole
sequences.
"""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import AutoModelForCausalLM

from spectrain.errors import UserError
from spectrain.models.architectures.probe import explain_incompatibility
from spectrain.models.cache_types import KeyValueShape
from spectrain.models.forward_plan import ForwardPlan, LayerSpan
from spectrain.models.kv_cache import TreeCache
from spectrain.models.loading import load_hf
from spectrain.models.target import Target
from spectrain.trees.token_tree import TokenTree

VOCAB = 64
LAYERS = 3
WINDOW = 5
EVERY: tuple[Any, ...] = (*range(LAYERS + 1), "final")
SIZE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA: dict[str, Any] = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
SHARED: dict[str, Any] = {
    "num_experts": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}

ARCHITECTURES: dict[str, Any] = {
    "llama": hf.LlamaConfig(**SIZE),
    "mistral": hf.MistralConfig(**SIZE, sliding_window=WINDOW),
    "qwen2": hf.Qwen2Config(
        **SIZE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": hf.Qwen3Config(**SIZE, head_dim=16),
    "gemma": hf.GemmaConfig(**SIZE, head_dim=8),
    "gemma2": hf.Gemma2Config(
        **SIZE, **GEMMA, attn_logit_softcapping=1.5, final_logit_softcapping=2.0
    ),
    "gemma3": hf.Gemma3TextConfig(**SIZE, **GEMMA, layer_types=MIXED),
    "phi": hf.PhiConfig(**SIZE),
    "phi3": hf.Phi3Config(**SIZE, sliding_window=WINDOW),
    "mixtral": hf.MixtralConfig(**SIZE, **EXPERTS, num_local_experts=4),
    "qwen2_moe": hf.Qwen2MoeConfig(**SIZE, **EXPERTS, **SHARED),
}
SCALED: dict[str, Any] = {  # their output layer's logits are multiplied by a setting
    "granite": hf.GraniteConfig(
        **SIZE, logits_scaling=4.0, residual_multiplier=0.5, attention_multiplier=0.3
    ),
    "cohere": hf.CohereConfig(**SIZE, logit_scale=0.25),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "doge": (hf.DogeConfig(**SIZE, keep_window_size=4), "features differ"),
    "openai-gpt": (
        hf.OpenAIGPTConfig(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4),
        "no argument named past_key_values, cache_params or cache, so it takes no cache",
    ),
}


def build(name: str, config: Any, tiny: Target) -> tuple[Target, Any]:
    """A target with random weights and the same model, eager and unmodified."""
    torch.manual_seed(0)
    # experts have no float64
    dtype = torch.float32 if "moe" in name or name == "mixtral" else torch.float64
    reference, model = (
        AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=attention, dtype=dtype
        ).eval()
        for attention in ("eager", "spectrain")
    )
    # large, so that attention is sharp and a wrong mask shows
    for parameter in reference.parameters():
        noise = torch.randn_like(parameter)
        parameter.data = (
            1.5 * noise * parameter.shape[-1] ** -0.5
            if noise.dim() > 1
            else parameter.data + 0.1 * noise
        )
    model.load_state_dict(reference.state_dict())
    return Target(model, tiny.tokenizer, name, ""), reference


@pytest.fixture(scope="module", params=ARCHITECTURES)
def models(request: pytest.FixtureRequest, tiny: Target) -> tuple[Target, Any]:
    """Every architecture in turn."""
    return build(request.param, ARCHITECTURES[request.param], tiny)


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2", "gemma3"])
def target(request: pytest.FixtureRequest, tiny: Target) -> Target:
    """The architectures that differ in what attention sees."""
    return build(request.param, ARCHITECTURES[request.param], tiny)[0]


def assert_close(actual: Tensor | None, expected: Tensor | None) -> None:
    assert actual is not None and expected is not None
    assert expected.std() > 0.1
    torch.testing.assert_close(actual.float(), expected.float(), atol=1e-4, rtol=1e-4)


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCAB, shape)


@torch.no_grad()
def logits_after(reference: Any, sequences: list[list[int]]) -> Tensor:
    """Return the unmodified model's logits after each sequence, [S, V]."""
    longest = max(len(sequence) for sequence in sequences)
    batch = torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in sequences])
    logits: Tensor = reference(batch, use_cache=False).logits
    return logits[
        torch.arange(len(sequences)), torch.tensor([len(sequence) - 1 for sequence in sequences])
    ]


def random_tree(batch: int, num_nodes: int, chain: int = 1) -> TokenTree:
    """Trees that differ from row to row; the first `chain` nodes are one path."""
    index = torch.arange(num_nodes)
    parents = (torch.rand(batch, num_nodes) * index).long()
    parents[:, :chain] = index[:chain] - 1
    return TokenTree.from_parents(random_tokens(batch, num_nodes), parents)


def path_to(tree: TokenTree, row: int, node: int) -> list[int]:
    return [int(index) for index in tree.ancestors[row, node].nonzero()]


def random_paths(tree: TokenTree) -> tuple[Tensor, Tensor]:
    """Return for every row a padded path from the root, and how much of it is accepted; the last
    row accepts nothing.
    """
    batch, num_nodes = tree.tokens.shape
    paths = torch.zeros(batch, num_nodes, dtype=torch.int64)
    counts = torch.zeros(batch, dtype=torch.int64)
    for row in range(batch):
        path = path_to(tree, row, int(torch.randint(num_nodes // 2, num_nodes, ())))
        paths[row, : len(path)] = torch.tensor(path)
        counts[row] = 0 if row == 2 else len(path)
    return paths, counts


def prefill_cache(target: Target, lengths: list[int], prompts: Tensor) -> TreeCache:
    cache = target.new_cache(len(lengths), 48)
    target.prefill(prompts, torch.tensor(lengths), cache, ())
    return cache


@pytest.mark.parametrize("lengths", [[9], [4, 9, 7]])
def test_verified_trees_equal_sequential_paths(
    models: tuple[Target, Any], lengths: list[int]
) -> None:
    """Prefill and, over three rounds of verify and commit, every node answer as the model does
    to the path so far.
    """
    target, reference = models
    prompts = random_tokens(len(lengths), max(lengths))
    texts = [prompt[:length].tolist() for prompt, length in zip(prompts, lengths)]
    cache = target.new_cache(len(lengths), 48)
    outputs = target.prefill(prompts, torch.tensor(lengths), cache, ())
    assert outputs.logits is not None
    assert_close(outputs.logits[:, 0], logits_after(reference, texts))
    for num_nodes in (10, 1, 8):
        tree = random_tree(len(lengths), num_nodes)
        sequences = [
            texts[row] + tree.tokens[row, path_to(tree, row, node)].tolist()
            for row in range(len(lengths))
            for node in range(num_nodes)
        ]
        outputs = target.verify(tree, cache)
        assert_close(
            outputs.logits, logits_after(reference, sequences).view(len(lengths), num_nodes, VOCAB)
        )
        paths, counts = random_paths(tree)
        cache.commit(paths, counts)
        texts = [
            text + tree.tokens[row, paths[row, : counts[row]]].tolist()
            for row, text in enumerate(texts)
        ]
        assert cache.lengths.tolist() == [len(text) for text in texts] and cache.uncommitted == 0


@pytest.mark.parametrize("lengths", [[9], [4, 9, 7]])
def test_a_tree_in_stages_equals_a_single_stage(target: Target, lengths: list[int]) -> None:
    """A chain, appended in two calls with neither mask nor positions, and two more levels equal
    the whole tree, then commit.
    """
    prompts = random_tokens(len(lengths), max(lengths))
    tree = random_tree(len(lengths), 10, chain=4)
    full = prefill_cache(target, lengths, prompts)
    staged = prefill_cache(target, lengths, prompts)
    expected = target.verify(tree, full).logits
    positions = staged.lengths[:, None] + tree.depths
    parts = [
        target.run(tree.tokens[:, new], ForwardPlan(logits=True, cache=staged)).logits
        for new in (slice(0, 2), slice(2, 4))
    ]
    for new in (slice(4, 6), slice(6, 10)):
        mask = tree.ancestors[:, new, : new.stop]
        parts.append(
            target.run(
                tree.tokens[:, new],
                ForwardPlan(logits=True, positions=positions[:, new], mask=mask, cache=staged),
            ).logits
        )
    assert_close(torch.cat([part for part in parts if part is not None], dim=1), expected)
    paths, counts = random_paths(tree)
    for cache in (full, staged):
        cache.commit(paths, counts)
    following = random_tree(len(lengths), 4)
    assert_close(target.verify(following, staged).logits, target.verify(following, full).logits)


def test_a_discarded_tree_leaves_no_trace(target: Target) -> None:
    """After `forget` the next tree is verified as if the last one had not been."""
    prompts = random_tokens(3, 9)
    tree = random_tree(3, 6)
    cache = prefill_cache(target, [4, 9, 7], prompts)
    target.verify(random_tree(3, 8), cache)
    cache.roll_back()
    assert_close(
        target.verify(tree, cache).logits,
        target.verify(tree, prefill_cache(target, [4, 9, 7], prompts)).logits,
    )


def test_features_equal_hidden_states(models: tuple[Target, Any]) -> None:
    """Layer k is `hidden_states[k]`, L the last layer's output before the norm, "final" the
    norm's output.
    """
    target, reference = models
    tokens = random_tokens(2, 11)
    outputs = []
    handle = reference.model.layers[-1].register_forward_hook(
        lambda module, args, output: outputs.append(output)
    )
    with torch.no_grad():
        states = reference(tokens, output_hidden_states=True, use_cache=False).hidden_states
    handle.remove()
    unnormed = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    features = target.features(tokens, EVERY)
    assert features.logits is None
    for layer in range(LAYERS):
        assert_close(features.at_layer(layer), states[layer])
    assert_close(features.at_layer(LAYERS), unnormed)
    assert_close(features.at_layer("final"), states[-1])
    assert (features.at_layer(LAYERS) - features.at_layer("final")).abs().max() > 0.1


def test_cached_features_equal_uncached_ones(models: tuple[Target, Any]) -> None:
    """Prefill and then a chain capture what one run over the whole sequence does."""
    target, _ = models
    tokens = random_tokens(2, 11)
    cache = target.new_cache(2, 16)
    prompt = target.prefill(tokens[:, :7], torch.tensor([7, 7]), cache, EVERY)
    chain = target.verify(TokenTree.from_chain(tokens[:, 7:]), cache, EVERY)
    assert_close(
        torch.cat([prompt.hidden, chain.hidden], dim=1), target.features(tokens, EVERY).hidden
    )


@pytest.mark.sweep(8)
@pytest.mark.parametrize("middle", range(LAYERS + 1))
def test_two_partial_runs_equal_a_full_run(models: tuple[Target, Any], middle: int) -> None:
    """Layers up to `middle`, then the others from what these gave; an early exit reads the final
    norm of `middle`.
    """
    target, reference = models
    tokens = random_tokens(2, 11)
    full = target.run(tokens, ForwardPlan(layers=EVERY, logits=True))
    early = target.run(tokens, ForwardPlan(layers=(middle, "final"), span=LayerSpan(last=middle)))
    late = target.run(
        tokens,
        ForwardPlan(
            layers=EVERY[middle:],
            logits=True,
            span=LayerSpan(first=middle, hidden=early.at_layer(middle)),
        ),
    )
    assert_close(early.at_layer(middle), full.at_layer(middle))
    assert_close(late.hidden, full.hidden[:, :, middle:])
    assert_close(late.logits, full.logits)
    norm = reference.model.final_layernorm if target.name == "phi" else reference.model.norm
    assert_close(early.at_layer("final"), norm(full.at_layer(middle)))
    again = target.run(tokens, ForwardPlan(layers=EVERY, logits=True))
    assert torch.equal(again.hidden, full.hidden), "partial runs must leave the model as it was"


@pytest.mark.parametrize("middle", [1, 2])
@pytest.mark.parametrize("lengths", [[9], [4, 9, 7]])
def test_two_partial_runs_over_a_cache_equal_a_verified_tree(
    target: Target, lengths: list[int], middle: int
) -> None:
    """Early layers, `forget`, then the late layers on the same nodes fill the cache as one run
    does.
    """
    prompts = random_tokens(len(lengths), max(lengths))
    tree = random_tree(len(lengths), 8)
    full = prefill_cache(target, lengths, prompts)
    split = prefill_cache(target, lengths, prompts)
    expected = target.verify(tree, full).logits
    positions = split.lengths[:, None] + tree.depths
    early = target.run(
        tree.tokens,
        ForwardPlan(
            layers=(middle,),
            positions=positions,
            mask=tree.ancestors,
            cache=split,
            span=LayerSpan(last=middle),
        ),
    )
    split.roll_back()
    hidden = early.at_layer(middle)
    assert_close(
        target.run(
            tree.tokens,
            ForwardPlan(
                logits=True,
                positions=positions,
                mask=tree.ancestors,
                cache=split,
                span=LayerSpan(first=middle, hidden=hidden),
            ),
        ).logits,
        expected,
    )
    paths, counts = random_paths(tree)
    for cache in (full, split):
        cache.commit(paths, counts)
    following = random_tree(len(lengths), 4)
    assert_close(target.verify(following, split).logits, target.verify(following, full).logits)


def test_a_block_diagonal_mask_equals_separate_runs(models: tuple[Target, Any]) -> None:
    """Two sequences side by side in one row, each blind to the other, give what each gives
    alone.
    """
    target, _ = models
    tokens = random_tokens(2, 15)
    cut = 7
    mask = torch.ones(15, 15).tril().bool()
    mask[cut:, :cut] = False
    positions = torch.cat([torch.arange(cut), torch.arange(15 - cut)]).expand(2, -1)
    packed = target.run(
        tokens,
        ForwardPlan(layers=EVERY, logits=True, positions=positions, mask=mask.expand(2, -1, -1)),
    )
    alone = [
        target.run(part, ForwardPlan(layers=EVERY, logits=True))
        for part in (tokens[:, :cut], tokens[:, cut:])
    ]
    assert_close(packed.hidden, torch.cat([part.hidden for part in alone], dim=1))
    assert_close(
        packed.logits, torch.cat([part.logits for part in alone if part.logits is not None], dim=1)
    )


def test_a_tree_mask_needs_no_cache(target: Target) -> None:
    """Without a cache, a mask and positions say the same as a tree behind an empty cache:
    windows count positions.
    """
    tree = random_tree(3, 12)
    plain = target.run(
        tree.tokens, ForwardPlan(logits=True, positions=tree.depths, mask=tree.ancestors)
    )
    assert_close(plain.logits, target.verify(tree, target.new_cache(3, 16)).logits)


def test_head_logits_of_some_rows_are_those_of_all(models: tuple[Target, Any]) -> None:
    """A reduced vocabulary changes which logits are built, not what they are."""
    target, reference = models
    tokens = random_tokens(2, 5)
    rows = torch.tensor([3, 60, 17])
    final = target.features(tokens, ("final",)).at_layer("final")
    with torch.no_grad():
        assert_close(target.head.logits(final), reference(tokens).logits)
        assert_close(target.head.logits(final, rows), reference(tokens).logits[..., rows])


@pytest.mark.parametrize("name", SCALED)
def test_scaled_logits_equal_the_model(name: str, tiny: Target) -> None:
    """A model that scales its logits keeps that scale: sampling depends on it."""
    target, reference = build(name, SCALED[name], tiny)
    tokens = random_tokens(2, 5)
    with torch.no_grad():
        assert_close(target.run(tokens, ForwardPlan(logits=True)).logits, reference(tokens).logits)


def test_gradients_flow_only_where_requested(tiny: Target) -> None:
    """`grad=True` gives a weight the gradient that the model gives it; without it nothing is
    recorded.
    """
    target, reference = build("llama", ARCHITECTURES["llama"], tiny)
    tokens = random_tokens(2, 9)
    gradients = []
    for model in (target.model, reference):
        model.model.layers[1].self_attn.k_proj.weight.requires_grad_(True)  # type: ignore[union-attr, index]
    assert not target.run(tokens, ForwardPlan(layers=EVERY)).hidden.requires_grad
    for logits, model in (
        (target.run(tokens, ForwardPlan(logits=True, grad=True)).logits, target.model),
        (reference(tokens, use_cache=False).logits, reference),
    ):
        loss = logits.float().logsumexp(-1).sum()
        gradients += torch.autograd.grad(loss, model.model.layers[1].self_attn.k_proj.weight)
    assert_close(*gradients)


@pytest.mark.parametrize("layer", [-1, LAYERS + 1])
def test_a_missing_layer_is_refused(target: Target, layer: int) -> None:
    """The message says which layers there are."""
    with pytest.raises(UserError, match=f"0 to {LAYERS}"):
        target.features(random_tokens(1, 3), (layer,))


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_verify_trees_is_refused(
    name: str, tiny: Target, tmp_path: Path
) -> None:
    """Loading it ends with the reason in one sentence."""
    config, reason = REFUSED[name]
    AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager"
    ).save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=reason):
        load_hf(str(tmp_path), name, device="cpu")


def test_an_error_of_a_models_code_names_its_cause() -> None:
    """A message of several lines, such as one that begins with a module, becomes one line that
    holds its end.
    """
    module = repr(torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(40))))
    with (
        pytest.raises(
            UserError,
            match=(
                r"TypeError: Sequential\( .*\.\.\. .*got an unexpected argument "
                r"'past_key_values'\); use"
            ),
        ) as raised,
        explain_incompatibility("mine"),
    ):
        raise TypeError(f"{module} got an unexpected argument 'past_key_values'")
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 600


def test_a_saved_target_loads_with_the_same_logits(tiny: Target, tmp_path: Path) -> None:
    """What `save` writes is what `load_hf` reads."""
    tokens = torch.randint(0, tiny.head.vocab_size, (2, 9))
    tiny.save(tmp_path)
    assert_close(
        load_hf(str(tmp_path), device="cpu").run(tokens, ForwardPlan(logits=True)).logits,
        tiny.run(tokens, ForwardPlan(logits=True)).logits,
    )


@pytest.mark.slow
def test_saving_prints_nothing(tmp_path: Path) -> None:
    """No library tells of itself while a target is saved, as deepspeed does on being imported
    without a GPU.
    """
    code = f"from spectrain.models.loading import load_tiny; load_tiny().save({str(tmp_path)!r})"
    env = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert "WARNING" not in done.stdout + done.stderr


def test_a_cache_refuses_other_shapes_and_never_overflows() -> None:
    """Keys of another shape than the first layer's, or more of them than there are slots, do not
    get in.
    """
    cache = TreeCache(2, 1, 4, "cpu")
    keys = torch.randn(1, 2, 3, 8)
    cache.append(0, keys, keys)
    with pytest.raises(UserError, match="key-value shape"):
        cache.append(1, keys[..., :4], keys[..., :4])
    with pytest.raises(UserError, match="key-value shape"):
        cache.append(1, keys, keys[..., :4])
    cache.add_uncommitted(3)
    with pytest.raises(AssertionError, match="4 slots"):
        cache.append(0, keys, keys)


def test_a_cache_holds_layers_of_different_shapes() -> None:
    """Each layer's keys and values come back as they went in, whatever the heads and sizes of
    the others; so after a commit.
    """
    shapes = [KeyValueShape(2, 4, 4), KeyValueShape(1, 6, 3), KeyValueShape(3, 2, 5)]
    accepted = torch.tensor([[0, 2], [0, 1]]), torch.tensor([2, 1])
    for bound in (None, 12):
        cache = TreeCache(3, 2, 16, "cpu", bound, dict(enumerate(shapes)))
        added = []
        for layer, (heads, *sizes) in enumerate(shapes):
            parts = [torch.randn(2, heads, 3, size) for size in sizes]
            added.append(parts)
            for part, stored in zip(parts, cache.append(layer, parts[0], parts[1])):
                assert torch.equal(stored[:, :, :3], part)
        cache.add_uncommitted(3)
        cache.commit(*accepted)
        for layer, parts in enumerate(added):
            stored = cache.append(layer, parts[0], parts[1])
            for part, slots in zip(parts, stored):
                assert torch.equal(slots[0, :, :2], part[0][:, [0, 2]]) and torch.equal(
                    slots[1, :, :1], part[1][:, :1]
                )
