"""In bfloat16, where one bit makes other logits: what is drafted is the target's own to the last
bit all the same.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.session import Session
from spectrain.drafters.ngram import Ngram
from spectrain.eval.identity import logit_gap
from spectrain.models.accelerator import accelerator
from spectrain.models.fast import has_batch_invariance, is_packed
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.loading import resolve_dtype
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target
from spectrain.trees.chain import Chain
from spectrain.trees.token_tree import TokenTree

CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=128,
    intermediate_size=1088,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
rows_are_alike = pytest.mark.skipif(
    not has_batch_invariance(), reason="rows of bfloat16 are not alike here"
)


@pytest.fixture(scope="module")
def bfloat16_target(tiny: Target) -> Target:
    """A target with random weights in bfloat16."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        CONFIG, attn_implementation="spectrain", dtype=torch.bfloat16
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    target = Target(model, tiny.tokenizer, "rounded", "")
    target.pack_weights()
    return target


@rows_are_alike
def test_bfloat16_node_equals_a_single_token_bit_for_bit(bfloat16_target: Target) -> None:
    """Logits of a tree of 40 nodes, of two sequences at once, are those of every path decoded
    one by one.
    """
    torch.manual_seed(1)
    prompts = torch.randint(3, 96, (2, 30))
    lengths = torch.tensor([30, 21])
    parents = torch.tensor(
        [-1, *(int(torch.randint(max(0, node - 4), node, ())) for node in range(1, 40))]
    )
    tree = TokenTree.from_parents(torch.randint(3, 96, (2, 40)), parents.expand(2, -1))
    with torch.inference_mode():
        cache = bfloat16_target.new_cache(2, 128)
        bfloat16_target.prefill(prompts, lengths, cache, ())
        logits = bfloat16_target.verify(tree, cache).logits
        for row in range(2):
            for leaf in (17, 31, 39):
                path = tree.ancestors[row, leaf].nonzero()[:, 0]
                cache = bfloat16_target.new_cache(2, 128)
                bfloat16_target.prefill(prompts, lengths, cache, ())
                for node in path.tolist():
                    alone = bfloat16_target.run(
                        tree.tokens[:, node : node + 1], ForwardPlan(logits=True, cache=cache)
                    )
                    cache.commit(None, torch.ones(2, dtype=torch.int64))
                    assert alone.logits is not None and logits is not None
                    assert torch.equal(alone.logits[row, 0], logits[row, node])


@rows_are_alike
def test_drafted_equals_generate(bfloat16_target: Target) -> None:
    """Outputs are equal token by token, for a chain that copies and goes wrong often, and
    autoregressively. Prompts that run together have these bits where kernels see to it
    (`Target.prefill`); elsewhere they run one by one.
    """
    prompts = [[5, 6, 7, 5, 6, 7, 5], list(range(3, 60))]
    runs_together = accelerator().runs_texts_alone(bfloat16_target)
    batches = [prompts] if runs_together else [[prompt] for prompt in prompts]
    with reference_model(bfloat16_target) as model:
        expected = [generate(model, prompt, 40, frozenset()) for prompt in prompts]
    assert len({token for output in expected for token in output}) > 10
    for drafter, builder in ((None, None), (Ngram(bfloat16_target, longest=2), Chain(4))):
        session = Session(bfloat16_target, Greedy(), drafter, builder)
        outputs = [
            generation.output
            for batch in batches
            for generation in session.decode(batch, 40, ignore_eos=True)
        ]
        assert outputs == expected


@rows_are_alike
def test_generate_multiplies_a_single_token_like_several(bfloat16_target: Target) -> None:
    """Without AMX oneDNN adds up a single row of more than 1,024 numbers in another order, of
    torch's linears too.
    """
    with reference_model(bfloat16_target) as model, torch.inference_mode():
        linear = model.model.layers[0].mlp.down_proj
        rows = torch.randn(300, linear.in_features).bfloat16()
        alone = torch.cat([linear(row[None, None])[0] for row in rows])
        assert torch.equal(alone, torch.cat([linear(part[None])[0] for part in rows.split(20)]))
    assert not any(
        "forward" in vars(module) and not is_packed(module)
        for module in bfloat16_target.model.modules()
    )


def test_near_tie_width_equals_the_rounding(bfloat16_target: Target, shallow: Target) -> None:
    """Rounding decides between logits of bfloat16 that differ by hundredths or tenths, and between
    those of float32 that differ by 1e-4."""
    context = list(range(3, 30))
    assert logit_gap(shallow, context).rounding == pytest.approx(1e-4, rel=2)
    assert 1e-3 < logit_gap(bfloat16_target, context).rounding < 2


def test_small_models_stay_in_float32() -> None:
    """On a CPU small models stay in float32; larger ones go where the processor is quick; a
    requested type is used.
    """
    large = LlamaConfig(hidden_size=576, intermediate_size=1536)
    assert resolve_dtype("cpu", CONFIG) == torch.float32
    assert resolve_dtype("cpu", large) == (
        torch.bfloat16 if has_batch_invariance() else torch.float32
    )
    assert resolve_dtype("cuda:0", CONFIG) == torch.bfloat16
    assert resolve_dtype("cpu", large, "float32") == torch.float32
