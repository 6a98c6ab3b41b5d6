"""The bytes of a target's weights that a plan counts, against those of a loaded target."""

from pathlib import Path

from packages.cpu.tests.test_block_weights import needs_kernels
from spectrain.models.loading import build_meta_network, load_hf
from spectrain_studies.planning.weights import count_weight_bytes
from tests.models.test_gguf_weights import cache, gguf_file

__all__ = ["cache", "gguf_file"]


@needs_kernels
def test_a_plan_knows_the_bytes_of_the_blocks(gguf_file: Path) -> None:
    planned = load_hf(str(gguf_file), network=build_meta_network, quantization="gguf")
    loaded = load_hf(str(gguf_file), quantization="gguf")
    parameters = list(planned.model.parameters())
    counted = count_weight_bytes(planned, parameters, "gguf", on_cpu=True)
    assert counted == sum(weight.nbytes for weight in loaded.model.parameters())
