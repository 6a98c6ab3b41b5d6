"""The phrases that verification finds in rejected drafts."""

from __future__ import annotations

from collections.abc import Sequence


def find_agreeing_runs(
    tokens: Sequence[int], parents: Sequence[int], answers: Sequence[int], rejected: Sequence[bool]
) -> list[list[int]]:
    """Return the longest runs of rejected nodes that each have the token that the target predicts
    at their parent.

    Such nodes were rejected only because an earlier one was wrong. Nodes are listed with parents
    before children; runs of a single node are left out.
    """
    runs: dict[int, list[int]] = {}
    for node in range(1, len(tokens)):
        if rejected[node] and tokens[node] == answers[parents[node]]:
            runs[node] = [*runs.get(parents[node], []), tokens[node]]
    continued = {parents[node] for node in runs}
    return [run for node, run in runs.items() if node not in continued and len(run) > 1]
