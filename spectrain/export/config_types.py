"""The types of keys that configurations of drafters share, whatever their layout: a value of
another type is an error.

Engines and this project read these keys, or ignore some of them. A value that no reader can mean is
damage or deception, so it is refused rather than ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spectrain.errors import UserError
from spectrain.models.model_sizes import is_number, iterate_settings

FLAGS = {
    "attention_bias", "causal", "eagle_fc_bias", "embed_requires_grad", "fc_bias", "fc_norm",
    "has_no_defaults_at_init",
    "is_decoder", "medusa_fc_bias", "mlp_bias", "norm_before_fc", "norm_before_residual",
    "norm_output", "original_lm_head",
    "qkv_bias", "sample_from_anchor", "tie_word_embeddings", "use_aux_hidden_state", "use_cache",
    "use_sliding_window",
}  # fmt: skip
"""Keys whose values are true or false."""
NAMES = {
    "algorithm",
    "base_model_name_or_path",
    "default_proposal_method",
    "dtype",
    "hidden_act",
    "model_type",
    "name_or_path",
    "proposal_type",
    "speculators_model_type",
    "torch_dtype",
}
"""Keys whose values are texts."""
NAME_LISTS = {"architectures", "layer_types"}
"""Keys whose values are lists of texts."""
LAYER_LISTS = {"eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids"}
"""Keys whose values are lists of the target's layers; other checks read their entries."""
MAX_LAYERS = 256
TOKEN_IDS = {"bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id", "pard_token"}
"""Keys whose values are ids of tokens, of which there may be several."""
COUNTS = {"speculative_tokens": 4096, "verifier_accept_k": 10_000_000}
"""Keys whose values are whole numbers, and the largest one."""
MAX_TOKEN_ID = 10_000_000


def check_types(config: dict[str, Any], path: Path) -> None:
    """Raise a UserError for the first known key of a configuration, or of a part of it, whose value
    has another type.

    Null stands for a default.
    """
    for key, value in iterate_settings(config):
        remedy = None if value is None else find_wrong_type(key, value)
        if remedy is not None:
            raise UserError(f"{path}: {key}={str(value)[:100]}: use {remedy}; copy the file again")


def find_wrong_type(key: str, value: Any) -> str | None:
    """Return what to write in place of the value of a key; None for a value that it may have, or
    for an unknown key.
    """
    if key in FLAGS and not isinstance(value, bool):
        return "true or false"
    if key in NAMES and not isinstance(value, str):
        return "a text"
    if key in NAME_LISTS and not (
        isinstance(value, list) and all(isinstance(name, str) for name in value)
    ):
        return "a list of texts"
    if key in LAYER_LISTS and not (isinstance(value, list) and len(value) <= MAX_LAYERS):
        return f"a list of at most {MAX_LAYERS} layers"
    ids = value if isinstance(value, list) else [value]
    if key in TOKEN_IDS and not all(
        is_number(token, MAX_TOKEN_ID, least=-1) and isinstance(token, int) for token in ids
    ):
        return f"a whole number from 0 to {MAX_TOKEN_ID}"
    if key in COUNTS and not (is_number(value, COUNTS[key], least=1) and isinstance(value, int)):
        return f"a whole number from 1 to {COUNTS[key]}"
    return None
