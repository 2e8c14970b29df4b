"""The one check of a path that an operator cannot make: that it follows the tree."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def check_path(
    path: Tensor | None,
    path_lengths: Tensor | None,
    parents: Tensor | None,
    *,
    slots: Tensor | None = None,
) -> None:
    """Checks that every row's path runs from a root to a node, each entry the parent of the next.

    `commit`, `conv_commit` and `pending` see factors, not the tree: they check that a path's nodes exist and
    ascend, which is all that memory safety needs. Nodes off one branch would be folded into one state, and no
    error would say so. Whoever takes paths from elsewhere checks here. The tensors are copied to the host, so
    code that made them from Python lists, as `Loop` does, checks those with `check_branch`.

    Args:
        path: int32 [B, P], node indices from root to leaf, or None for 0, 1, 2, ...
        path_lengths: int32 [B], clamped to [0, P]; None for all.
        parents: int32 [B, N] that the nodes were verified with, -1 for a root; None for a chain.
        slots: int32 [B]; rows of negative slots are not inspected. None: all are.

    Raises:
        ValueError: a path leaves the tree, or shapes do not fit; names the row and the entry.

    Example:
        >>> tree = torch.tensor([[-1, 0, 0]], dtype=torch.int32)
        >>> check_path(torch.tensor([[0, 2]], dtype=torch.int32), None, tree)
    """
    if path is None and parents is None:
        return
    for name, tensor in (("path", path), ("parents", parents)):
        if tensor is not None and tensor.dim() != 2:
            raise ValueError(f"{name}: got shape {list(tensor.shape)}, want two dimensions, a row a sequence")
    nodes = None if path is None else path.tolist()
    tree = None if parents is None else parents.tolist()
    counts = None if path_lengths is None else path_lengths.tolist()
    if slots is not None:
        leader, padding = "slots", [slot < 0 for slot in slots.tolist()]
    else:
        leader, padding = ("parents" if nodes is None else "path"), [False] * len(nodes or tree or [])
    for name, rows in (("path", nodes), ("parents", tree), ("path_lengths", counts)):
        if rows is not None and len(rows) != len(padding):
            raise ValueError(f"{name}: got {len(rows)} rows, want the {len(padding)} of {leader}")
    for b, skip in enumerate(padding):
        if not skip:
            row = nodes[b] if nodes is not None else range(len(tree[b]) if tree is not None else 0)
            length = len(row) if counts is None else min(max(counts[b], 0), len(row))
            check_branch(f"path: row {b}", row[:length], None if tree is None else tree[b])


def check_branch(where: str, path: Sequence[int], parents: Sequence[int] | None) -> None:
    """`check_path` for one row in Python lists.

    Args:
        where: how an error begins, such as "path: row 0".
        path: node indices from root to leaf.
        parents: parent of each node, -1 for a root; None for a chain.

    Raises:
        ValueError: the path leaves the tree.
    """
    before = -1
    for i, node in enumerate(path):
        if node < 0 or (parents is not None and node >= len(parents)):
            raise ValueError(f"{where} entry {i} is {node}, want a node of the tree")
        parent = node - 1 if parents is None else parents[node]
        if parent != before:
            want = "a root" if i == 0 else f"a child of node {before}"
            raise ValueError(
                f"{where} entry {i} is node {node} with parent {parent}, want {want}: "
                "a path runs from a root along the tree"
            )
        before = node
