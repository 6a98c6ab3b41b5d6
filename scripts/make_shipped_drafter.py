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
    facts = json.loads((args.run / "provenance.json").read_text())
    del facts["target"]  # a path of the machine that trained it
    words = [word for word in facts["command"].split() if not word.startswith("run=")]
    # names of files, not their places
    facts["command"] = " ".join(re.sub(r"=/\S*/", "=", word) for word in words)
    (out / "provenance.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(f"{out}: {sum(file.stat().st_size for file in out.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
