"""Compile kernels for a GPU, by default an H100 or H200 (sm_90), on a machine without one, and read off what they use.

Run as a program, because a process in which triton interprets cannot compile: requests in JSON on stdin, answers on stdout.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

SHARED_MEMORY = {90: 227 * 1024, 89: 99 * 1024, 120: 99 * 1024}  # what a program may have on each architecture


@dataclass(frozen=True)
class Request:
    """One kernel with one set of constants."""

    module: str
    kernel: str
    types: dict[str, str]  # of arguments, such as "*bf16"; those that are in neither are "i32"
    constants: dict[str, Any]
    warps: int
    stages: int
    architecture: int = 90
    multiples: tuple[str, ...] = ()  # numbers divisible by 16, beside pointers and strides


@dataclass(frozen=True)
class Usage:
    """What the compiled kernel takes of the machine."""

    registers: int  # a thread
    stack: int  # bytes a thread, 0 where nothing spills
    shared: int  # bytes a program
    wgmma: int  # HGMMA instructions: a warpgroup's matrix products
    mma: int  # HMMA instructions: a warp's
    copies: int  # LDGSTS instructions: asynchronous copies into shared memory
    wide: int  # loads of 16 bytes


def compile_all(requests: list[Request]) -> list[Usage]:
    """Compile in a process of its own; triton keeps the results on disk."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", __file__]
    text = json.dumps([asdict(request) for request in requests])
    process = subprocess.run(command, input=text, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr[-3000:]
    return [Usage(**usage) for usage in json.loads(process.stdout)]


@cache
def tool() -> str:
    """The cuobjdump that triton ships."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def compile_one(request: Request) -> Usage:
    """Compile as a launch would: pointers and strides divisible by 16, so that loads become vectors."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(request.module), request.kernel)
    names, constants = kernel.arg_names, request.constants
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else request.types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if name not in constants and (name.endswith("_ptr") or "_stride" in name or name in request.multiples)
        },
    )
    options = {"num_warps": request.warps, "num_stages": request.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", request.architecture, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        resources = subprocess.run([tool(), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
        assembly = subprocess.run([tool(), "--dump-sass", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", resources.stdout)
    assert found is not None, resources.stdout
    names = (r"HGMMA\b", r"HMMA\b", r"LDGSTS\b", r"LDG\.\S*128\b")
    counts = [len(re.findall(rf"\b{name}", assembly)) for name in names]
    return Usage(int(found[1]), int(found[2]), compiled.metadata.shared, *counts)


if __name__ == "__main__":
    print(json.dumps([asdict(compile_one(Request(**request))) for request in json.load(sys.stdin)]))
