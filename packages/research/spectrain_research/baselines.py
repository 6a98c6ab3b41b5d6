"""The ideas that need no training and stand beside the recipes in comparisons."""

from spectrain.eval.installed_baselines import InstalledBaseline

BASELINES = (
    InstalledBaseline("lookahead", is_baseline=True, is_compared=True),
    InstalledBaseline("layer_skip", is_compared=True),
)
