"""The mixture of new and replayed conversations."""

from spectrain.data.chat import Example
from spectrain_serve.follow.train_candidate import mix_examples


def test_the_mixture_has_its_share() -> None:
    new, old = (
        [Example([number], [True]) for number in range(start, start + 30)] for start in (0, 100)
    )
    mixed = mix_examples(new, old, 0.25)
    assert len(mixed) == 40 and sum(example.tokens[0] >= 100 for example in mixed) == 10
    assert all(example in mixed for example in new) and mix_examples(new, [], 0.5) != new
