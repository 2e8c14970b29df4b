"""A whole Gated DeltaNet block in one call.

With a few rows, which is what decoding has, a call of an operator costs as much as its work. A thin wrapper:
weights are checked once, when they are made, and what comes with a call in C++. Letters as in
`specdec.ops.recurrence` and `specdec.ops.convolution`, D the width of the residual stream.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops import _fakes  # noqa: F401  declares the operators' fakes
from specdec.ops._earlier import NO_PREFIX, pending_operands, prefix_operands, want_earlier
from specdec.ops._operator import operator, want_tensor, want_type
from specdec.ops.dense import PackedWeight
from specdec.ops.layer import strategy_code
from specdec.ops.types import MIXER_TENSORS, Factors, Pending, Prefix

_verify_block = operator("verify_block")
_verify_block_deferred = operator("verify_block_deferred")


class BlockWeights:
    """The weights of one Gated DeltaNet block (Yang et al., 2024, arXiv:2412.06464): token mixer, then MLP,
    each with its norm before it and a residual around it.

    Args:
        mixer_norm: float32 [D].
        projections: [C (+ HV DV) + 2 HV, D] of q, k, v (C channels), the output gate where `gated`, a and b.
        conv_weight: float32 [C, W] contiguous, the newest input last.
        conv_bias: float32 [C], or None.
        A_log: float32 [HV].
        dt_bias: float32 [HV].
        head_norm: float32 [DV].
        out: [D, HV DV].
        mlp_norm: float32 [D], or None with the two after it: a block without an MLP.
        gate_up: [2 F, D], the gate's rows first.
        down: [D, F].
        gated: whether the heads' outputs are gated.
        eps: of the norms.
        neg_eigval: doubles beta.

    Raises:
        ValueError: a weight has the wrong dtype, shape, stride or device, or a matrix has a bias.
        TypeError: a weight has the wrong type.
    """

    __slots__ = ("conv_bias", "eps", "gated", "neg_eigval", "operands", "tensors")

    def __init__(
        self,
        *,
        mixer_norm: Tensor,
        projections: PackedWeight,
        conv_weight: Tensor,
        conv_bias: Tensor | None = None,
        A_log: Tensor,
        dt_bias: Tensor,
        head_norm: Tensor,
        out: PackedWeight,
        mlp_norm: Tensor | None = None,
        gate_up: PackedWeight | None = None,
        down: PackedWeight | None = None,
        gated: bool,
        eps: float,
        neg_eigval: bool = False,
    ) -> None:
        for name, vector in (("mixer_norm", mixer_norm), ("A_log", A_log), ("head_norm", head_norm)):
            _want_float(name, vector, [-1])
        _want_float("conv_weight", conv_weight, [-1, -1])
        D, C, HV, DV = len(mixer_norm), len(conv_weight), len(A_log), len(head_norm)
        _want_float("dt_bias", dt_bias, [HV])
        if conv_bias is not None:
            _want_float("conv_bias", conv_bias, [C])
        _want_matrix("projections", projections, C + gated * HV * DV + 2 * HV, D)
        _want_matrix("out", out, D, HV * DV)
        tensors = [
            mixer_norm, projections.data, conv_weight, A_log, dt_bias, head_norm, out.data
        ]  # fmt: skip
        if mlp_norm is not None or gate_up is not None or down is not None:
            want_type("down", down, PackedWeight)
            assert down is not None
            _want_float("mlp_norm", mlp_norm, [D])
            _want_matrix("gate_up", gate_up, 2 * down.in_features, D)
            _want_matrix("down", down, D, down.in_features)
            assert mlp_norm is not None
            assert gate_up is not None
            tensors += [mlp_norm, gate_up.data, down.data]
        self._set(tensors, conv_bias, gated, eps, neg_eigval)

    def _set(
        self, tensors: list[Tensor], conv_bias: Tensor | None, gated: bool, eps: float, neg_eigval: bool
    ) -> None:
        self.tensors, self.conv_bias = tensors, conv_bias
        self.gated, self.eps, self.neg_eigval = gated, eps, neg_eigval
        self.operands = (tensors, conv_bias, gated, eps, neg_eigval)  # as the operators take them

    @property
    def has_mixer(self) -> bool:
        """Whether the token mixer is there."""
        return len(self.tensors) >= MIXER_TENSORS

    @property
    def has_mlp(self) -> bool:
        """Whether the MLP is there."""
        return len(self.tensors) != MIXER_TENSORS

    def without_mlp(self) -> BlockWeights:
        """The mixer alone, which shares these weights."""
        return self._part(self.tensors[:MIXER_TENSORS])

    def without_mixer(self) -> BlockWeights:
        """The MLP alone, which shares these weights.

        Raises:
            ValueError: there is none.
        """
        if not self.has_mlp:
            raise ValueError("weights: got a block without an MLP, want one with it")
        return self._part(self.tensors[MIXER_TENSORS:])

    def _part(self, tensors: list[Tensor]) -> BlockWeights:
        part = BlockWeights.__new__(BlockWeights)
        part._set(tensors, self.conv_bias, self.gated, self.eps, self.neg_eigval)
        return part


def _want_float(name: str, value: object, shape: list[int]) -> None:
    """Refuses what is no contiguous float32 tensor on the CPU of the shape, where -1 is any size."""
    want_tensor(name, value)
    assert isinstance(value, Tensor)
    fits = value.dim() == len(shape) and all(w in (-1, s) for s, w in zip(value.shape, shape, strict=True))
    if fits and value.dtype == torch.float32 and value.is_contiguous() and not value.is_cuda:
        return
    size = ", ".join("any" if n < 0 else str(n) for n in shape)
    stride = "" if value.is_contiguous() else ", not contiguous"
    raise ValueError(
        f"{name}: got {value.dtype} {list(value.shape)} on {value.device}{stride}, want contiguous "
        f"torch.float32 [{size}] on cpu"
    )


def want_no_bias(name: str, weight: PackedWeight) -> None:
    """The operators would leave it out."""
    if weight.bias is not None:
        raise ValueError(f"{name}: got a weight with a bias, want one without")


def _want_matrix(name: str, value: object, outputs: int, inputs: int) -> None:
    """Refuses what is no packed weight of the size without a bias."""
    want_type(name, value, PackedWeight)
    assert isinstance(value, PackedWeight)
    want_no_bias(name, value)
    if (value.out_features, value.in_features) != (outputs, inputs):
        got = [value.out_features, value.in_features]
        raise ValueError(f"{name}: got {got}, want [out, in] = {[outputs, inputs]}")


class BlockOutputs(NamedTuple):
    """What `verify_block` gives back.

    Attributes:
        x: [B, N, D] the residual stream after the block.
        o: [B, N, HV, DV] the recurrence's output, before head norm and gate.
        mixed: [B, N, C] raw projections of q, k, v: the factors of the convolution. A view.
        factors: of the recurrence.
    """

    x: Tensor
    o: Tensor
    mixed: Tensor
    factors: Factors


def verify_block(
    x: Tensor,
    weights: BlockWeights,
    *,
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor | None = None,
    parents: Tensor | None = None,
    lengths: Tensor | None = None,
    pending: Pending | None = None,
    pending_mixed: Tensor | None = None,
    prefix: Prefix | None = None,
    prefix_mixed: Tensor | None = None,
    scale: float | None = None,
    strategy: str = "exact",
) -> BlockOutputs:
    """Verifies a chain or a tree through a whole block, on a CPU.

    The same bits as its parts, one after the other:

        y = rms_norm_linear(x, mixer_norm, eps, projections)        # mixed, gate, a, b side by side
        o, factors = verify_layer(mixed, a, b, ...)
        x = rms_norm_linear(o, head_norm, eps, out, gate=gate, residual=x)
        x = swiglu_linear(rms_norm_linear(x, mlp_norm, eps, gate_up), down, residual=x)

    Args:
        x: [B, N, D] residual stream, float32, bfloat16 or float16.
        weights: the block's.
        conv_state, state, slots, parents, lengths, pending, pending_mixed, prefix, prefix_mixed, scale: as in
            `verify_layer`.
        strategy: "serial", "hybrid" or "exact", the faster of the two.

    Raises:
        ValueError: an argument has the wrong dtype, shape, stride, device or value, or an input requires grad
            in grad mode. Nothing was written.
        TypeError: an argument has the wrong type. Nothing was written.
    """
    want_type("weights", weights, BlockWeights)
    want_earlier(pending, pending_mixed, prefix, prefix_mixed)
    code = strategy_code(strategy, x, state, parents is not None, prefix is not None)
    head = (x, *weights.operands, conv_state, state, slots, parents, lengths)
    if pending is not None:
        earlier = pending_operands(pending, prefix)
        want_tensor("pending_mixed", pending_mixed)
        y, o, mixed, k, u, g = _verify_block_deferred(*head, *earlier, pending_mixed, scale, code)
    else:
        nodes = NO_PREFIX if prefix is None else prefix_operands(prefix)
        y, o, mixed, k, u, g = _verify_block(*head, *nodes, prefix_mixed, scale, code)
    return BlockOutputs(y, o, mixed, Factors(k, u, g))
