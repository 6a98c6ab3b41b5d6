"""Trees that are the Cartesian product of the best choices at each depth."""

from itertools import product

from spectrain.errors import UserError
from spectrain.trees.fixed import Static
from spectrain.trees.token_tree import Children


class Cartesian(Static):
    """Medusa's first trees (section 3.1): the Cartesian product of each head's best `widths[d]`
    choices at depth d + 1.
    """

    name = "cartesian"

    def __init__(
        self,
        # Choices at each depth, the first depth first; the tree is their Cartesian product.
        widths: tuple[int, ...] = (3, 2, 1),
        # How the children of a node are chosen: deterministic, sampled, without_replacement or
        # top_and_sampled; acceptance rules depend on it.
        children: Children = "deterministic",
        # Temperature of the distribution that sampled children are drawn from.
        temperature: float = 1.0,
        # Seed of the random draws of children.
        seed: int = 0,
    ) -> None:
        if not widths or min(widths) < 1:
            raise UserError(f"tree.widths={list(widths)}: use one or more numbers of 1 or more")
        levels = [
            product(*(range(width) for width in widths[: depth + 1]))
            for depth in range(len(widths))
        ]
        paths = [list(path) for level in levels for path in level]
        super().__init__(len(widths), len(paths) + 1, paths, children, temperature, seed)
