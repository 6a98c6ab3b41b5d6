"""The top-level keys of each command's configuration."""

TRAIN_KEYS = (
    "target",
    "drafter",
    "source",
    "data",
    "trainer",
    "optimizer",
    "schedule",
    "tree",
    "acceptance",
    "eval",
    "tracker",
    "run",
    "recipe_name",
)
COMPARE_KEYS = (*(key for key in TRAIN_KEYS if key not in ("drafter", "recipe_name")), "compare", "recipes", "runs")
REGENERATE_KEYS = ("target", "tree", "data", "writer", "sampling", "regenerate", "out", "check", "run")
