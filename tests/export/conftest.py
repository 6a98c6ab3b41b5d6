"""A stand-in for optimum-intel, which the tests of packages/serve/tests/engines run: without it no
test could write OpenVINO's layouts.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from spectrain.servers.openvino_ir import IR_NAME, IrConverter

IR = '<net><layers /><rt_info>\n\t\t<eagle3_mode value="True" />\n\t</rt_info>\n</net>\n'


@pytest.fixture(autouse=True, scope="session")
def replace_ir_conversion() -> Iterator[None]:
    """Replace the conversion to IR by one that writes runtime information only."""

    def write_ir(
        self: IrConverter, source: Path | str, out: Path, options: tuple[str, ...] = ()
    ) -> None:
        out.mkdir(exist_ok=True)
        (out / f"{IR_NAME}.xml").write_text(IR)
        (out / f"{IR_NAME}.bin").write_bytes(b"0")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IrConverter, "convert", write_ir)
        yield
