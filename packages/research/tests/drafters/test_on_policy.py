"""Which families learn from their own drafts."""

import pytest

from spectrain.drafters.causal import Causal
from spectrain.drafters.dspark import DSpark
from spectrain.drafters.eagle1 import Eagle1
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.ngram import Ngram
from spectrain.models.target import Target
from spectrain_research.devices.drafter import OtherDevice
from spectrain_research.shared.on_policy import OnPolicy, find_on_policy
from spectrain_research.supernet.drafter import Supernet
from tests.drafters.test_capabilities import make_hybrid
from tests.drafters.test_contract import ARCHITECTURE


@pytest.mark.parametrize(
    "family, expected",
    [
        (Eagle1, OnPolicy()),
        (Eagle3, OnPolicy(learns_windows=True)),
        (Supernet, OnPolicy(learns_windows=True)),
        (DSpark, None),
        (Ngram, None),
    ],
)
def test_a_family_learns_as_its_nearest_base(family: type, expected: OnPolicy | None) -> None:
    assert find_on_policy.dispatch(family)(family) == expected


def test_a_wrapper_learns_as_its_drafter_but_not_on_another_device(shallow: Target) -> None:
    causal = Causal(shallow, architecture=ARCHITECTURE)
    own = find_on_policy(causal)
    assert own is not None and own.language_model is causal.model
    assert find_on_policy(make_hybrid(causal, shallow)) == own
    placed = OtherDevice(shallow, {"choice": "causal", "architecture": ARCHITECTURE}, "cpu")
    assert find_on_policy(placed) is None and find_on_policy(placed.inner) is not None
