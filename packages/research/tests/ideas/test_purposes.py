"""Purposes of random numbers."""

from spectrain import randomness
from spectrain_research.shared import purposes


def test_no_two_purposes_share_a_number() -> None:
    numbers = [
        value
        for module in (randomness, purposes)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, int)
    ]
    assert len(numbers) == len(set(numbers)) == 14
