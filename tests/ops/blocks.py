"""Random calls of verify_block, and the operators that it stands for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ops.cases import NAN
from ops.layers import random_layer
from specdec import ops
from specdec.ops import BlockOutputs, BlockWeights, PackedWeight, pack_weight

LAYER = ("conv_weight", "conv_bias", "A_log", "dt_bias", "neg_eigval")  # weights among a layer's arguments


def random_matrix(
    rng: torch.Generator, outputs: int, inputs: int, stored: torch.dtype = torch.float32
) -> PackedWeight:
    """Keeps the size of what it multiplies."""
    return pack_weight(torch.randn(outputs, inputs, generator=rng) * inputs**-0.5, stored)


def random_block(
    seed: int,
    *,
    D: int = 37,
    F: int = 29,
    gated: bool = True,
    mlp: bool = True,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype = torch.float32,
    **layer: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments of a call and of its `BlockWeights`; `layer` as `random_layer` takes it. The residual
    stream is a slice of a wider one, NaN where nobody may read.
    """
    call = random_layer(seed, dtype=dtype, norm=False, **layer)
    rng = torch.Generator().manual_seed(seed + 1000)
    unread = call["mixed"][..., 0].isnan()  # [B, N]
    B, N, C = call["mixed"].shape
    _, HV, DV, _ = call["state"].shape
    for name in ("mixed", "a", "b"):
        del call[name]
    weights = {name: call.pop(name) for name in LAYER}
    weights["mixer_norm"] = torch.rand(D, generator=rng) + 0.5
    weights["projections"] = random_matrix(rng, C + gated * HV * DV + 2 * HV, D, stored)
    weights["head_norm"] = torch.rand(DV, generator=rng) + 0.5
    weights["out"] = random_matrix(rng, D, HV * DV, stored)
    if mlp:
        weights["mlp_norm"] = torch.rand(D, generator=rng) + 0.5
        weights["gate_up"] = random_matrix(rng, 2 * F, D, stored)
        weights["down"] = random_matrix(rng, D, F, stored)
    weights.update(gated=gated, eps=1e-5)
    x = torch.randn(B, N, D + 5, generator=rng).to(dtype)[..., 2:-3]
    x[unread] = NAN
    return {**call, "x": x, "weights": BlockWeights(**weights)}, weights


def split(y: Tensor, C: int, HV: int, gate: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """mixed, output gate, a and b of the projections side by side."""
    mixed, out_gate, a, b = y.split([C, gate, HV, HV], dim=-1)
    return mixed, out_gate if gate else None, a, b


def composed(x: Tensor, weights: dict[str, Any], **rows: Any) -> BlockOutputs:
    """The operators that verify_block stands for."""
    w = weights
    C, HV, DV, D = len(w["conv_weight"]), len(w["A_log"]), len(w["head_norm"]), x.shape[-1]
    y = ops.rms_norm_linear(x, w["mixer_norm"], w["eps"], w["projections"])
    mixed, gate, a, b = split(y, C, HV, w["gated"] * HV * DV)
    layer = {name: w[name] for name in LAYER}
    rows.pop("weights", None)
    o, factors = ops.verify_layer(mixed, a, b, **layer, **rows)
    x = ops.rms_norm_linear(o.flatten(2), w["head_norm"], w["eps"], w["out"], gate=gate, residual=x)
    if "mlp_norm" in w:
        wide = ops.rms_norm_linear(x, w["mlp_norm"], w["eps"], w["gate_up"])
        x = ops.swiglu_linear(wide, w["down"], residual=x)
    assert x.shape[-1] == D
    return BlockOutputs(x, o, mixed, factors)


def outputs_by_name(outputs: BlockOutputs) -> dict[str, Tensor]:
    """The tensors of a result."""
    x, o, mixed, (k, u, g) = outputs
    assert g is not None
    return {"x": x, "o": o, "mixed": mixed, "factors.k": k, "factors.u": u, "factors.g": g}


def on_meta(value: Any) -> Any:
    """The same without data: tensors, packed weights, and dictionaries and tuples of them."""
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, PackedWeight):
        return PackedWeight(value.data.to("meta"), None, value.in_features, value.out_features)
    if isinstance(value, dict):
        return {name: on_meta(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return type(value)(*map(on_meta, value)) if hasattr(value, "_fields") else tuple(map(on_meta, value))
    return value
