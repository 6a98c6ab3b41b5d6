"""Write docs/architectures.md, from what the tests find with every architecture (20 minutes on a
core).

python -m lab.pages.make_targets_page
"""

import tempfile
from pathlib import Path

import transformers

from tests.models.architectures import names
from tests.models.test_architectures import IDENTICAL, PAGE, outcomes, row

INTRODUCTION = """# Architectures

What the tests find with small random models (windows of 8 positions, experts, scaled and capped
logits) of every architecture in transformers {version} (`make test-full`): {identical} of {total}
are identical, the others are refused. [Targets](targets.md) explains the check.

*Identical* means that all of these equal what transformers computes: features and logits of whole
texts, logits at every node of random trees over three rounds of commits (alone and in a ragged
batch), and 24 greedy tokens with copied n-grams and with an untrained EAGLE-3 drafter. Where only
some of these hold, the table names them.

| architecture | identical | why not |
|---|---|---|
"""


def main() -> None:
    """Check every architecture in turn, then write the page."""
    results = {}
    for name in names():
        with tempfile.TemporaryDirectory() as folder:
            results[name] = outcomes(name, Path(folder))
        print(row(name, results[name]), flush=True)
    identical = sum({*outcome.values()} == {IDENTICAL} for outcome in results.values())
    facts = {"version": transformers.__version__, "identical": identical, "total": len(results)}
    rows = "\n".join(row(name, outcome) for name, outcome in results.items())
    PAGE.write_text(INTRODUCTION.format(**facts) + rows + "\n")


if __name__ == "__main__":
    main()
