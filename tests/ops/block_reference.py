"""A Gated DeltaNet block in float64, stage by stage, each with the bound of the roundings in it and of what
it was given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ops.blocks import LAYER, split
from ops.cases import assert_close, tolerance
from ops.layers import with_pools
from specdec import ops
from specdec.ops import BlockOutputs, PackedWeight, dense, reference

U = 2.0**-24  # unit roundoff of float32


def normed_with_bound(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """A norm over the last dimension [..., D], and its error: of a sum of D squares, a root, a quotient and
    two products.
    """
    y = dense.rms_norm_reference(x, weight, eps)
    return y, (x.shape[-1] + 8) * U * y.abs()


def linear_bound(x: Tensor, weight: PackedWeight, error: Tensor) -> Tensor:
    """Error of a product with as many roundings as it has inputs, and one of a residual."""
    matrix = weight.unpack().double().abs().T
    return (error + (weight.in_features + 1) * U * x.abs()) @ matrix


def silu_bound(x: Tensor, error: Tensor | float) -> Tensor:
    """The slope of silu is at most 1.1, and it takes an exponential and three operations."""
    return 1.1 * error + 8 * U * x.abs()


def assert_within(got: Tensor, want: Tensor, bound: Tensor) -> None:
    """Within the bound, which is small enough to say something."""
    assert float(bound.max()) < 1e-3 * float(want.abs().max())
    excess = (got - want).abs() - bound
    assert (excess <= 0).all(), f"beyond the bound by {float(excess.max()):.3g}"


def expect_reference(
    call: dict[str, Any], weights: dict[str, Any], outputs: BlockOutputs, after: dict[str, Tensor]
) -> None:
    """Compares a block that was run with its reference.

    Args:
        call: keyword arguments of `verify_block`, with pools as they were before.
        weights: those of its `BlockWeights`.
        outputs: what the block gave back.
        after: its `state` and `conv_state` as they are now.
    """
    w, eps, gated = weights, weights["eps"], weights["gated"]
    C, HV, DV = len(w["conv_weight"]), len(w["A_log"]), len(w["head_norm"])
    gate_size = gated * HV * DV
    exact = with_pools(call)
    valid = ~call["x"][..., 0].isnan()
    x, o, mixed, factors = outputs

    # The projections.
    stream = call["x"].nan_to_num(0.0).double()
    normed, slack = normed_with_bound(stream, w["mixer_norm"], eps)
    y = normed @ w["projections"].unpack().double().T
    slack = linear_bound(normed, w["projections"], slack)
    want_mixed, gate, a, b = split(y, C, HV, gate_size)
    mixed_slack, gate_slack, a_slack, b_slack = split(slack, C, HV, gate_size)
    assert_within(mixed[valid], want_mixed[valid], mixed_slack[valid])

    # The layer, of the projections that were made. Its convolution and gates round no more often than a step
    # does: twice the steps. An error of a and b is one of a decay, by the rate, and of a beta, by 1/4 or 1/2.
    rows = {name: value for name, value in exact.items() if name not in ("x", "weights")}
    layer = {name: w[name] for name in LAYER}
    want_o, want_factors = reference.verify_layer(mixed, a, b, **layer, **rows, dtype=torch.float64)
    steps = 7 + 5
    size = max(float(want_factors.u.abs().max()), float(call["state"].norm(dim=-1).max()))
    moved = float(a_slack[valid].max()) * float(w["A_log"].exp().max()) + float(b_slack[valid].max())
    atol = tolerance(torch.float32, 2 * steps, 64, want_factors.u, call["state"]) + size * (steps + 1) * moved
    for got, want, name in zip(factors, want_factors, ("k", "u", "g"), strict=True):
        assert got is not None
        assert want is not None
        assert_close(got, want.nan_to_num(0.0) if name == "g" else want, atol, name)
    assert_close(o, want_o, atol, "o")
    assert_close(after["state"], exact["state"], atol, "state")
    assert torch.equal(after["conv_state"], exact["conv_state"])

    # What follows, of the o that was made.
    normed, slack = (t.flatten(2) for t in normed_with_bound(o.double(), w["head_norm"], eps))
    if gate is not None:
        assert gate_slack is not None
        silu = torch.nn.functional.silu(gate)
        slack = slack * silu.abs() + normed.abs() * silu_bound(gate, gate_slack) + U * (normed * silu).abs()
        normed = normed * silu
    mixer = stream + normed @ w["out"].unpack().double().T
    slack = linear_bound(normed, w["out"], slack) + U * (stream.abs() + mixer.abs())
    got_mixer = ops.verify_block(**{**with_pools(call), "weights": call["weights"].without_mlp()}).x
    assert_within(got_mixer[valid], mixer[valid], slack[valid])

    if "mlp_norm" not in w:
        assert torch.equal(x[valid], got_mixer[valid])
        return

    # The MLP, of the mixer's x.
    mixer = got_mixer.nan_to_num(0.0).double()
    normed, slack = normed_with_bound(mixer, w["mlp_norm"], eps)
    opened, up = (normed @ w["gate_up"].unpack().double().T).chunk(2, dim=-1)
    opened_slack, up_slack = linear_bound(normed, w["gate_up"], slack).chunk(2, dim=-1)
    silu = torch.nn.functional.silu(opened)
    inner = silu * up
    inner_slack = silu_bound(opened, opened_slack) * up.abs() + silu.abs() * up_slack + U * inner.abs()
    want_x = mixer + inner @ w["down"].unpack().double().T
    slack = linear_bound(inner, w["down"], inner_slack) + U * (mixer.abs() + want_x.abs())
    assert_within(x[valid], want_x[valid], slack[valid])
