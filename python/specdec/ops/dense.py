"""Dense ops that treat each row alike: matrix product, norm, SwiGLU and the gates of a Gated DeltaNet.

A library matrix product rounds one row differently when it is called with nine, so verification could flip a
near-tie that decoding does not. Here a row's result has the same bits for any number of rows, any position
among them and any number of threads: every sum runs in one order that its length alone fixes.
Arithmetic is float32 throughout.

Below each op stands its reference twin: plain PyTorch in float64, the same arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.ops import _fakes  # noqa: F401  declares the operators' fakes
from specdec.ops._operator import operator, want_type

_PANEL = 32  # specdec::kPanelWidth


_linear = operator("linear")
_rms_norm_linear = operator("rms_norm_linear")
_swiglu_linear = operator("swiglu_linear")
_rms_norm = operator("rms_norm")
_swiglu = operator("swiglu")
_gated_delta_gates = operator("gated_delta_gates")


class PackedWeight:
    """A weight `[out, in]` laid out for `linear`; made by `pack_weight`.

    Attributes:
        data: float32, bfloat16 or int8. float32 is `[panels, in, 32]`: input k of a panel's 32 outputs in one
            run. bfloat16 is `[panels, in, 16, 2]`: outputs j and j + 16 share a 32-bit word. int8 is
            `[panels, in + 4, 32]` like float32, the last four rows of a panel are its 32 scales in float32.
            Outputs beyond `out_features` are zero.
        bias: float32 `[out]`, or None.
        in_features: inputs.
        out_features: outputs.
    """

    __slots__ = ("bias", "data", "in_features", "out_features")

    def __init__(self, data: Tensor, bias: Tensor | None, in_features: int, out_features: int) -> None:
        self.data = data
        self.bias = bias
        self.in_features = in_features
        self.out_features = out_features

    @property
    def dtype(self) -> torch.dtype:
        """The stored dtype: float32, bfloat16 or int8."""
        return self.data.dtype

    def unpack(self) -> Tensor:
        """The weight that is multiplied with, `[out, in]`: in the stored dtype, that of int8 in float32."""
        data = self.data
        if data.dtype == torch.int8:
            numbers, scales = data[:, : self.in_features], data[:, self.in_features :].contiguous()
            # [panels, 4, 32] bytes -> [panels, 1, 32] float32
            data = numbers.float() * scales.view(len(data), -1).view(torch.float32)[:, None]
        if data.dtype == torch.bfloat16:
            data = data.transpose(2, 3).reshape(-1, self.in_features, _PANEL)  # [panels, in, 32]
        return data.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features].contiguous()

    def to_int8(self) -> PackedWeight:
        """A copy in int8, rounded as `pack_weight` does it."""
        return pack_weight(self.unpack().float(), torch.int8, bias=self.bias)

    def __repr__(self) -> str:
        bias = "" if self.bias is None else ", bias"
        return f"PackedWeight(out={self.out_features}, in={self.in_features}, {self.dtype}{bias})"


def pack_weight(
    weight: Tensor | Sequence[Tensor], dtype: torch.dtype | None = None, *, bias: Tensor | None = None
) -> PackedWeight:
    """Lays a weight out for `linear`, once, at load time.

    Args:
        weight: `[out, in]` in float32, bfloat16 or float16; or several with the same `in`, which are stacked
            along `out`: one product then makes all their outputs.
        dtype: what is stored: float32, bfloat16 or int8. None takes bfloat16 where that loses nothing (each
            value is a bfloat16), float32 otherwise. bfloat16 rounds where it must and halves the memory
            traffic. int8 rounds each output's weights to 255 steps between minus and plus their largest
            magnitude, for weights that need not be exact, such as a drafter's.
        bias: `[out]` (of all weights together), kept in float32.

    Returns:
        The packed weight: a copy, later changes of `weight` do not reach it.

    Raises:
        ValueError: an argument has the wrong shape, dtype or device.
        TypeError: an argument has the wrong type.
    """
    want_type("weight", weight, Tensor, Sequence)
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    for w in weights:
        want_type("weight", w, Tensor)
        if w.dim() != 2 or 0 in w.shape or w.shape[1] != weights[0].shape[1]:
            shapes = [list(w.shape) for w in weights]
            raise ValueError(f"weight: got shapes {shapes}, want [out, in], neither 0, with one `in`")
        if w.dtype not in (torch.float32, torch.bfloat16, torch.float16) or w.device.type != "cpu":
            got = f"{w.dtype} on {w.device}"
            raise ValueError(f"weight: got {got}, want float32, bfloat16 or float16 on the CPU")
    if not weights:
        raise ValueError("weight: got an empty list, want at least one weight")
    if dtype not in (None, torch.float32, torch.bfloat16, torch.int8):
        raise ValueError(f"dtype: got {dtype}, want torch.float32, torch.bfloat16, torch.int8 or None")
    dense = torch.cat([w.detach().float() for w in weights])  # [out, in]
    out_features, in_features = dense.shape
    if bias is not None and (bias.shape != (out_features,) or not bias.is_floating_point()):
        raise ValueError(f"bias: got {list(bias.shape)} {bias.dtype}, want a float tensor [{out_features}]")
    if bias is not None and bias.device.type != "cpu":
        raise ValueError(f"bias: got {bias.dtype} on {bias.device}, want a float tensor on the CPU")
    if dtype is None:
        lossless = torch.equal(dense.bfloat16().float(), dense)
        dtype = torch.bfloat16 if lossless else torch.float32
    panels = -(-out_features // _PANEL)
    padded = dense.new_zeros(panels * _PANEL, in_features)
    padded[:out_features] = dense
    data = padded.view(panels, _PANEL, in_features).transpose(1, 2)  # [panels, in, 32]
    if dtype == torch.bfloat16:
        data = (
            data.bfloat16().reshape(panels, in_features, 2, _PANEL // 2).transpose(2, 3)
        )  # [panels, in, 16, 2]
    elif dtype == torch.int8:
        data = _in_bytes(data)
    kept = None if bias is None else bias.detach().to(torch.float32, copy=True).contiguous()
    return PackedWeight(data.contiguous(), kept, in_features, out_features)


def _in_bytes(data: Tensor) -> Tensor:
    """Panels [panels, in, 32] as int8 [panels, in + 4, 32], see `PackedWeight`."""
    largest = data.abs().amax(1, keepdim=True)  # [panels, 1, 32]
    scales = torch.where(largest > 0.0, largest / 127.0, 1.0)
    numbers = (data / scales).round().to(torch.int8)
    return torch.cat([numbers, scales.contiguous().view(torch.int8).view(len(data), 4, _PANEL)], dim=1)


def linear(x: Tensor, weight: PackedWeight, *, residual: Tensor | None = None) -> Tensor:
    """`x W^T + bias + residual`, row by row the same bits whatever the rest of the call.

    Args:
        x: `[..., in]` float32, bfloat16 or float16; any strides (a copy is made only where the leading
            dimensions do not reduce to two, or the last is not contiguous).
        weight: of `pack_weight`.
        residual: `[..., out]` in x's dtype, or None.

    Returns:
        `[..., out]` in x's dtype. Sums are float32 over the inputs in turn; then come the bias, the residual
        and the rounding to x's dtype.

    Raises:
        ValueError: an argument has the wrong dtype, shape or device, or requires grad in grad mode.
        TypeError: an argument has the wrong type.
    """
    want_type("weight", weight, PackedWeight)
    y: Tensor = _linear(x, weight.data, weight.bias, weight.out_features, residual)
    return y


def linear_reference(x: Tensor, weight: PackedWeight, *, residual: Tensor | None = None) -> Tensor:
    """`linear` in float64: `[..., out]` float64."""
    y = x.double() @ weight.unpack().double().T
    if weight.bias is not None:
        y = y + weight.bias.double()
    return y if residual is None else y + residual.double()


def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: PackedWeight,
    *,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`linear(rms_norm(x, norm_weight, eps, gate), weight, residual=residual)` in one call.

    For float32 the same bits as the two; in a narrower dtype what lies between them is not rounded to it.

    Args:
        x: `[..., in]`; dtypes and strides as in `linear`.
        norm_weight: float32 `[D]`; D divides `in`, and each run of D values (a head) is normed on its own.
        eps: added to the mean square.
        weight: of `pack_weight`.
        gate: x's shape and dtype, any strides; or None.
        residual: `[..., out]` in x's dtype, or None.

    Returns:
        `[..., out]` in x's dtype.

    Raises:
        ValueError: an argument has the wrong dtype, shape or device, or requires grad in grad mode.
        TypeError: an argument has the wrong type.
    """
    want_type("weight", weight, PackedWeight)
    y: Tensor = _rms_norm_linear(
        x, norm_weight, eps, weight.data, weight.bias, weight.out_features, gate, residual
    )
    return y


def rms_norm_linear_reference(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: PackedWeight,
    *,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`rms_norm_linear` in float64: `[..., out]` float64."""
    groups = (*x.shape[:-1], weight.in_features // norm_weight.shape[0], norm_weight.shape[0])  # [..., H, D]
    gates = None if gate is None else gate.reshape(groups)
    normed = rms_norm_reference(x.reshape(groups), norm_weight, eps, gates)
    return linear_reference(normed.flatten(-2), weight, residual=residual)


def swiglu_linear(x: Tensor, weight: PackedWeight, *, residual: Tensor | None = None) -> Tensor:
    """`linear(swiglu(x), weight, residual=residual)` in one call.

    For float32 the same bits as the two; in a narrower dtype what lies between them is not rounded to it.

    Args:
        x: `[..., 2 in]`; dtypes and strides as in `linear`.
        weight: of `pack_weight`.
        residual: `[..., out]` in x's dtype, or None.

    Returns:
        `[..., out]` in x's dtype.

    Raises:
        ValueError: an argument has the wrong dtype, shape or device, or requires grad in grad mode.
        TypeError: an argument has the wrong type.
    """
    want_type("weight", weight, PackedWeight)
    y: Tensor = _swiglu_linear(x, weight.data, weight.bias, weight.out_features, residual)
    return y


def swiglu_linear_reference(x: Tensor, weight: PackedWeight, *, residual: Tensor | None = None) -> Tensor:
    """`swiglu_linear` in float64: `[..., out]` float64."""
    return linear_reference(swiglu_reference(x), weight, residual=residual)


def rms_norm(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None = None) -> Tensor:
    """`x * rsqrt(mean(x^2) + eps) * weight` over the last dimension, times `silu(gate)` where given.

    Args:
        x: `[..., D]` float32, bfloat16 or float16; any strides.
        weight: float32 `[D]`.
        eps: added to the mean square.
        gate: x's shape and dtype, any strides; or None.

    Returns:
        `[..., D]` in x's dtype, contiguous.

    Raises:
        ValueError: an argument has the wrong dtype, shape or device, or requires grad in grad mode.
        TypeError: an argument has the wrong type.
    """
    y: Tensor = _rms_norm(x, weight, eps, gate)
    return y


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None = None) -> Tensor:
    """`rms_norm` in float64: `[..., D]` float64."""
    x = x.double()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()
    return y if gate is None else y * torch.nn.functional.silu(gate.double())


def swiglu(x: Tensor) -> Tensor:
    """`silu(gate) * up` of `x = [gate, up]` on the last dimension.

    Args:
        x: `[..., 2F]` float32, bfloat16 or float16; any strides.

    Returns:
        `[..., F]` in x's dtype, contiguous.

    Raises:
        ValueError: the last dimension is odd, the dtype is another, or x requires grad in grad mode.
        TypeError: x is no tensor.
    """
    y: Tensor = _swiglu(x)
    return y


def swiglu_reference(x: Tensor) -> Tensor:
    """`swiglu` in float64: `[..., F]` float64."""
    gate, up = x.double().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def gated_delta_gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, neg_eigval: bool = False
) -> tuple[Tensor, Tensor]:
    """The gates of a Gated DeltaNet (Yang et al., 2024, arXiv:2412.06464) from its two small projections.

    Args:
        a: `[..., HV]` float32, bfloat16 or float16; any strides, such as a slice of a wider projection.
        b: a's shape and dtype; any strides.
        A_log: float32 `[HV]`, log of the decay rate.
        dt_bias: float32 `[HV]`.
        neg_eigval: doubles beta, so that transition matrices may have negative eigenvalues.

    Returns:
        `g = -exp(A_log) * softplus(a + dt_bias)`, the log of the decay (0 or less), and `beta = sigmoid(b)`:
        both float32 `[..., HV]`, contiguous.

    Raises:
        ValueError: an argument has the wrong dtype, shape or device, or requires grad in grad mode.
        TypeError: an argument has the wrong type.
    """
    g: Tensor
    beta: Tensor
    g, beta = _gated_delta_gates(a, b, A_log, dt_bias, neg_eigval)
    return g, beta


def gated_delta_gates_reference(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, neg_eigval: bool = False
) -> tuple[Tensor, Tensor]:
    """`gated_delta_gates` in float64: both `[..., HV]` float64."""
    x = a.double() + dt_bias.double()
    softplus = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    beta = torch.sigmoid(b.double())
    return -torch.exp(A_log.double()) * softplus, 2 * beta if neg_eigval else beta
