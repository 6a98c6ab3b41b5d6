"""An independent reference of what a rule accepts once it has chosen the token after every node."""

import torch
from torch import Tensor

from spectrain.trees.token_tree import AcceptedPath, TokenTree


def walk(tree: TokenTree, choice: Tensor) -> AcceptedPath:
    """Follow `choice` [B, N], the token that the target wants after each node, from the root as
    deep as the tree goes.

    A node is kept where it and all of its ancestors carry the token that their parent's choice
    names. Where siblings drawn with replacement are equal, the deepest path counts, and of equal
    ones the first.
    """
    chosen = choice.gather(1, tree.parents.clamp(min=0))
    match = (tree.tokens == chosen) & tree.valid & tree.can_emit
    match[:, 0] = True
    accepted = (match[:, None] | ~tree.ancestors).all(-1)
    counts = accepted.long().mul(tree.depths + 1).amax(-1)
    last = accepted.long().mul(tree.depths + 1).argmax(-1)
    on_path = tree.ancestors.gather(1, last[:, None, None].expand(-1, 1, tree.tokens.shape[1]))[
        :, 0
    ]
    index = torch.arange(tree.tokens.shape[1], device=choice.device)
    order = torch.where(on_path, index, index + len(index)).argsort(-1)[:, : int(counts.max())]
    path = torch.where(
        torch.arange(order.shape[1], device=choice.device) < counts[:, None], order, last[:, None]
    )
    return AcceptedPath(path, counts, choice.gather(1, last[:, None])[:, 0])
