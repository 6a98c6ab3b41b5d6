"""The target: an unmodified Hugging Face causal LM, run over token batches, cached trees or some of
its layers only.

Shapes: B batch, T tokens, N nodes, L captured layers, D width, V vocabulary.
Nothing here copies or patches model code: attention goes through `AttentionInterface`, keys and
values through our `Cache`, features through hooks. What differs between targets is in
`architectures/`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from spectrain.config.build import GroupSpec
from spectrain.data.chat_template import ChatTemplate
from spectrain.data.image_processor import ImageProcessor, Images, get_images, have_images
from spectrain.errors import UserError, explain_calls
from spectrain.trees.token_tree import TokenTree

from .accelerator import accelerator
from .architectures.base import Architecture
from .architectures.detect import detect_architecture
from .fast import speed_up_linears, use_text_kernels
from .features import Features, Layer
from .forward_plan import DEFAULT_PLAN, ForwardPlan, LayerSpan
from .kv_cache import TreeCache
from .model_parts import ModelParts
from .residual_stream import capture_stream
from .sharding import Sharding

ImageCheck = Callable[["Target", Sequence[int], Images], None]
"""Raises UserError for a text with images that the target would read otherwise than
transformers.
"""


@dataclass(frozen=True)
class SmallModelOrigin:
    """What a drafter's small model starts from: at most one of these."""

    num_layers: int | None = None
    model: str | None = None
    architecture: dict[str, Any] | None = None


class Target(ModelParts):
    """A frozen causal LM whose output is wanted. It learns only where a stage of a drafter's
    training names its parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        path: str,
        sharding: Sharding = "none",
        architecture: Architecture | None = None,
    ) -> None:
        super().__init__(model, name)
        self.tokenizer, self.path = tokenizer, path
        self.template = ChatTemplate(tokenizer, num_embeddings=self.head.num_embeddings)
        # Whether the layers were loaded; without them nothing runs but embedding, final norm and
        # output layer.
        self.has_layers = True
        # How its weights were quantized while loading, as target.quantization names it.
        self.quantization: str | None = None
        # The hash of its weights as they were loaded, where a command has computed it.
        self.weights_hash: str | None = None
        # Whether the weights are those of a model in training, which changes them.
        self.shares_weights = False
        # How the processes of the launch hold the model together.
        self.sharding = sharding
        self.runs_in_lockstep = sharding != "none"
        has_vision = (
            "vision_config" in getattr(model.config, "sub_configs", {})
            and self.decoder is not model.base_model
        )
        self.vision = ImageProcessor(path, has_vision)
        # The check of the first text with images; None once it has passed, and where nothing is
        # checked.
        self.image_check: ImageCheck | None = None
        self.architecture = architecture or detect_architecture(self)

    @classmethod
    @explain_calls
    def from_pretrained(cls, name: str | Path, dtype: str = "auto", device: str = "auto") -> Target:
        """Load a target by the name of a model that ships with the project (tiny, smollm2), from a
        directory, or from the hub.
        """
        if not isinstance(name, (str, Path)):
            raise UserError(
                f"target: what is of type {type(name).__name__} is no name; give tiny, smollm2, a "
                "directory or ORG/NAME of the hub"
            )
        shipped = name if name in ("tiny", "smollm2") else None
        load = GroupSpec("target", shipped or "hf").load_constructor()
        settings = {"dtype": dtype, "device": device} | ({} if shipped else {"model": str(name)})
        target: Target = load(**settings)
        return target

    def __repr__(self) -> str:
        kind = type(self.model).__name__
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Target({self.name!r}, {kind}, {self.num_layers} layers, {dtype}, {self.device})"

    @property
    def stop_ids(self) -> frozenset[int]:
        """Return the tokens that end an answer; raise UserError for a value that is no token."""
        sources = self.tokenizer, self.config, getattr(self.model, "generation_config", None)
        entries = [getattr(source, "eos_token_id", None) for source in sources]
        ids = [i for entry in entries for i in (entry if isinstance(entry, list) else [entry])]
        for token in ids:
            if token is not None and type(token) is not int:
                raise UserError(
                    f"target {self.name}: eos_token_id={token!r} is no token; write a whole number "
                    "or a list of them in config.json and generation_config.json"
                )
        return frozenset(i for i in ids if i is not None)

    def new_cache(self, batch_size: int, max_length: int, bound: int | None = None) -> TreeCache:
        return TreeCache(
            self.num_layers, batch_size, max_length, self.device, bound, self.architecture.kv_shapes
        )

    def make_small_model(self, origin: SmallModelOrigin) -> Target | None:
        """Return an untrained small model of the target's own kind; None where any causal LM may
        draft.
        """
        return None

    @property
    def saved_config(self) -> Any:
        """Return the configuration by which a drafter's small model is built again."""
        return self.config

    def pack_weights(self) -> None:
        """Switch decoding and feature capture to faster linears: reordered weights on a CPU, and on
        a GPU one product for the linears that read the same input, and for features one launch for
        what lies between products. A sharded target stays as it is,
        and so does one whose weights another model changes, because these hold copies.
        """
        if self.sharding == "none" and not self.shares_weights:
            speed_up_linears(self.model if self.has_layers else self.head.output)

    def require_layers(self, user: str) -> None:
        """Raise UserError where the layers, which `user` runs or copies, were not loaded."""
        if not self.has_layers:
            raise UserError(
                f"target.parts=head: {user} needs the layers of {self.name}, which are not "
                "loaded; use target.parts=all"
            )

    def features(
        self,
        tokens: Tensor,
        layers: tuple[Layer, ...],
        lengths: tuple[int, ...] | None = None,
        texts: Sequence[Sequence[int]] = (),
    ) -> Features:
        """Return frozen features of sequences [B, T], padded on the right, or of packed ones,
        without logits. `texts` are the same tokens with their images."""
        plan = ForwardPlan(layers=layers, lengths=lengths, texts=self._check_images(texts))
        with use_text_kernels():
            return self.run(tokens, plan)

    def prefill(
        self,
        tokens: Tensor,
        lengths: Tensor,
        cache: TreeCache,
        layers: tuple[Layer, ...],
        texts: Sequence[Sequence[int]] = (),
    ) -> Features:
        """Run prompts [B, T], padded on the right, into an empty cache. Return features, with
        logits [B, 1, V] after the last token of each row. `texts` are the same prompts with their
        images.

        Where an installed package gives a later row the bits of a text alone, it gives these bits
        to a prompt too.
        """
        if len(tokens) > 1 and not have_images(texts):
            features = accelerator().prefill_each(self, tokens, lengths, cache, layers)
            if features is not None:
                return features
        with_final = layers if "final" in layers else (*layers, "final")
        cache.prompt_lengths = lengths
        features = self.run(
            tokens, ForwardPlan(layers=with_final, cache=cache, texts=self._check_images(texts))
        )
        cache.commit(None, lengths)
        last = features.at_layer("final").gather(
            1, (lengths - 1)[:, None, None].expand(-1, 1, self.width)
        )
        return Features(tokens, features.layers, features.hidden, self.head.logits(last))

    def verify(self, tree: TokenTree, cache: TreeCache, layers: tuple[Layer, ...] = ()) -> Features:
        """Run a tree [B, N] on top of the committed tokens of the cache and return logits [B, N, V]
        at every node. Commit afterwards.

        Every rule computes in float32 or only compares, so on a GPU half-precision logits are not
        upcast, which spares a pass and twice the bytes. Torch's argmax on a CPU takes three times
        as long in half precision, so there they are.
        """
        positions = cache.lengths[:, None] + tree.depths
        upcast = self.device.type == "cpu"
        plan = ForwardPlan(
            layers,
            logits=True,
            upcast=upcast,
            positions=positions,
            mask=tree.ancestors,
            cache=cache,
        )
        return self.run(tree.tokens, plan)

    def run(self, tokens: Tensor, plan: ForwardPlan = DEFAULT_PLAN) -> Features:
        """Run one forward over tokens [B, N] as the plan says and return the features that it
        requests.
        """
        self.require_layers("a forward of the target")
        call = self.architecture.resolve_call(self, tokens, plan)
        with ExitStack() as stack, torch.set_grad_enabled(plan.grad):
            captured = stack.enter_context(self.capture_layers(plan.layers))
            for context in self.architecture.forward_contexts(call):
                stack.enter_context(context)
            output = self.decoder(**self.architecture.decoder_arguments(call))
            final = captured["final"] = output.last_hidden_state
            states = [captured[layer] for layer in plan.layers]
            hidden = (
                torch.stack(states, dim=2)
                if states
                else final.new_empty(*tokens.shape, 0, self.width)
            )
            logits = self.head.logits(final, upcast=plan.upcast) if plan.logits else None
        if plan.cache is not None:
            plan.cache.add_uncommitted(tokens.shape[1])
        return Features(tokens, plan.layers, hidden, logits)

    def apply_final_norm(self, hidden: Tensor, grad: bool = False) -> Tensor:
        """Apply the final norm to states [B, T, D] of any layer: what the head reads at an early
        exit.
        """
        if not self.has_layers:
            with torch.set_grad_enabled(grad):
                normed: Tensor = self.final_norm(hidden)
                return normed
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        span = LayerSpan(first=self.num_layers, hidden=hidden)
        return self.run(tokens, ForwardPlan(layers=("final",), grad=grad, span=span)).at_layer(
            "final"
        )

    def save(self, path: str | Path) -> None:
        """Write model and tokenizer in transformers format."""
        # Saving imports deepspeed where it is installed, which would warn of a missing GPU.
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        self.model.save_pretrained(path)  # type: ignore[operator]
        self.tokenizer.save_pretrained(path)

    def _check_images(self, texts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the texts where any has images, else nothing. The first text with images is
        checked against transformers.
        """
        first = next(
            ((text, images) for text in texts if (images := get_images(text)) is not None), None
        )
        if first is None:
            return ()
        if self.image_check is not None:
            # The check itself runs texts with images.
            check = self.image_check
            self.image_check = None
            try:
                check(self, *first)
            except UserError:
                self.image_check = check
                raise
        return texts

    def check_layers(self, layers: Sequence[Layer]) -> None:
        """Raise UserError for a layer that this target does not have."""
        num_layers = self.num_layers
        for layer in layers:
            if layer != "final" and not 0 <= layer <= num_layers:
                raise UserError(
                    f"drafter.layers: {layer} is not a layer of {self.name}, which has 0 to "
                    f"{num_layers}"
                )

    def capture_layers(
        self, layers: tuple[Layer, ...]
    ) -> AbstractContextManager[dict[Layer, Tensor]]:
        """Capture the residual stream at the given layers through hooks while the context is
        open.
        """
        self.check_layers(layers)
        if {*layers} - {"final"}:
            self.architecture.check_single_stream(self.name)
        return capture_stream(self.layers, layers)
