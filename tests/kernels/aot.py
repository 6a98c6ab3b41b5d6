"""Compile kernels for a GPU, by default an H100 or H200 (sm_90), on a machine without one, and read
off what they use.

Run as a program, because a process in which triton interprets cannot compile: requests in JSON on
stdin, a line each, and a line on stdout for each of them.
"""

import atexit
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

# what a program may have on each architecture
SHARED_MEMORY = {90: 227 * 1024, 89: 99 * 1024, 120: 99 * 1024}


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
    """The resources of the machine that the compiled kernel takes."""

    registers: int  # a thread
    stack: int  # bytes a thread, 0 where nothing spills
    shared: int  # bytes a program
    wgmma: int  # HGMMA instructions: a warpgroup's matrix products
    mma: int  # HMMA instructions: a warp's
    copies: int  # LDGSTS instructions: asynchronous copies into shared memory
    wide: int  # loads of 16 bytes
    # instructions of each innermost loop that multiplies, in the order of the code
    loops: tuple[int, ...]


@cache
def start_compiler() -> "subprocess.Popen[str]":
    """A process that compiles; it lives as long as this one, for it takes seconds to start."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", __file__]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    atexit.register(process.communicate)  # which ends its input and waits for it
    return process


def compile_for(request: Request) -> Usage:
    """Compile in a process of its own; triton keeps the results on disk."""
    process = start_compiler()
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps(asdict(request)), file=process.stdin, flush=True)
    answer = process.stdout.readline()
    assert answer, "the process that compiles has died; what it said is on stderr"
    result = json.loads(answer)
    assert "failure" not in result, result["failure"]
    return Usage(**result | {"loops": tuple(result["loops"])})


@cache
def tool() -> str:
    """The cuobjdump that triton ships."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def compile_kernel(request: Request) -> Usage:
    """Compile as a launch would: pointers and strides divisible by 16, so that loads become
    vectors.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(request.module), request.kernel)
    names = kernel.arg_names
    constants = request.constants
    source = ASTSource(
        fn=kernel,
        signature={
            name: "constexpr" if name in constants else request.types.get(name, "i32")
            for name in names
        },
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if name not in constants
            and (name.endswith("_ptr") or "_stride" in name or name in request.multiples)
        },
    )
    options = {"num_warps": request.warps, "num_stages": request.stages}
    compiled = triton.compile(
        source, target=GPUTarget("cuda", request.architecture, 32), options=options
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        resources = subprocess.run(
            [tool(), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
        assembly = subprocess.run(
            [tool(), "--dump-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    result = re.search(r"REG:(\d+) STACK:(\d+)", resources.stdout)
    assert result is not None, resources.stdout
    patterns = (r"HGMMA\b", r"HMMA\b", r"LDGSTS\b", r"LDG\.\S*128\b")
    wgmma, mma, copies, wide = (len(re.findall(rf"\b{pattern}", assembly)) for pattern in patterns)
    registers, stack = (int(number) for number in result.groups())
    return Usage(
        registers, stack, compiled.metadata.shared, wgmma, mma, copies, wide, loops_in(assembly)
    )


def loops_in(assembly: str) -> tuple[int, ...]:
    """Count instructions of every loop with a product and no other such loop inside; a loop is
    what a branch goes back over.
    """
    lines = [
        (int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/ +(.*?);", assembly)
    ]
    product = [at for at, text in lines if re.search(r"\b(HGMMA|HMMA|FFMA)\b", text)]
    spans = []
    for at, text in lines:
        branch = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if branch is not None and int(branch[1], 16) < at:
            spans.append((int(branch[1], 16), at))
    spans = [(start, end) for start, end in spans if any(start <= at <= end for at in product)]
    inner = [
        (a, b)
        for a, b in spans
        if not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)
    ]
    return tuple(sum(start <= at <= end for at, _ in lines) for start, end in sorted(inner))


if __name__ == "__main__":
    for line in sys.stdin:
        try:
            answer = asdict(compile_kernel(Request(**json.loads(line))))
        except Exception:  # the test fails, the next one does not
            answer = {"failure": traceback.format_exc()[-3000:]}
        print(json.dumps(answer), flush=True)
