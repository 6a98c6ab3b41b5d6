"""Codecs of keys and values: what they give back, by hand or by theory."""

import pytest
import torch

from spectrain_research.less_cache.codecs import (
    MergingCodec,
    OutlierCodec,
    RotatingCodec,
    match_tokens,
    normal_levels,
)


def test_similar_tokens_are_merged() -> None:
    """Of eight tokens the odd one that is most like an even one joins it; attention over the means,
    with log(count) added to the logit of what was merged, is attention over what the codec returns.
    """
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, 8, 1, 4)
    keys[0, 5] = 2 * keys[0, 2] + 0.01
    clusters = match_tokens(keys[0, :, 0], 1)
    assert clusters.tolist() == [0, 1, 2, 3, 4, 2, 6, 7]
    new_keys, new_values = MergingCodec(1 / 8).approximate(keys, values, 8)
    query = torch.randn(4)
    expanded = (new_keys[0, :, 0] @ query).softmax(0) @ new_values[0, :, 0]
    alone = [0, 1, 2, 3, 4, 6, 7]
    merged_keys = keys[0, :, 0].clone()
    merged_values = values[0, :, 0].clone()
    merged_keys[2], merged_values[2] = (part[0, [2, 5], 0].mean(0) for part in (keys, values))
    count = torch.tensor([1.0, 1, 2, 1, 1, 1, 1])
    torch.testing.assert_close(
        expanded, (merged_keys[alone] @ query + count.log()).softmax(0) @ merged_values[alone]
    )
    assert MergingCodec(0.25).group_bytes(4, 4, 8, 2) == 6 * 17


def test_outliers_stay_and_do_not_widen_ranges() -> None:
    """Two tokens with huge keys of a group of eight come back exactly, and the others with an error
    of half a step of the range of the others."""
    torch.manual_seed(0)
    keys, values = torch.rand(2, 1, 8, 1, 16)
    keys[0, [1, 6]] *= 1000
    new_keys, new_values = OutlierCodec(4, 2).approximate(keys, values, 8)
    assert torch.equal(new_keys[0, [1, 6]], keys[0, [1, 6]]) and torch.equal(
        new_values[0, [1, 6]], values[0, [1, 6]]
    )
    assert (new_keys - keys).abs().max() < 1.05 / 15 / 2 and not torch.equal(new_keys, keys)


@pytest.mark.parametrize(
    ("bits", "distortion"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)]
)
def test_levels_have_the_published_distortion(bits: int, distortion: float) -> None:
    """Lloyd-Max levels of the normal distribution (Max, 1960, table I), and vectors lose as much
    of their squared norm.
    """
    x = torch.linspace(-8, 8, 20001, dtype=torch.float64)
    density = (-x * x / 2).exp() / (-x * x / 2).exp().sum()
    error = (x[:, None] - torch.tensor(normal_levels(1 << bits)).double()).abs().amin(1)
    assert float((density * error**2).sum()) == pytest.approx(distortion, rel=2e-3)
    torch.manual_seed(0)
    vectors = torch.randn(500, 64) * torch.rand(500, 1)
    lost = (RotatingCodec(4).approximate_vectors(vectors, bits) - vectors).square().sum(
        -1
    ) / vectors.square().sum(-1)
    assert float(lost.mean()) == pytest.approx(distortion, rel=0.08)


def test_inner_products_are_unbiased() -> None:
    """Over many sketches the mean inner product of a query with a coded key is that with the
    key.
    """
    torch.manual_seed(0)
    keys = torch.randn(3, 16)
    query = torch.randn(16)
    products = torch.stack(
        [RotatingCodec(2, seed).approximate_unbiased(keys) @ query for seed in range(600)]
    )
    error = (products.mean(0) - keys @ query).abs()
    assert (error < 4 * products.std(0) / 600**0.5).all()
