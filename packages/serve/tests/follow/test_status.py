"""`spectrain follow status` reads files: it answers without what takes seconds to import."""

import subprocess
import sys
from pathlib import Path

from spectrain_serve.follow.ledger import Ledger

PROGRAM = """
import sys
from spectrain.cli.main import main
sys.argv = ["spectrain", "follow", "status", "run=RUN"]
main()
print(sorted({"torch", "transformers", "spectrain.models.target"} & set(sys.modules)))
"""


def test_the_status_is_printed_without_torch(tmp_path: Path) -> None:
    (tmp_path / "follow").mkdir()
    Ledger(tmp_path / "follow" / "ledger.jsonl").record("trained", candidate="0001")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("RUN", str(tmp_path))],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    *lines, modules = done.stdout.splitlines()
    assert modules == "[]", done.stderr
    assert "trained" in lines[-1] and "0001" in lines[-1]
