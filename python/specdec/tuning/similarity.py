"""Which sub-layers change the residual stream least, found by dynamic programming (CLaSp, arXiv 2505.24196).

With h_i the residual stream after sub-layer i of the whole model and g(i, j) one that j of the first i
sub-layers did not touch, the most similar of its size as far as two choices can tell:

    g(i, j) = whichever of g(i-1, j-1), which skips i, and f_i(g(i-1, j)), which does not, is closer to h_i

A whole set of sizes comes out of one sweep, n^2 / 2 runs of a sub-layer for n of them. CLaSp looks at whole
layers and one token; here a sub-layer is a token mixer or an MLP, and the closeness is the mean cosine of
many tokens. Similarity knows nothing of what a sub-layer costs, nor of what its absence does to the likeliest
token: it is where a search begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec._checks import check_integer
from specdec.models.skipping import SkipSet

SubLayer = Callable[[Tensor], Tensor]


_Kept = tuple[Tensor, tuple[int, ...], float]  # g(i, j), the sub-layers that it skips, its closeness


@dataclass(frozen=True)
class Similar:
    """A set of sub-layers that could be skipped.

    Attributes:
        skipped: their numbers, ascending.
        similarity: mean cosine between the residual stream without them and the whole model's, at the end.
    """

    skipped: tuple[int, ...]
    similarity: float

    @property
    def skips(self) -> SkipSet:
        """The set, where the sub-layers were those of `SkippableLM.sub_layers`."""
        return skip_set(self.skipped)


def skip_set(numbers: Iterable[int]) -> SkipSet:
    """Sub-layers by the numbers that they have in `SkippableLM.sub_layers`: 2 i is the mixer of layer i and
    2 i + 1 its MLP.
    """
    every = list(numbers)
    return SkipSet.of([n // 2 for n in every if n % 2 == 0], [n // 2 for n in every if n % 2])


@torch.inference_mode()
def most_similar(sub_layers: Sequence[SubLayer], x: Tensor, most: int | None = None) -> list[Similar]:
    """The sets of every size that leave the residual stream as it was, as nearly as the programme finds.

    Args:
        sub_layers: n functions of the residual stream, in the model's order.
        x: [..., D] the residual stream of some tokens before the first of them.
        most: largest size; None for n.

    Returns:
        Sets of 0, 1, ..., `most` sub-layers.

    Raises:
        ValueError: `most` is not 0 to n.
    """
    count = len(sub_layers)
    most = count if most is None else most
    check_integer("most", most, 0, count)
    whole = x
    kept: list[_Kept] = [(x, (), 1.0)]  # by j
    for number, run in enumerate(sub_layers):
        whole = run(whole)
        new: list[_Kept] = [(whole, (), 1.0)]
        for j in range(1, min(number + 1, most) + 1):
            stream, skipped, _ = kept[j - 1]
            best = (stream, (*skipped, number), _cosine(whole, stream))
            if j < len(kept):  # fewer than j sub-layers came before
                stream, skipped, _ = kept[j]
                stream = run(stream)
                close = _cosine(whole, stream)
                if close > best[2]:
                    best = (stream, skipped, close)
            new.append(best)
        kept = new
    return [Similar(skipped, close) for _, skipped, close in kept]


def whole_layers(sub_layers: Sequence[SubLayer], x: Tensor, most: int | None = None) -> list[Similar]:
    """`most_similar` of whole layers, as CLaSp has it: sets of 0, 2, 4, ... sub-layers, at most `most`."""

    def layer(i: int) -> SubLayer:
        return lambda x: sub_layers[2 * i + 1](sub_layers[2 * i](x))

    layers = len(sub_layers) // 2
    found = most_similar([layer(i) for i in range(layers)], x, None if most is None else most // 2)
    return [Similar(tuple(n for i in s.skipped for n in (2 * i, 2 * i + 1)), s.similarity) for s in found]


def _cosine(a: Tensor, b: Tensor) -> float:
    """Mean over tokens, [..., D] each."""
    return float(torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=-1).mean())
