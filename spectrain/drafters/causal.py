"""A separate small causal LM as drafter, distilled from the target (GKD, Agarwal et al., 2024; DistillSpec, Zhou et al., 2024).

Shapes: B batch, T tokens, V vocabulary, R supervised rows, F frontier nodes.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from ..cache import TreeCache
from ..errors import UserError
from ..features import Batch, Layer
from ..losses import Loss, row_losses
from ..shapes.base import Rollout, TreeBuilder
from ..target import ATTENTION, Target
from ..tree import TokenTree
from .base import Drafter, Losses

if TYPE_CHECKING:
    from ..decode import Context


class Causal(Drafter):
    """A small LM with the target's tokenizer, from one of three places.

    `num_layers` of the target, evenly spaced with its first and last, and its embeddings; `model`, a directory or a name on
    the hub; or `architecture`, a transformers configuration to start afresh. The loss is `loss` between the target's
    distribution and the drafter's, both at `loss_temperature`, at every token of the assistant: for jensen_shannon the
    generalised one with `beta`, scaled by 1 / (beta (1 - beta)) so that a learning rate carries over from KL to KL.
    Which sequences these are is the source's to say: source=live takes the data's, source=generated others.
    """

    shape = ("architecture", "num_layers", "model")

    def __init__(
        self,
        target: Target,
        num_layers: int | None = None,
        model: str | None = None,
        architecture: dict[str, Any] | None = None,
        loss: Loss = "forward_kl",
        beta: float = 0.5,
        loss_temperature: float = 1.0,
    ) -> None:
        super().__init__()
        given = [
            key
            for key, value in (("num_layers", num_layers), ("model", model), ("architecture", architecture))
            if value is not None
        ]
        if len(given) > 1:
            raise UserError(
                f"drafter.{given[1]}: drafter.{given[0]} says already where the drafter comes from; give one of them"
            )
        if not 0 < beta < 1:
            raise UserError(f"drafter.beta={beta}: use more than 0 and less than 1; the ends are forward_kl and reverse_kl")
        if not loss_temperature > 0:
            raise UserError(f"drafter.loss_temperature={loss_temperature}: use more than 0")
        self.divergence, self.beta, self.loss_temperature = loss, beta, loss_temperature
        if model is not None:
            inner: Any = load_model(model, target)
        elif architecture is not None:
            inner = fresh_model(architecture, target)
        else:
            inner = cut_model(target, max(1, target.num_layers // 4) if num_layers is None else num_layers)
        known, rows = len(target.tokenizer), inner.get_input_embeddings().weight.shape[0]
        if rows < known:
            key = "model" if model is not None else "architecture"
            raise UserError(
                f"drafter.{key}: its vocab_size is {rows}, below the {known} tokens of the tokenizer; use as many or more"
            )
        inner.config._attn_implementation = ATTENTION
        self.model = Target(inner, target.tokenizer, "drafter", model or "")
        self.model.requires_grad_(True)
        self.head = target.head
        self.vocab_size = min(self.model.head.vocab_size, target.head.vocab_size)
        self.cache: TreeCache | None = None

    def settings(self) -> dict[str, Any]:
        """The architecture itself, so that the saved drafter needs neither the target's layers nor another directory."""
        return {"architecture": self.model.config.to_diff_dict(), "num_layers": None, "model": None}

    def writer(self) -> Target:
        return self.model

    # Training

    def features_in(self, stage: int) -> tuple[Layer, ...]:
        """What the target's head reads; decoding needs no features."""
        return ("final",)

    def loss(self, batch: Batch, target: Target) -> Losses:
        assert batch.features is not None
        predicts = batch.predicts
        states = self.model.run(batch.tokens, layers=("final",), grad=torch.is_grad_enabled()).at("final")[predicts]
        final, following = batch.features.at("final")[predicts], batch.tokens.roll(-1, dims=1)[predicts]
        total, hits = states.new_zeros((), dtype=torch.float32), 0
        distance = None if batch.distance is None else batch.distance.roll(-1, dims=1)[predicts]
        for start in range(0, len(following), 1024):  # bounds the [rows, vocabulary] logits
            rows = slice(start, start + 1024)
            mine, theirs, tokens = states[rows], final[rows], following[rows]
            log_q = (self.model.head.logits(mine)[:, : self.vocab_size] / self.loss_temperature).log_softmax(-1)
            if self.divergence == "cross_entropy" and distance is None:
                total = total + F.nll_loss(log_q, tokens, reduction="sum")
                hits += int((log_q.argmax(-1) == tokens).sum())
                continue
            with torch.no_grad():
                log_p = (self.head.logits(theirs)[:, : self.vocab_size] / self.loss_temperature).log_softmax(-1)
            behind = None if distance is None else distance[rows]
            total = total + row_losses(self.divergence, log_p, log_q, behind, self.beta).sum()
            hits += int((log_q.argmax(-1) == log_p.argmax(-1)).sum())
        found, judged = (torch.tensor([float(number)], device=states.device) for number in (hits, len(following)))
        return Losses({self.divergence: total}, found, judged)

    # Decoding

    def propose(self, context: Context, budget: TreeBuilder) -> TokenTree:
        """Run the committed tokens that are new to it, then draft from the root on."""
        if context.round == 0 or self.cache is None:
            room = context.cache.max_length + 1 + budget.drafted
            self.cache = self.model.new_cache(len(context.counts), room)
        behind = context.cache.lengths - self.cache.lengths
        width = int(behind.max())
        if width:
            places = self.cache.lengths[:, None] + torch.arange(width, device=behind.device)
            tokens = context.tokens.gather(1, places.clamp(max=context.tokens.shape[1] - 1))
            self.model.run(tokens, cache=self.cache)
            self.cache.commit(torch.arange(width, device=behind.device).expand(len(behind), -1), behind)
        tree = budget.grow(context, _Nodes(self, self.cache, context.root))
        self.cache.forget()
        return tree


class _Nodes(Rollout):
    """One round: the root, then levels of nodes, behind what the drafter's cache has committed."""

    def __init__(self, drafter: Causal, cache: TreeCache, root: Tensor) -> None:
        self.drafter, self.cache, self.root = drafter, cache, root
        self.visible = torch.zeros(len(root), 0, 0, dtype=torch.bool, device=root.device)
        self.depth = torch.zeros(len(root), 0, dtype=torch.int64, device=root.device)

    def start(self) -> Tensor:
        nothing = self.visible.new_zeros(len(self.root), 1, 0)
        return self._run(self.root[:, None], self.depth.new_zeros(len(self.root), 1), nothing)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        above = self.visible.gather(1, parents[..., None].expand(-1, -1, self.visible.shape[-1]))
        return self._run(tokens, self.depth.gather(1, parents) + 1, above)

    def _run(self, tokens: Tensor, depth: Tensor, above: Tensor) -> Tensor:
        batch, num_new = tokens.shape
        itself = torch.eye(num_new, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
        visible = torch.cat([above, itself], dim=2)
        positions = self.cache.lengths[:, None] + depth
        seen = self.drafter.model.run(tokens, positions, visible, self.cache, logits=True)
        self.visible = torch.cat([F.pad(self.visible, (0, num_new)), visible], dim=1)
        self.depth = torch.cat([self.depth, depth], dim=1)
        assert seen.logits is not None
        return seen.logits[..., : self.drafter.vocab_size].log_softmax(-1)


def cut_model(target: Target, num_layers: int) -> nn.Module:
    """A copy of the target with `num_layers` of its layers, evenly spaced, the first and the last among them."""
    if not 1 <= num_layers < target.num_layers:
        raise UserError(f"drafter.num_layers={num_layers}: {target.name} has {target.num_layers} layers; use fewer, at least 1")
    last = target.num_layers - 1
    kept = sorted({round(place * last / max(num_layers - 1, 1)) for place in range(num_layers)})
    config: Any = copy.deepcopy(target.model.config)
    text = config.get_text_config()
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[layer] for layer in kept]
    model: Any = type(target.model)(config)
    mine, theirs = model.get_decoder(), target.decoder
    names = {f"layers.{old}.": f"layers.{new}." for new, old in enumerate(kept)}
    weights = {}
    for name, tensor in theirs.state_dict().items():
        layer = next((old for old in names if name.startswith(old)), None)
        if layer is not None:
            weights[names[layer] + name.removeprefix(layer)] = tensor
        elif not name.startswith("layers."):
            weights[name] = tensor
    mine.load_state_dict(weights)
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(target.head.output.weight)
    return model.float()  # whatever the target's type: it is trained in float32 and cast to decode


def fresh_model(architecture: dict[str, Any], target: Target) -> nn.Module:
    """A model of a transformers configuration, with random weights; its vocabulary is the target's unless it names one."""
    settings = {"vocab_size": target.head.vocab_size, "max_position_embeddings": target.max_length, **architecture}
    try:
        kind = settings.pop("model_type", "llama")
        config = AutoConfig.for_model(kind, **settings)
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"drafter.architecture: transformers cannot build it ({str(error).splitlines()[0]})") from error
    return model.float()


def load_model(path: str, target: Target) -> nn.Module:
    """A model whose tokenizer is the target's, from a directory or the hub."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise UserError(
            f"drafter.model={path}: it cannot be loaded ({str(error).strip().splitlines()[0]}); give a directory or a name"
        ) from error
    check_tokenizer(tokenizer, target.tokenizer, path)
    return model


def check_tokenizer(mine: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase, path: str) -> None:
    """Refuse another tokenizer: the same tokens must have the same ids, special ones too. Embeddings may be padded."""
    ours, other = mine.get_vocab(), theirs.get_vocab()
    differing = sorted(token for token in {*ours, *other} if ours.get(token) != other.get(token))
    specials = [
        f"{name} {getattr(mine, name)!r} against {getattr(theirs, name)!r}"
        for name in ("bos_token", "eos_token")
        if getattr(mine, name) != getattr(theirs, name)
    ]
    if differing or specials:
        shown = [f"{token!r} is {ours.get(token)} against {other.get(token)}" for token in differing[:3]]
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise UserError(
            f"drafter.model={path}: its tokenizer is not the target's ({'; '.join([*shown, *specials])}{more}); use a model of "
            "the same family"
        )
