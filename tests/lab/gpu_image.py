"""The packages of the machine with a GPU that projects like this one are lent, and an interpreter
that has no others.

The machine has Python 3.12, torch 2.11, triton 3.6 and no network.
"""

from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from packaging.utils import canonicalize_name

from scripts.travelling_wheels import find_requirements

# Those of its packages that spectrain or one of its needs may import.
PACKAGES = {
    "accelerate", "aiohttp", "anyio", "attrs", "certifi", "charset-normalizer", "click", "colorama",
    "filelock", "fsspec", "h11", "hf-xet", "httpcore", "httpx", "huggingface-hub", "idna", "jinja2",
    "joblib", "markdown-it-py", "markupsafe", "matplotlib", "mdurl", "mpmath", "networkx", "ninja",
    "numpy", "packaging", "pandas", "peft", "pillow", "pip", "protobuf", "psutil", "pyarrow",
    "pygments", "pytest", "python-dateutil", "pyyaml", "regex", "requests", "rich", "safetensors",
    "scikit-learn", "scipy", "sentencepiece", "setuptools", "six", "sympy", "tiktoken",
    "tokenizers", "torch", "tqdm", "transformers", "triton", "typer", "typing-extensions",
    "urllib3", "xxhash",
}  # fmt: skip
MISSING = (
    "annotated_types",
    "antlr4",
    "datasets",
    "gguf",
    "hydra",
    "omegaconf",
    "pydantic",
    "pydantic_core",
    "typing_inspection",
)
"""Modules that spectrain needs and the machine lacks."""

FILTER = '''"""Finds no module of a package that the machine with a GPU lacks."""
import sys
from importlib.machinery import PathFinder

REFUSED = {refused!r}


class ImageFinder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            return None
        return super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = ImageFinder
'''


def list_refused() -> set[str]:
    """Return the importable names here that the machine lacks; what its packages need here, in
    other versions, is there."""
    allowed = {*PACKAGES}
    for name in PACKAGES:
        try:
            distribution(name)
        except PackageNotFoundError:
            continue
        allowed |= find_requirements(name, {}).keys()
    return {*MISSING} | {
        module
        for module, packages in packages_distributions().items()
        # Packages of this project travel with the working tree.
        if not module.startswith("spectrain")
        and not {canonicalize_name(package) for package in packages} & allowed
    }


def write_filter(folder: Path) -> Path:
    """Write a folder that, put first in PYTHONPATH, hides the other packages."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(FILTER.format(refused=sorted(list_refused())))
    return folder
