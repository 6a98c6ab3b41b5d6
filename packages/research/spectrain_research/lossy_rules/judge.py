"""A trained judge as acceptance rule. Shapes: B batch, N nodes, D width."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from spectrain.errors import UserError
from spectrain.models.checked_tensors import MAX_DRAFTER_TENSORS, read_tensors
from spectrain.models.features import Features, Layer
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain_research.lossy_rules.channel import draw_round_costs
from spectrain_research.shared.relaxed_rule import RelaxedRule


class Judge(RelaxedRule):
    """Judge decoding (Bachmann et al., 2025, arXiv 2501.19309): a linear probe may accept wrong
    drafts. NOT lossless.

    A draft is accepted where it is the most likely token or sigma(w h + b) > `threshold`, h being
    the target's last state at the draft; of several such children the one with the largest sigma.
    At threshold 1 the output is the greedy one; lower thresholds accept more, and 0 accepts all.

    With `snr_db` the drafter is on the other side of a radio channel, whose state in each round the
    probe reads too: sigma(w h + b + a c), c being the logarithm of the time of an exchange (WISV's
    head, Liu et al., 2026, arXiv 2604.17701). The worse the channel, the more is accepted.
    """

    name = "judge"
    layers: tuple[Layer, ...] = ("final",)

    def __init__(
        self,
        # Run folder of recipe=judge, or its drafter directory, trained for this target.
        path: str | None = None,
        # Probability from 0 to 1 above which the judge accepts a draft; 1 gives the greedy output.
        threshold: float = 0.5,
        # Mean signal-to-noise ratio, in decibels, of a radio channel with Rayleigh fading to the
        # drafter, for a judge trained with drafter.channel=true; null is no channel.
        snr_db: float | None = None,
        # Seed of the channel's states.
        seed: int = 0,
    ) -> None:
        super().__init__()
        if path is None:
            raise UserError(
                "acceptance.path: name a judge, as in acceptance.path=runs/judge-tiny; "
                "recipe=judge trains one"
            )
        if not 0 <= threshold <= 1:
            raise UserError(f"acceptance.threshold={threshold}: it is a probability; use 0 to 1")
        if snr_db is not None and not -100 <= snr_db <= 100:
            raise UserError(f"acceptance.snr_db={snr_db}: use decibels from -100 to 100")
        self.path, self.threshold = path, threshold
        self.snr_db, self.seed = snr_db, seed
        self.weight, self.bias, self.channel = load_probe(Path(path))  # [1, D], [1], [1] or None
        if snr_db is not None and self.channel is None:
            raise UserError(
                f"acceptance.snr_db={snr_db}: the judge in {path} does not read a channel; train "
                "one by recipe=judge drafter.channel=true"
            )
        # What the channel of the round adds to the logits of each text [B, 1].
        self.channel_logits: Tensor | float = 0.0

    def accept(
        self, tree: TokenTree, features: Features, sequence_ids: Tensor, positions: Tensor
    ) -> AcceptedPath:
        if self.snr_db is not None and self.channel is not None:
            costs = draw_round_costs(self.snr_db, self.seed, sequence_ids, positions[:, 0])
            self.channel_logits = self.channel.to(costs.device) * costs[:, None]
        return super().accept(tree, features, sequence_ids, positions)

    def forgiveness_scores(self, tree: TokenTree, features: Features, is_correct: Tensor) -> Tensor:
        states = features.at_layer("final").float()
        if states.shape[-1] != self.weight.shape[-1]:
            raise UserError(
                f"acceptance.path={self.path}: it judges states of width {self.weight.shape[-1]}, "
                f"and the target's have {states.shape[-1]}; use a judge that was trained for this "
                "target"
            )
        self.weight, self.bias = self.weight.to(states.device), self.bias.to(states.device)
        confidence = (states @ self.weight[0] + self.bias + self.channel_logits).sigmoid()
        return confidence * (confidence > self.threshold)


def load_probe(path: Path) -> tuple[Tensor, Tensor, Tensor | None]:
    """Load weight [1, D] and bias [1] of the judge in a run folder or drafter directory, and the
    weight [1] of a channel's state if it reads one, in float32.
    """
    file = next(
        (
            file
            for file in (path / "drafter" / "model.safetensors", path / "model.safetensors")
            if file.exists()
        ),
        None,
    )
    if file is None:
        raise UserError(
            f"acceptance.path={path}: there is no judge in it; give a run folder of recipe=judge"
        )
    tensors = read_tensors(file, "copy the file again", MAX_DRAFTER_TENSORS)
    channel = tensors.pop("channel", None)
    if tensors.keys() != {"probe.weight", "probe.bias"}:
        raise UserError(
            f"acceptance.path={path}: it contains a drafter, not a judge; give a run folder of "
            "recipe=judge"
        )
    return (
        tensors["probe.weight"].float(),
        tensors["probe.bias"].float(),
        None if channel is None else channel.float(),
    )
