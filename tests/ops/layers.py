"""Random calls of verify_layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ops.cases import NAN, random_factors, random_parents, random_path
from specdec.ops import Pending, Prefix


def random_layer(
    seed: int,
    *,
    B: int = 4,
    N: int = 7,
    HK: int = 2,
    HV: int = 4,
    DK: int = 64,
    DV: int = 64,
    W: int = 4,
    dtype: torch.dtype = torch.float32,
    window_dtype: torch.dtype | None = None,
    tree: bool = True,
    norm: bool = True,
    ragged: bool = True,
    earlier: str = "none",
    NP: int = 5,
    plain_beta: bool = False,
) -> dict[str, Any]:
    """Keyword arguments of a call. Inputs are slices of wider projections; row 0 is padding where `ragged`,
    and whatever nobody may read is NaN or out of range. With `plain_beta` every beta is 0, 1/2 or 1, or twice
    that, whatever the exponential function.
    """
    rng = torch.Generator().manual_seed(seed)
    C, S = 2 * HK * DK + HV * DV, B + 2

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    wide = randn(B, N, C + HV * DV + 2 * HV + 3).to(dtype)
    if plain_beta:
        wide[..., -HV:] = 100 * wide[..., -HV:].round().sign()
    call: dict[str, Any] = {
        "mixed": wide[..., :C],
        "norm_gate": wide[..., C : C + HV * DV].unflatten(-1, (HV, DV)),
        "a": wide[..., -2 * HV : -HV],
        "b": wide[..., -HV:],
        "conv_weight": randn(C, W) * 0.5,
        "conv_bias": randn(C) if seed % 2 else None,
        "A_log": randn(HV) - 1,
        "dt_bias": randn(HV),
        "neg_eigval": seed % 3 == 1,
        "conv_state": randn(S, W - 1, C).to(window_dtype or dtype),
        "state": randn(S, HV, DV, DK),
        "slots": torch.randperm(S, generator=rng)[:B].int(),
        "parents": None,
        "norm_weight": randn(DV),
        "scale": None if seed % 2 else 0.5,
    }
    lengths = torch.full((B,), N, dtype=torch.int32)
    if ragged:
        call["slots"][0] = -1
        lengths[1:] = torch.randint(0, N + 1, (B - 1,), generator=rng).int()
        lengths[1] = 0  # what is pending is settled all the same
        lengths[-1] = N + 2
        call["lengths"] = lengths
    if not norm:
        del call["norm_weight"], call["norm_gate"]
    if earlier == "pending":
        path, path_lengths = random_path(rng, B, NP)
        path_lengths[2 % B] = NP
        path[2 % B] = torch.arange(NP, dtype=torch.int32)
        call["pending"] = Pending(random_factors(rng, B, NP, HK, HV, DK, DV, "head"), path, path_lengths)
        call["pending_mixed"] = randn(B, NP, C + 3).to(dtype)[..., 2:-1]
    if earlier == "prefix":
        parents = random_parents(rng, B, NP) if tree else None
        call["prefix"] = Prefix(random_factors(rng, B, NP, HK, HV, DK, DV, "head"), parents)
        call["prefix_mixed"] = randn(B, NP, C + 3).to(dtype)[..., 2:-1]
    if tree:
        call["parents"] = random_parents(rng, B, N, NP if earlier == "prefix" else 0)
    for row in range(B):
        valid = 0 if call["slots"][row] < 0 else min(int(lengths[row]), N)
        for name in ("mixed", "a", "b", "norm_gate"):
            if name in call:
                call[name][row, valid:] = NAN
        if tree:
            call["parents"][row, valid:] = 1 << 30
    return call


def with_pools(call: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with pools of its own."""
    return {**call, "conv_state": call["conv_state"].clone(), "state": call["state"].clone()}
