"""Kernels of copied drafts on a CPU find what the loops over a store find, and merge it to the
same trie.
"""

from pathlib import Path

import numpy as np
import pytest

from spectrain.copying.merging import (
    merge_continuations_reference,
)
from spectrain.copying.suffixes import TEXT_END
from spectrain.data.datastore import Datastore, hash_vocabulary, write_store
from spectrain.drafters.layers.copies import merge_continuations
from spectrain.kernels import dispatch
from spectrain.models.accelerator import accelerator
from spectrain_cpu.available import are_kernels_loaded
from tests.data.test_datastore import DigitTokenizer

pytestmark = pytest.mark.skipif(
    not are_kernels_loaded(), reason="Numba is not installed or switched off"
)


@pytest.mark.parametrize("kinds", [1, 2, 6])
@pytest.mark.parametrize("limits", [(200, 64), (7, 64), (2, 1), (1, 1)])
def test_a_store_is_searched_as_by_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: int, limits: tuple[int, int]
) -> None:
    """Texts of every length, of which many match, some match as a whole, and some have a token
    that no text has.
    """
    rng = np.random.default_rng(kinds)
    texts = [rng.integers(0, kinds, rng.integers(1, 60)).tolist() for _ in range(12)]
    write_store(tmp_path / "store", texts, [], [], {"tokenizer": hash_vocabulary(DigitTokenizer())})
    store = Datastore(str(tmp_path / "store"), DigitTokenizer())
    accelerator().prepare_copying()
    for length in (1, 2, 3, 5, 16, 30):
        for text in (
            rng.integers(0, kinds + 1, length).tolist(),
            (texts[0] * 30)[:length],
            texts[3][-length:],
        ):
            found = store.find_continuations(text, 4, *limits)
            with monkeypatch.context() as patch:
                patch.setattr(dispatch, "cpu_kernel_sources", lambda: ())
                expected = store.find_continuations(text, 4, *limits)
            assert all(
                np.array_equal(actual, wanted)
                for actual, wanted in zip(found, expected, strict=True)
            )


@pytest.mark.parametrize("num_rows", [0, 1, 40, 300])
def test_continuations_are_merged_as_by_sorting(num_rows: int) -> None:
    """Two sources with few or many different tokens, some of whose texts end early, and any
    least share.
    """
    accelerator().prepare_copying()
    rng = np.random.default_rng(num_rows)
    for kinds in (2, 5, 50):
        tokens = rng.integers(0, kinds, (num_rows, 6))
        tokens[np.arange(6) >= rng.integers(1, 12, (num_rows, 1))] = TEXT_END
        lengths = rng.integers(1, 17, num_rows)
        sources = np.sort(rng.integers(0, 2, num_rows))
        for least in (0.0, 0.01, 0.3):
            actual, expected = (
                merge(lengths, tokens, sources, 2, least)
                for merge in (merge_continuations, merge_continuations_reference)
            )
            # The root's token and parent are meaningless.
            assert all(
                np.array_equal(part[1:], wanted[1:])
                for part, wanted in zip(actual[:3], expected[:3])
            )
            estimates = [
                sorted(zip(*map(np.ndarray.tolist, merged[3:]))) for merged in (actual, expected)
            ]
            assert estimates[0] == estimates[1]
