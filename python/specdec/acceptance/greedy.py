"""Greedy acceptance: a drafted token is right if it is the argmax of its parent's logits."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def accept_greedy(
    logits_argmax: Tensor, tokens: Tensor, parents: Tensor | None, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The longest path of each row on which every token is the argmax at its parent.

    Node 0 is the round's root token: emitted before, accepted always. Siblings may repeat a token: of several
    accepted nodes of the greatest depth the one of lowest index is taken, and all of them spell the same
    text.

    Args:
        logits_argmax: int64 [B, N], the target's greedy token after each node.
        tokens: int [B, N], the token of each node.
        parents: int [B, N], parent of each node, smaller than the node and -1 for node 0; None for chains.
        lengths: int [B], valid nodes of each row; 0 for an absent row. Nodes beyond it are ignored.

    Returns:
        path: int32 [B, P], node indices from node 0 to the last accepted node, 0 beyond `path_lengths`; P is
            the longest length.
        path_lengths: int32 [B], at least 1, and 0 where the row's length is 0.
        next_token: int64 [B], the target's token after the path; 0 where the row's length is 0.

    Raises:
        ValueError: the shapes disagree.

    >>> a, t = torch.tensor([[5, 6, 7]]), torch.tensor([[4, 5, 9]])
    >>> accept_greedy(a, t, None, torch.tensor([3]))
    (tensor([[0, 1]], dtype=torch.int32), tensor([2], dtype=torch.int32), tensor([6]))
    """
    want, have, size = logits_argmax.numpy(), tokens.numpy(), lengths.numpy()
    if want.ndim != 2 or have.shape != want.shape:
        raise ValueError(f"tokens: got {have.shape}, want [B, N] like logits_argmax, which is {want.shape}")
    if size.shape != want.shape[:1]:
        raise ValueError(f"lengths: got {size.shape}, want [{want.shape[0]}]")
    if parents is None:
        path, path_lengths = _chains(want, have, size)
    else:
        above = parents.numpy()
        if above.shape != want.shape:
            raise ValueError(f"parents: got {above.shape}, want [B, N] = {want.shape}")
        path, path_lengths = _trees(want, have, above, size)
    rows = np.arange(want.shape[0])
    leaf = path[rows, np.maximum(path_lengths, 1) - 1]
    next_token = np.where(path_lengths > 0, want[rows, leaf], 0)
    return (
        torch.from_numpy(path),
        torch.from_numpy(path_lengths),
        torch.from_numpy(next_token.astype(np.int64, copy=False)),
    )


_Int32 = NDArray[np.int32]
_Ints = NDArray[np.integer]


def _chains(want: _Ints, have: _Ints, size: _Ints) -> tuple[_Int32, _Int32]:
    batch, nodes = want.shape
    wrong = np.ones((batch, nodes), bool)  # [B, N]; the column past the last draft always stops the run
    np.not_equal(have[:, 1:], want[:, :-1], out=wrong[:, :-1])
    path_lengths = np.minimum(wrong.argmax(1) + 1, size).astype(np.int32)
    steps = np.arange(max(1, int(path_lengths.max(initial=1))), dtype=np.int32)
    path = np.where(steps < path_lengths[:, None], steps, np.int32(0))  # [B, P]
    return path, path_lengths


def _trees(want: _Ints, have: _Ints, above: _Ints, size: _Ints) -> tuple[_Int32, _Int32]:
    # Plain Python: for the few dozen nodes of a round it is several times faster than array operations.
    paths = [
        _deepest(*row)
        for row in zip(want.tolist(), have.tolist(), above.tolist(), size.tolist(), strict=True)
    ]
    path_lengths = np.array([len(p) for p in paths], np.int32)
    path = np.zeros((len(paths), max([1, *map(len, paths)])), np.int32)  # [B, P]
    for row, nodes in zip(path, paths, strict=True):
        row[: len(nodes)] = nodes
    return path, path_lengths


def _deepest(want: list[int], have: list[int], above: list[int], size: int) -> list[int]:
    if size == 0:
        return []
    depth, leaf = {0: 0}, 0  # of accepted nodes
    for j in range(1, size):
        parent = above[j]
        if parent in depth and have[j] == want[parent]:
            depth[j] = depth[parent] + 1
            if depth[j] > depth[leaf]:
                leaf = j
    path = [leaf]
    while leaf > 0:
        leaf = above[leaf]
        path.append(leaf)
    return path[::-1]
