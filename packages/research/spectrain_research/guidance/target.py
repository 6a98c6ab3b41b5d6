"""A guided target: each text runs twice, with its condition and without it, over the same trees.

The output layer is linear, so mixed logits are those of mixed final features, h = h_u + s (h_c -
h_u). Losses, drafters and rules read these and need not know of guidance. Shapes: B batch, T
tokens, N nodes, L layers, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, JanusForConditionalGeneration

from spectrain.drafters.layers.small_models import make_small_model
from spectrain.errors import UserError
from spectrain.models.attention import ATTENTION_NAME
from spectrain.models.cache_types import KeyValueShape
from spectrain.models.check import check_weights
from spectrain.models.features import Features, Layer
from spectrain.models.forward_plan import ALL_LAYERS, DEFAULT_PLAN, ForwardPlan
from spectrain.models.kv_cache import TreeCache
from spectrain.models.load_errors import explain_load_failure
from spectrain.models.loading import load_hf, resolve_device, resolve_dtype
from spectrain.models.pretrained import check_model_files, load_pretrained
from spectrain.models.target import SmallModelOrigin, Target

from .janus import convert_janus
from .model import Guidance, GuidedLM


class PairedCache(TreeCache):
    """The cache of texts with their conditions, and that of the same texts without them, which
    is committed with it.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        max_length: int,
        device: Any,
        shapes: Mapping[int, KeyValueShape] | None,
    ) -> None:
        self.without = TreeCache(num_layers, batch_size, max_length, device, None, shapes)
        super().__init__(num_layers, batch_size, max_length, device, None, shapes)

    def reset(self) -> None:
        super().reset()
        self.without.reset()

    def commit(
        self,
        path: Tensor | None,
        counts: Tensor,
        hidden: Tensor | None = None,
        path_hidden: Tensor | None = None,
        are_counted: bool = False,
    ) -> None:
        self.without.commit(path, counts)
        super().commit(path, counts, hidden, path_hidden, are_counted)

    def crop(self, lengths: Tensor) -> None:
        self.without.crop(lengths)
        super().crop(lengths)

    def roll_back(self, committed: int = 0) -> None:
        self.without.roll_back(committed)
        super().roll_back(committed)


class GuidedTarget(Target):
    """A target of codes. "final" features are guided, those of other layers are of the texts
    with their conditions.
    """

    model: GuidedLM

    def __init__(self, model: GuidedLM, plain: Target) -> None:
        super().__init__(model, plain.tokenizer, plain.name, plain.path)
        self.guidance = model.guidance
        # In a tuple, so that its modules are not registered twice.
        self._plain = (plain,)

    def new_cache(self, batch_size: int, max_length: int, bound: int | None = None) -> TreeCache:
        return PairedCache(
            self.num_layers, batch_size, max_length, self.device, self.architecture.kv_shapes
        )

    def make_small_model(self, origin: SmallModelOrigin) -> Target:
        """Return a small model without guidance, which learns the guided distribution from the
        texts with their conditions.
        """
        return make_small_model(
            self._plain[0], origin.num_layers, origin.model, origin.architecture
        )

    def apply_final_norm(self, hidden: Tensor, grad: bool = False) -> Tensor:
        return self._plain[0].apply_final_norm(hidden, grad)

    def run(self, tokens: Tensor, plan: ForwardPlan = DEFAULT_PLAN) -> Features:
        """Run tokens [B, N] with their conditions and without them; return features and logits
        under guidance.
        """
        if plan.span is not ALL_LAYERS:
            raise UserError(
                f"target {self.name}: a part of its layers is not guided; use a drafter with "
                "layers of its own"
            )
        layers: tuple[Layer, ...] = (*(layer for layer in plan.layers if layer != "final"), "final")
        features = super().run(tokens, replace(plan, layers=layers, logits=False))
        final = features.at_layer("final")
        if self.guidance.scale != 1:
            without = self._run_without(tokens, plan)
            final = without + self.guidance.scale * (final - without)
        hidden = torch.cat([features.hidden[:, :, :-1], final[:, :, None]], dim=2)
        wanted = [layers.index(layer) for layer in plan.layers]
        logits = self.head.logits(final, upcast=plan.upcast) if plan.logits else None
        return Features(tokens, plan.layers, hidden[:, :, wanted], logits)

    def _run_without(self, tokens: Tensor, plan: ForwardPlan) -> Tensor:
        """Return the final features of the tokens without their conditions, [B, N, D]."""
        pair = plan.cache.without if isinstance(plan.cache, PairedCache) else None
        # Tokens after others follow a condition that was dropped with them.
        if pair is None or pair.is_empty:
            tokens = self._drop_conditions(tokens, plan)
        if pair is not None and plan.cache is not None:
            pair.prompt_lengths = plan.cache.prompt_lengths
        return (
            super()
            .run(tokens, replace(plan, layers=("final",), logits=False, cache=pair))
            .at_layer("final")
        )

    def _drop_conditions(self, tokens: Tensor, plan: ForwardPlan) -> Tensor:
        """Return whole texts [B, T], or packed ones [1, T], without their conditions."""
        rows = (
            [part[0].tolist() for part in tokens.split(plan.lengths, dim=1)]
            if plan.lengths
            else tokens.tolist()
        )
        if plan.cache is not None and any(
            self.guidance.find_begin(row) == len(row) for row in rows
        ):
            raise UserError(
                f"target {self.name}: a prompt has no token that begins codes; use the target's "
                "chat template"
            )
        dropped = [self.guidance.drop_condition(row) for row in rows]
        return tokens.new_tensor(
            [[token for row in dropped for token in row]] if plan.lengths else dropped
        )


def load_codes(
    # Directory in transformers format, or name on the hub, of a causal model whose answers are
    # codes of images or sounds.
    model: str,
    # Guidance scale s: logits are those without the condition plus s times the difference; 1 runs
    # each text once.
    guidance: float = 3.0,
    # Text of the token after which codes follow; what stands before it in a text is the condition.
    begin: str = "<|im_start|>",
    # Text of the token that replaces each token of the condition in the run without it.
    null: str = "<|endoftext|>",
    # Beginning of the text of every code in the tokenizer, as in <c17>; null allows all tokens.
    codes: str | None = "<c",
    # How codes are embedded: as other tokens (llama), or by a table and an output layer of their
    # own (janus).
    kind: Literal["llama", "janus"] = "llama",
    # Weight type: float32, bfloat16 or float16; auto takes the device's fast one.
    dtype: str = "auto",
    # Device such as cpu or cuda:0; auto takes the GPU of this process, or the CPU where there is
    # none.
    device: str = "auto",
) -> GuidedTarget:
    """Load a causal model of codes (LlamaGen's form, Emu3's text model, Janus) as a target with
    classifier-free guidance, of which each text takes two runs. Only codes and the tokens that end
    an answer are ever chosen."""
    if not guidance >= 1:
        raise UserError(f"target.guidance={guidance}: use 1 or more; 1 is no guidance")
    plain = (
        load_hf(model, dtype=dtype, device=device)
        if kind != "janus"
        else load_janus(model, dtype, device)
    )
    begin_id = find_token(plain, "begin", begin)
    null_id = find_token(plain, "null", null)
    # Janus keeps the first token of the text in the run without its condition.
    first = plain.tokenizer.bos_token_id if kind == "janus" else None
    settings = Guidance(
        guidance, begin_id, null_id, frozenset() if first is None else frozenset({first})
    )
    return guide_target(plain, settings, codes)


def load_janus(model: str, dtype: str, device: str) -> Target:
    """Load a Janus model as a causal LM of codes <c0>, <c1> .., which follow the tokens of its
    tokenizer.
    """
    resolved = resolve_device(device)
    with explain_load_failure(model):
        check_model_files(model)
        config = AutoConfig.from_pretrained(model)
        tokenizer = AutoTokenizer.from_pretrained(model)
        weight_dtype = resolve_dtype(resolved, config, dtype)
        kind = JanusForConditionalGeneration
        network = load_pretrained(
            kind, model, "target.model", dtype=weight_dtype, use_safetensors=True
        )
    check_weights(network, f"target.model={model}")
    return wrap_janus(network.to(resolved), tokenizer, model)


def wrap_janus(network: Any, tokenizer: Any, path: str) -> Target:
    """Make a target of a Janus model; codes take the token ids after those of its embedding."""
    num_text = network.config.text_config.vocab_size
    num_codes = network.config.vq_config.num_embeddings
    tokenizer.add_tokens([f"<unused{token}>" for token in range(len(tokenizer), num_text)])
    tokenizer.add_tokens([f"<c{code}>" for code in range(num_codes)])
    shell = convert_janus(network)
    shell.config._attn_implementation = ATTENTION_NAME
    return Target(shell, tokenizer, path.rstrip("/").rsplit("/", 1)[-1], path)


def find_token(target: Target, key: str, text: str) -> int:
    """Return the id of a token by its text; raise UserError where there is none."""
    token = target.tokenizer.get_vocab().get(text)
    if token is None:
        raise UserError(
            f"target.{key}={text}: the tokenizer of {target.name} has no such token; name one "
            "that it has"
        )
    return int(token)


def guide_target(plain: Target, guidance: Guidance, codes: str | None) -> GuidedTarget:
    """Wrap a loaded target as a guided one, which chooses tokens whose text begins with `codes`."""
    vocabulary = plain.tokenizer.get_vocab()
    rows = plain.head.vocab_size
    chosen = [
        token for text, token in vocabulary.items() if codes is None or text.startswith(codes)
    ]
    if codes is not None and not chosen:
        raise UserError(
            f"target.codes={codes}: no token of {plain.name} begins with it; name the codes' "
            "beginning"
        )
    allowed = torch.tensor(sorted({*chosen, *plain.stop_ids} & {*range(rows)}), device=plain.device)
    target = GuidedTarget(GuidedLM(plain.model, guidance, allowed), plain)
    target.template = plain.template
    return target
