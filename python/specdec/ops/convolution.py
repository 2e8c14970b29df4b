"""The short causal convolution on chains and trees: thin wrappers, every check of an argument is in C++.

Letters: B rows, N new nodes, C channels, W width of the window (the node itself and W-1 ancestors), S slots.
The raw inputs are the factors: a commit keeps the last W-1 of the accepted path.
"""

from __future__ import annotations

from torch import Tensor

from specdec.ops import _fakes  # noqa: F401  declares the operators' fakes
from specdec.ops._operator import code_of, operator, want_tensor, want_type
from specdec.ops.types import ConvPending, ConvPrefix

_conv_verify = operator("conv_verify")
_conv_verify_deferred = operator("conv_verify_deferred")
_conv_commit = operator("conv_commit")

_ACTIVATIONS = {"silu": 1, None: 0}  # specdec::Activation


def conv_verify(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    conv_state: Tensor,
    slots: Tensor | None = None,
    parents: Tensor | None = None,
    lengths: Tensor | None = None,
    pending: ConvPending | None = None,
    prefix: ConvPrefix | None = None,
    activation: str | None = "silu",
) -> Tensor:
    """Depthwise causal convolution of every node over its own W-1 nearest ancestors, continued into the
    committed window.

    Args:
        x: [B, N, C] raw inputs, float32, bfloat16 or float16, channels contiguous. They are this op's
            factors.
        weight: float32 [C, W] contiguous, the newest input last.
        bias: float32 [C], or None.
        conv_state: [S, W-1, C], oldest row first, dtype of x or float32, each slot contiguous. Written only
            where `pending` is given.
        slots, parents, lengths: as in `specdec.ops.verify`.
        pending: accepted path of the previous round, moved into the window first, whatever `lengths` says; x
            in this call's dtype.
        prefix: raw inputs of nodes that came before in this round, not committed; not together with
            `pending`.
        activation: "silu", or None.

    Returns:
        [B, N, C] in x's dtype; rows beyond `lengths` and of negative slots are zero.

    Raises:
        ValueError: an argument has the wrong dtype, shape, stride, device or value, a tensor that is written
            shares memory with one that is read, or an input requires grad in grad mode. Nothing was written.
        TypeError: an argument has the wrong type. Nothing was written.
    """
    code = code_of("activation", activation, _ACTIVATIONS)
    y: Tensor
    if pending is not None:
        want_type("pending", pending, ConvPending)
        if prefix is not None:
            raise ValueError(
                "prefix: got both pending and prefix, want one: a prefix starts at a committed state"
            )
        y = _conv_verify_deferred(x, weight, bias, conv_state, slots, parents, lengths, *pending, code)
    elif prefix is not None:
        want_type("prefix", prefix, ConvPrefix)
        want_tensor("prefix.x", prefix.x)  # None would be no prefix to the operator
        y = _conv_verify(x, weight, bias, conv_state, slots, parents, lengths, *prefix, code)
    else:
        y = _conv_verify(x, weight, bias, conv_state, slots, parents, lengths, None, None, code)
    return y


def conv_commit(
    conv_state: Tensor,
    x: Tensor,
    path: Tensor | None = None,
    path_lengths: Tensor | None = None,
    *,
    slots: Tensor | None = None,
) -> None:
    """Moves the window, in place, to the last W-1 raw inputs of an accepted path. A copy: no arithmetic.

    Args:
        conv_state: [S, W-1, C], oldest row first, dtype of x or float32, each slot contiguous.
        x: [B, N, C] raw inputs as `conv_verify` got them.
        path: int32 [B, P], node indices from root to leaf; None for 0, 1, 2, ...; checked as by `commit`.
        path_lengths: int32 [B], clamped to [0, P]; None for all. 0 leaves the window as it is.
        slots: int32 [B], distinct; negative rows are padding. None: row b uses slot b, S == B.

    Raises:
        ValueError: an argument has the wrong dtype, shape, stride, device or value, a tensor that is written
            shares memory with one that is read, or an input requires grad in grad mode. Nothing was written.
        TypeError: an argument has the wrong type. Nothing was written.
    """
    _conv_commit(conv_state, x, path, path_lengths, slots)
