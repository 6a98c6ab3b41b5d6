"""A value that is computed once, also in compiled code."""

import pytest
import torch
from torch import Tensor

from spectrain.trees import token_tree
from spectrain.trees.cached_value import cached_value
from spectrain.trees.token_tree import TokenTree


class Counting:
    """A class whose property counts how often it is computed."""

    calls = 0

    @cached_value
    def answer(self) -> int:
        """The answer."""
        self.calls += 1
        return 42


def test_a_value_is_computed_once_for_each_instance() -> None:
    first = Counting()
    assert (first.answer, first.answer, first.calls) == (42, 42, 1)
    assert (Counting().answer, Counting.answer.__doc__) == (42, "The answer.")


def test_compiled_code_reads_a_tree_without_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no CPU kernel finds the ancestors, as on a GPU, one graph holds the whole function."""
    monkeypatch.setattr(token_tree, "run_on_cpu", lambda *operands: None)

    def find_depths(tokens: Tensor, parents: Tensor) -> Tensor:
        tree = TokenTree.from_parents(tokens, parents)
        return tree.depths + tree.ancestors.sum(-1)

    tokens = torch.zeros(1, 4, dtype=torch.int64)
    parents = torch.tensor([[-1, 0, 0, 1]])
    compiled = torch.compile(find_depths, backend="eager", fullgraph=True)
    assert compiled(tokens, parents).tolist() == [[1, 3, 3, 5]]
