"""The layouts of P-EAGLE: EAGLE-3's with `mask_hidden`, a mask token and, usually, a trained
embedding.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from spectrain.drafters.layers.eagle_layers import default_layers
from spectrain.drafters.peagle import NUM_DRAFTS
from spectrain.servers.commands import DrafterLaunch

from .eagle3 import Eagle3Layout
from .flat import FlatEagle3
from .fused import FusedConfig
from .layout import DrafterCheckpoint, DrafterFiles, Finding
from .speculators import SpeculatorsEagle3, read_method
from .targets import TargetFiles

MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Keys that vLLM reads the mask token from, in this order."""


class PEagleLayout(Eagle3Layout):
    """What P-EAGLE adds to a layout of EAGLE-3."""

    constructor = "spectrain.drafters.peagle.PEagle"

    @abstractmethod
    def read_num_drafts(self, files: DrafterFiles) -> int | None:
        """Return the number of drafts that the files name."""

    def mask_token_id(self, files: DrafterFiles) -> Any:
        """Return the id of the mask token, or None where the files name none."""
        return next(
            (files.config[key] for key in MASK_TOKEN_KEYS if files.config.get(key) is not None),
            None,
        )

    def embedding_settings(
        self, config: FusedConfig, files: DrafterFiles, own_embedding: bool
    ) -> dict[str, Any]:
        num_drafts = self.read_num_drafts(files)
        return {
            "architecture": config.architecture,
            "own_embedding": own_embedding,
            "mask_token_id": self.mask_token_id(files),
            **({} if num_drafts is None else {"num_drafts": num_drafts}),
        }

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        yield from super().findings(files)
        token = self.mask_token_id(files)
        rows = self.parse_config(files).vocab_size
        if not isinstance(token, int) or not 0 <= token < rows:
            yield Finding(
                "mask-token",
                "error",
                f"the mask token is {token}, outside the embedding, which has {rows} rows",
                "engines refuse the file, or read another row",
                "write the id that it was trained with",
            )

    def drafter_launches(
        self, drafter: DrafterCheckpoint, files: TargetFiles, path: str
    ) -> dict[str, DrafterLaunch]:
        return {
            "vllm": DrafterLaunch("eagle3", path, drafter.drafter["num_drafts"], is_parallel=True)
        }


class SpeculatorsPEagle(PEagleLayout, SpeculatorsEagle3):
    """The layout of P-EAGLE that the speculators library writes and vLLM reads."""

    title = "P-EAGLE, speculators layout"
    model_type = "peagle"
    architectures = ("PEagleSpeculator",)
    # Without norm_output: there is no next step to feed normed states to.
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm")
    implied_flags = ()
    trains_embedding = True

    def num_drafts(self, drafter: DrafterCheckpoint) -> int:
        return int(drafter.drafter["num_drafts"])

    def read_num_drafts(self, files: DrafterFiles) -> int | None:
        return int(read_method(files).get("speculative_tokens", NUM_DRAFTS))

    def extra_entries(self, drafter: DrafterCheckpoint) -> dict[str, Any]:
        return {"mask_token_id": drafter.drafter["mask_token_id"]}

    def findings(self, files: DrafterFiles) -> Iterator[Finding]:
        yield from super().findings(files)
        if files.config.get("fc_norm"):
            yield Finding(
                "fc-norm-dropped",
                "warning",
                "fc_norm is on",
                (
                    "vLLM 0.32 honours this flag for EAGLE-3 only, and stops at the norms of "
                    "a P-EAGLE"
                ),
                ("serve the flat layout: spectrain convert DIR OUT --to flat --target TARGET"),
            )


class FlatPEagle(PEagleLayout, FlatEagle3):
    """EAGLE-3's flat config.json with `pard_token`, which only vLLM serves.

    Layer ids are vLLM's, which are spectrain's, and the files hold the embedding. `ptd_token_id`,
    another name of the token, is read, too.
    """

    title = "P-EAGLE, flat layout"
    layer_id_offset = 0
    replaced_tensors = ()

    def matches_files(self, files: DrafterFiles) -> bool:
        return super().matches_files(files) and (
            "mask_hidden" in self.native_tensors(files) or self.mask_token_id(files) is not None
        )

    def read_num_drafts(self, files: DrafterFiles) -> int | None:
        return None if "num_drafts" in files.read_metadata().drafter else NUM_DRAFTS

    def numbering_findings(self, files: DrafterFiles) -> Iterator[Finding]:
        if self._layer_ids(files.config) is None:
            yield Finding(
                "layer-ids-missing",
                "warning",
                "eagle_aux_hidden_state_layer_ids is missing",
                "vLLM uses its own default",
                "write the layers that it was trained on",
            )

    def findings_with_target(self, files: DrafterFiles, target: TargetFiles) -> Iterator[Finding]:
        yield from Eagle3Layout.findings_with_target(self, files, target)
        lower = [layer - 1 for layer in default_layers(target.num_layers)]
        if self._layer_ids(files.config) == lower:
            yield Finding(
                "layer-ids-numbering",
                "warning",
                f"layer ids are {lower}, the default in SGLang's numbering",
                "vLLM, the only engine of P-EAGLE, uses them unchanged and fuses the preceding "
                "layers",
                f"write {[layer + 1 for layer in lower]}, unless it was trained on these",
            )

    def file_tensors(self, drafter: DrafterCheckpoint) -> dict[str, Tensor]:
        return dict(drafter.tensors)

    def extra_config(
        self, drafter: DrafterCheckpoint, target: TargetFiles | None
    ) -> dict[str, Any]:
        layers = drafter.drafter.get("layers")
        layer_ids = {} if layers is None else {"eagle_aux_hidden_state_layer_ids": layers}
        return {**layer_ids, "pard_token": drafter.drafter["mask_token_id"]}

    def check_writable(self, drafter: DrafterCheckpoint, target: TargetFiles | None) -> None:
        """Accept every drafter: this layout can hold all of P-EAGLE."""
