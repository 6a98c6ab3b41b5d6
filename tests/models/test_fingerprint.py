"""Fingerprints of a target: every value of a small one counts, and neither the type of the
weights nor adapters do.
"""

import copy

import pytest
import torch

from spectrain.models import fingerprint
from spectrain.models.fingerprint import hash_target, hash_tokenizer
from spectrain.models.target import Target


@pytest.mark.parametrize("whole_bytes", [fingerprint.WHOLE_BYTES, 0])
def test_other_weights_have_another_hash(
    shallow: Target, monkeypatch: pytest.MonkeyPatch, whole_bytes: int
) -> None:
    """A model loaded as bfloat16 has the hash of its float32 weights; one changed value is seen, or
    of a large model one of the samples."""
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", whole_bytes)
    before = hash_target(shallow)
    model = shallow.model
    other = copy.copy(shallow)
    object.__setattr__(other, "model", copy.deepcopy(model).bfloat16())
    assert hash_target(other) == before == hash_target(shallow)
    with torch.no_grad():
        next(iter(other.model.parameters())).view(-1)[0 if whole_bytes == 0 else 1] += 1.0
    assert hash_target(other) != before


def test_a_tokenizer_has_a_hash(shallow: Target) -> None:
    assert hash_tokenizer(shallow) == hash_tokenizer(shallow) is not None
