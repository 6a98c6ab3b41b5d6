"""Make a run's drafter one that comes with the package: its weights in bfloat16, and where they
come from.

    python scripts/make_shipped_drafter.py RUN NAME

RUN is the folder of a finished training; spectrain/data/drafters/NAME is written, which
conf/drafter/NAME.yaml and spectrain/runs/drafters.py name.
"""

import argparse
import json
import re
from pathlib import Path

from safetensors.torch import load_file, save_file

from spectrain.runs.folder import OWN_DRAFTERS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    args = parser.parse_args()
    source = args.run / "drafter"
    out = OWN_DRAFTERS[0].folder.with_name(args.name)
    out.mkdir(parents=True, exist_ok=True)
    weights = load_file(source / "model.safetensors")
    rounded = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }
    save_file(rounded, out / "model.safetensors", metadata={"format": "pt"})
    description = json.loads((source / "config.json").read_text())
    description["drafter"].pop("init", None)  # all weights are here
    (out / "config.json").write_text(json.dumps(description, indent=2) + "\n")
    write_origin(args.run, out)
    print(f"{out}: {sum(file.stat().st_size for file in out.iterdir()) / 1e6:.1f} MB")


def write_origin(run: Path, out: Path) -> None:
    """Write provenance.json of a training into the folder of its drafter, with names of files in
    place of paths of the machine that trained it.
    """
    facts = json.loads((run / "provenance.json").read_text())
    del facts["target"]
    words = [word for word in facts["command"].split() if not word.startswith("run=")]
    facts["command"] = " ".join(re.sub(r"=/\S*/", "=", word) for word in words)
    (out / "provenance.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
