"""What decoding and the contract of drafters import, seen by a fresh interpreter.

What composes and checks a configuration is for commands: a machine that only decodes needs none of
it.
"""

import json
import subprocess
import sys
from functools import cache
from typing import Any

COMMAND_LIBRARIES = ("hydra", "omegaconf", "antlr4", "pydantic", "annotated_types")
DECODING_ROOMS = ("kernels", "trees", "models", "drafters", "decoding")
MAX_CONTRACT_FILES = 25
IMPORT = """
import importlib, json, pkgutil, sys
from importlib.abc import MetaPathFinder

class Refusal(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in LIBRARIES:
            raise ModuleNotFoundError(f"{name} is refused", name=name)

sys.meta_path.insert(0, Refusal())
import spectrain.drafters.base
contract = sorted(
    name
    for name, module in sys.modules.items()
    if name.split(".")[0] == "spectrain" and module.__file__
)
refused = {}
number = 0
for room in ROOMS:
    package = importlib.import_module(f"spectrain.{room}")
    for module in pkgutil.walk_packages(package.__path__, f"spectrain.{room}."):
        number += 1
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            refused[module.name] = str(error)
print(json.dumps({"contract": contract, "refused": refused, "number": number}))
"""


@cache
def run_imports() -> dict[str, Any]:
    """Import everything that decodes where no library of the command line can be imported."""
    source = f"LIBRARIES = {COMMAND_LIBRARIES}\nROOMS = {DECODING_ROOMS}\n{IMPORT}"
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    return dict(json.loads(ran.stdout.splitlines()[-1]))


def test_decoding_imports_no_library_of_the_command_line() -> None:
    """Kernels, trees, targets, drafters and rounds are imported without them, module by module."""
    result = run_imports()
    assert result["number"] > 100
    assert not result["refused"], result["refused"]


def test_the_contract_is_small() -> None:
    """Importing the contract of drafters loads few files, and neither the target nor the builders
    of trees.
    """
    contract = run_imports()["contract"]
    assert "spectrain.drafters.base" in contract
    assert len(contract) <= MAX_CONTRACT_FILES, contract
    assert not {"spectrain.models.target", "spectrain.trees.base"} & {*contract}
