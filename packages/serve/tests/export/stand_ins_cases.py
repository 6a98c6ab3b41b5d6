"""A stand-in for optimum-intel, which the tests of packages/serve/tests/engines run: without it no
test could write OpenVINO's layouts.
"""

from pathlib import Path
from typing import Any

from spectrain_serve.engines.openvino_ir import IR_NAME, IrConverter

IR = '<net><layers /><rt_info>\n\t\t<eagle3_mode value="True" />\n\t</rt_info>\n</net>\n'


def write_ir(
    self: IrConverter, source: Path | str, out: Path, options: tuple[str, ...] = ()
) -> None:
    """Write runtime information only."""
    out.mkdir(exist_ok=True)
    (out / f"{IR_NAME}.xml").write_text(IR)
    (out / f"{IR_NAME}.bin").write_bytes(b"0")


# Object, the name of its function, and what replaces it.
CASES: dict[str, Any] = {"STAND_INS": [(IrConverter, "convert", write_ir)]}
