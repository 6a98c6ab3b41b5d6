"""What the ideas say about saved settings: older names, and settings that only a command sets."""

from typing import Any

from spectrain.config.command_only import CommandOnlySetting, SavedSettings


def split_mask_drafters(node: dict[str, Any]) -> dict[str, Any]:
    """Return the choice of a family that was a setting of gated_lora when its drafter was saved."""
    if node.get("choice") != "gated_lora":
        return node
    settings = {
        key: value
        for key, value in node.items()
        if key not in ("noise", "ensembles", "transfer_layer")
    }
    if node.get("noise") in ("transfer", "streams"):
        choice = "hidden_transfer" if node["noise"] == "transfer" else "speculative_streaming"
        return {**settings, "choice": choice, "transfer_layer": node.get("transfer_layer")}
    if node.get("ensembles", 1) > 1:
        return {**settings, "choice": "ppd", "ensembles": node["ensembles"]}
    if node.get("noise") == "uniform":
        return {"strategy": "quadratic", "sampler": True, **settings, "choice": "uno"}
    return {**settings, "noise": node["noise"]} if "noise" in node else settings


SAVED = SavedSettings(
    command_only=(
        CommandOnlySetting("tree", "policy", "writes", "writes a file"),
        CommandOnlySetting("drafter", "table", "writes", "writes a folder"),
    ),
    downloaded={"eval": ("model",)},
    renamed={
        # The evaluation was a subclass when the ideas were a folder of spectrain.
        "spectrain.experimental.evaluation.ExperimentalEvaluation": (
            "spectrain.eval.default.DefaultEvaluation"
        ),
        "spectrain.experimental.": "spectrain_research.",
        # It was a family of the core.
        "spectrain.drafters.uno.Uno": "spectrain_research.uno.drafter.Uno",
    },
    update=split_mask_drafters,
)
