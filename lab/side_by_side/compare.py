"""Our engine beside the packages that a user could install instead: one target, one machine, the
same tokens, in turns.

    make side-by-side
    OMP_NUM_THREADS=2 python -m lab.side_by_side.compare target=smollm2 threads=2 out=FILE
    python -m lab.side_by_side.compare target=tiny prompts=2 tokens=12   # do all of them run?

Every package runs in a process of its own and decodes each prompt without and with its drafters.
A turn is a prompt: all systems of all packages decode it, in an order that rotates, so that a
disturbance of the machine meets all of them. No token ends a text, all decode greedily, and times
include the prompt. A speedup is over the same package's own plain decoding; tokens a second are
absolute.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.table import Table

from lab.benchmarks.command import run_benchmark
from lab.side_by_side.protocol import Setting
from spectrain.errors import UserError
from spectrain.eval.intervals import interval
from spectrain.eval.prompts import read_prompts
from spectrain.models.bundled import TINY_DIRECTORY, convert_smollm2, find_smollm2
from spectrain.models.loading import load_hf, load_smollm2, load_tiny, prepare_dense_weights
from spectrain.models.published import MODELS, locate_model
from spectrain.models.target import Target
from spectrain.output.console import make_console
from spectrain.provenance import collect_provenance

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
# The worker of each package, and whether it needs the environment of the other packages.
WORKERS = {
    "spectrain": ("own_worker.py", False),
    "transformers": ("transformers_worker.py", False),
    "economize": ("economize_worker.py", True),
    "flashspec": ("flashspec_worker.py", True),
    "dejavuu": ("dejavuu_worker.py", True),
    "llama.cpp": ("llama_cpp_worker.py", False),
}
PLAIN = "plain"
WARM_UP_TOKENS = 8


@dataclass
class Row:
    """A system of a package, with what it decoded of each prompt."""

    package: str
    system: str
    seconds: list[float] = field(default_factory=list)
    forwards: list[int | None] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.outputs)) / sum(self.seconds)

    @property
    def tokens_per_forward(self) -> float | None:
        """Tokens behind that of the prompt, per forward behind the prompt; None where the package
        does not count forwards.
        """
        counts = [count for count in self.forwards if count is not None]
        if len(counts) < len(self.forwards):
            return None
        return (sum(map(len, self.outputs)) - len(self.outputs)) / sum(counts)

    def measure_speedup(self, plain: "Row") -> dict[str, Any]:
        """Return the speedup over the package's plain decoding with its interval over prompts."""
        ratio = self.tokens_per_second / plain.tokens_per_second
        columns = [
            [len(output), seconds, len(base), base_seconds]
            for output, seconds, base, base_seconds in zip(
                self.outputs, self.seconds, plain.outputs, plain.seconds, strict=True
            )
        ]
        ends = interval(np.array(columns, dtype=np.float64), (1, -1, -1, 1))
        return {"ratio": round(ratio, 4), "ci95": ends}


class Worker:
    """The process of a package."""

    def __init__(self, package: str, process: "subprocess.Popen[str]") -> None:
        self.package = package
        self.process = process
        opening = self.read_answer()
        self.version: str = opening["version"]
        self.rows = [Row(package, name) for name in opening["systems"]]

    def read_answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise UserError(
                f"{self.package}: its process ended with status {self.process.wait()}; its own "
                f"words are above; packages= leaves it out"
            )
        return json.loads(line)

    def decode(self, row: Row, prompt: list[int], tokens: int) -> Any:
        assert self.process.stdin is not None
        request = {"system": row.system, "prompt": prompt, "tokens": tokens}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.read_answer()


class SideBySide:
    """Compare packages on one target and print, or write to a file, what each of them gains."""

    def __init__(
        self,
        target: str = "smollm2",
        prompts: int = 16,
        tokens: int = 64,
        threads: int = 1,
        source: str | None = None,
        dtype: str = "bfloat16",
        packages: str = "spectrain,transformers,economize,flashspec,dejavuu",
        environment: str = ".venv-peers",
        out: str | None = None,
    ) -> None:
        self.target = target
        self.num_prompts = prompts
        self.tokens = tokens
        self.threads = threads
        self.source = source
        self.dtype = dtype
        self.packages = packages.split(",")
        self.python = Path(environment) / "bin" / "python"
        self.out = out
        unknown = [name for name in self.packages if name not in WORKERS]
        if unknown:
            raise UserError(f"packages={unknown[0]}: use some of {', '.join(WORKERS)}")
        if any(WORKERS[name][1] for name in self.packages) and not self.python.exists():
            raise UserError(f"environment={environment}: it does not exist; run make side-by-side")

    def run(self) -> None:
        prompts = self.read_prompts()
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            setting = self.make_setting(folder)
            workers = [
                stack.enter_context(self.start(package, setting)) for package in self.packages
            ]
            self.take_turns(workers, prompts)
        rows = [row for worker in workers for row in worker.rows]
        result = {
            "setting": {
                "target": self.target,
                "dtype": self.dtype,
                "threads": self.threads,
                "has_blocks": setting.is_block_target,
                "prompts": len(prompts),
                "tokens": self.tokens,
                "source": self.source or "held-out prompts that ship",
                "versions": {worker.package: worker.version for worker in workers},
            },
            "rows": [describe_row(row, rows) for row in rows],
            "provenance": collect_provenance(),
        }
        if self.out is not None:
            Path(self.out).write_text(json.dumps(result, indent=1) + "\n")
        make_console().print(make_table(result))

    def read_prompts(self) -> list[list[int]]:
        """Return the tokens of the first turn of every prompt."""
        loaders: dict[str, Callable[..., Target]] = {"tiny": load_tiny, "smollm2": load_smollm2}
        load = loaders.get(self.target, partial(load_hf, self.target))
        target = load(parts="head")
        prompts = read_prompts(self.source, self.num_prompts).prompts
        return [prompt.tokenize_for(target) for prompt in prompts]

    def make_setting(self, folder: Path) -> Setting:
        """Return what every worker is given: models in transformers format, files for llama.cpp,
        and the export of the drafter that ships, which goes into `folder`.
        """
        if self.target == "smollm2":
            return Setting(
                str(convert_smollm2()),
                self.target,
                self.dtype,
                self.threads,
                eagle3=export_drafter("smollm2-eagle3", folder / "eagle3"),
                gguf=str(find_smollm2()),
            )
        if self.target not in MODELS:
            path = str(TINY_DIRECTORY) if self.target == "tiny" else self.target
            return Setting(path, self.target, self.dtype, self.threads)
        gguf = Path(locate_model(self.target, "target"))
        assistant = Path(locate_model("qwen2.5-coder-0.5b", "assistant"))
        return Setting(
            str(prepare_dense_weights(gguf, "cpu", self.dtype)),
            self.target,
            self.dtype,
            self.threads,
            is_block_target=True,
            assistant=str(prepare_dense_weights(assistant, "cpu", self.dtype)),
            gguf=str(gguf),
            assistant_gguf=str(assistant),
        )

    @contextmanager
    def start(self, package: str, setting: Setting) -> Iterator[Worker]:
        """Start the process of a package, and end it with the comparison."""
        file, is_peer = WORKERS[package]
        python = str(self.python) if is_peer else sys.executable
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(self.threads),
            # Progress bars of loading.
            "TQDM_DISABLE": "1",
        }
        # A worker imports the protocol from here.
        own_paths = [] if is_peer else [os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, own_paths)])
        process = subprocess.Popen(
            [python, str(FOLDER / file), json.dumps(asdict(setting))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        try:
            yield Worker(package, process)
        finally:
            process.terminate()
            process.wait()

    def take_turns(self, workers: list[Worker], prompts: list[list[int]]) -> None:
        """Let every system decode every prompt; the first system of a prompt is another one each
        time.
        """
        systems = [(worker, row) for worker in workers for row in worker.rows]
        for worker, row in systems:
            worker.decode(row, prompts[0], WARM_UP_TOKENS)
        for number, prompt in enumerate(prompts):
            start = number % len(systems)
            for worker, row in systems[start:] + systems[:start]:
                answer = worker.decode(row, prompt, self.tokens)
                row.seconds.append(answer["seconds"])
                row.forwards.append(answer["forwards"])
                row.outputs.append(answer["output"])


def export_drafter(drafter: str, folder: Path) -> str:
    """Write a drafter in the layout that other packages read; return its folder."""
    words = ["export", f"run={drafter}", "format=sglang", f"out={folder}"]
    subprocess.run(
        [sys.executable, "-m", "spectrain", *words], check=True, stdout=subprocess.DEVNULL
    )
    return str(folder)


def describe_row(row: Row, rows: list[Row]) -> dict[str, Any]:
    """Return the numbers of a system, of all prompts together and by prompt."""
    plain = next(each for each in rows if each.package == row.package and each.system == PLAIN)
    reference = next(
        (each for each in rows if each.package == "transformers" and each.system == PLAIN), plain
    )
    length = row.tokens_per_forward
    return {
        "package": row.package,
        "system": row.system,
        "tokens_per_forward": None if length is None else round(length, 4),
        "tokens_per_second": round(row.tokens_per_second, 3),
        "speedup": row.measure_speedup(plain),
        "same_as_plain": count_same(row, plain),
        "same_as_transformers": count_same(row, reference),
        "seconds": [round(seconds, 4) for seconds in row.seconds],
        "forwards": row.forwards,
    }


def count_same(row: Row, reference: Row) -> int:
    """Count the prompts whose tokens are those of another system."""
    return sum(a == b for a, b in zip(row.outputs, reference.outputs, strict=True))


def make_table(result: dict[str, Any]) -> Table:
    setting = result["setting"]
    prompts = setting["prompts"]
    table = Table(
        title=f"{setting['target']}, {setting['dtype']}, {setting['threads']} threads, "
        f"{prompts} prompts of {setting['tokens']} tokens"
    )
    titles = ("package", "system", "tokens/forward", "tokens/s", "speedup", "95 %")
    for title in (*titles, "as its plain", "as transformers"):
        table.add_column(title, justify="left" if title in titles[:2] else "right")
    for row in result["rows"]:
        length = row["tokens_per_forward"]
        ends = row["speedup"]["ci95"]
        table.add_row(
            row["package"],
            row["system"],
            "" if length is None else f"{length:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup']['ratio']:.2f}",
            "" if ends is None else f"{ends[0]:.2f} to {ends[1]:.2f}",
            f"{row['same_as_plain']} of {prompts}",
            f"{row['same_as_transformers']} of {prompts}",
        )
    return table


if __name__ == "__main__":
    run_benchmark(SideBySide)
