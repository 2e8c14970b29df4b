"""Random inputs of `tree_attention`, and one sequence decoded with it token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ops.backends import Backend
from ops.cases import EPS, NAN, random_parents

BLOCK = 256  # keys that the CPU reduces together, a GPU twice as many: lengths around both are of interest


@dataclass
class Attend:
    """Arguments of one call of `tree_attention`; `tensors` come first, the others by name."""

    tensors: tuple[Tensor, Tensor, Tensor]
    named: dict[str, Any]

    def run(self, function: Any, **changed: Any) -> Tensor:
        out: Tensor = function(*self.tensors, **{**self.named, **changed})
        return out

    def tolerance(self, expected: Tensor) -> float:
        """Largest absolute error that float32 arithmetic may leave in a node's output.

        A score is a sum of D products in vector lanes, of which the narrowest vector has four: D / 4 + 4
        roundings of half an epsilon of numbers that together are no larger than |q| |k| scale, and it is
        twice rounded (q times scale, minus the greatest). A weight e^x moves by as much as x does, and by an
        epsilon of its own. The sums of weights and of weighted values add T numbers one after the other, T
        the keys: a rounding each. The quotient of both errs by the sum of what they err, of values no larger
        than the largest. Then one rounding to the output's dtype.
        """
        q, k, v = self.tensors
        keys = [k, self.named["k_cache"], self.named.get("prefix_k")]
        values = [v, self.named["v_cache"], self.named.get("prefix_v")]
        D = q.shape[-1]
        scale = self.named.get("scale")
        score = _largest_norm(q) * max(map(_largest_norm, keys)) * (D**-0.5 if scale is None else scale)
        T = self.named["k_cache"].shape[2] + sum(0 if t is None else t.shape[1] for t in (k, keys[2]))
        roundings = score * (D / 4 + 6) + 2 + T
        size = max(_largest(t) for t in values)
        last = EPS[expected.dtype] if expected.dtype != torch.float32 else 0.0
        return 2 * size * roundings * 0.5 * EPS[torch.float32] + last * _largest(expected)


def _largest_norm(t: Tensor | None) -> float:
    return 0.0 if t is None or not t.numel() else float(t.double().nan_to_num(0.0).norm(dim=-1).max())


def _largest(t: Tensor | None) -> float:
    return 0.0 if t is None or not t.numel() else float(t.double().nan_to_num(0.0).abs().max())


def random_attend(
    seed: int,
    *,
    B: int = 3,
    N: int = 9,
    HQ: int = 6,
    HK: int = 2,
    D: int = 32,
    NP: int = 0,
    room: int = 300,
    lengths_of_slots: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    tree: bool = True,
    ragged: bool = True,
    padding: bool = True,
) -> Attend:
    """Everything is a slice of something wider; row 0 is padding where `padding`, slots are permuted among
    more than B, whatever must not be read is NaN, or a huge number."""
    rng = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        """[..., D + 3] with NaN in the last three, of which a caller sees none."""
        wide = torch.randn(*shape[:-1], shape[-1] + 3, generator=rng)
        wide[..., -3:] = NAN
        return wide.to(dtype)[..., :-3]

    S = B + 2
    wide = torch.randn(B, N, HQ + 2 * HK, D, generator=rng).to(dtype)  # a model's projection
    q, k, v = wide[:, :, :HQ], wide[:, :, HQ : HQ + HK], wide[:, :, HQ + HK :]
    k_cache, v_cache = randn(S, HK, room, D), randn(S, room, HK, D).transpose(1, 2)
    if lengths_of_slots is None:
        committed = torch.randint(0, room + 1, (S,), generator=rng).int()
    else:
        committed = torch.tensor(lengths_of_slots, dtype=torch.int32)
    slots = torch.randperm(S, generator=rng)[:B].int()
    if padding and B > 1:
        slots[0] = -1
    lengths = None
    if ragged:
        lengths = torch.randint(0, N + 1, (B,), generator=rng).int()
        if B > 2:
            lengths[1], lengths[2] = N, 0
    parents = random_parents(rng, B, N, NP) if tree else None
    spare = sorted(set(range(S)) - set(slots[slots >= 0].tolist()))
    committed[spare] = -(1 << 30)
    for cache in (k_cache, v_cache):
        for s in range(S):
            cache[s, :, max(int(committed[s]), 0) :] = NAN
    for b in range(B):
        valid = 0 if slots[b] < 0 else N if lengths is None else int(lengths[b])
        wide[b, valid:] = NAN
        if parents is not None:
            parents[b, valid:] = 1 << 30
    named: dict[str, Any] = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "cache_lengths": committed,
        "slots": slots,
        "lengths": lengths,
        "parents": parents,
    }
    if NP:
        named["prefix_k"], named["prefix_v"] = randn(B, NP, HK, D), randn(B, NP, HK, D)
        named["prefix_parents"] = random_parents(rng, B, NP) if tree else None
    return Attend((q, k, v), named)


class Tokens:
    """A table of token inputs, row t for token t, and the cache that some of them fill."""

    def __init__(
        self,
        backend: Backend,
        seed: int,
        tokens: int,
        *,
        HQ: int = 3,
        HK: int = 1,
        D: int = 32,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.backend = backend
        self.q = torch.randn(tokens, HQ, D, generator=rng).to(dtype)
        self.k, self.v = torch.randn(2, tokens, HK, D, generator=rng).to(dtype)

    def attend(self, ids: Tensor, cache: Cache, **how: Any) -> Tensor:
        """out [B, N, HQ, D] of token ids [B, N], row b below slot b of the cache or as `slots` says."""
        ids = ids.long()
        return self.backend.tree_attention(self.q[ids], self.k[ids], self.v[ids], **cache.named(), **how)

    def cache(self, rows: list[list[int]], room: int) -> Cache:
        """A slot a row, with the row's tokens committed."""
        _, HK, D = self.k.shape
        made = Cache(*(self.k.new_full((len(rows), HK, room, D), NAN) for _ in range(2)), [])
        for row in rows:
            made.lengths.append(len(row))
            for cache, table in ((made.k, self.k), (made.v, self.v)):
                cache[len(made.lengths) - 1, :, : len(row)] = table[row].transpose(0, 1)
        return made

    def decode(self, before: list[int], tokens: list[int], room: int = 0) -> Tensor:
        """out [len, HQ, D] of tokens that are decoded one by one behind `before`."""
        cache = self.cache([before], room or len(before) + len(tokens))
        outs = []
        for token in tokens:
            outs.append(self.attend(torch.tensor([[token]]), cache)[0, 0])
            cache.append(0, self.k[token], self.v[token])
        return torch.stack(outs)


@dataclass
class Cache:
    """Keys and values by slot, NaN beyond the lengths."""

    k: Tensor  # [S, HK, room, D]
    v: Tensor
    lengths: list[int]

    def named(self) -> dict[str, Tensor]:
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        return {"k_cache": self.k, "v_cache": self.v, "cache_lengths": lengths}

    def append(self, slot: int, k: Tensor, v: Tensor) -> None:
        """One token's k and v [HK, D]."""
        self.k[slot, :, self.lengths[slot]], self.v[slot, :, self.lengths[slot]] = k, v
        self.lengths[slot] += 1
