"""The gated delta rule over whole sequences, differentiable: chunks of tokens by matrix products.

Within a chunk the recurrence is one unit lower triangular system (the UT transform of arXiv 2406.06484,
section 3, with the gate of arXiv 2412.06464, section 3.3); from chunk to chunk only the state is carried.
Plain torch, so autograd gives the gradients.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_delta_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = 64) -> Tensor:
    """Outputs of `S_t = a_t S_{t-1} + b_t (v_t - a_t S_{t-1} k_t) k_t^T`, `o_t = S_t q_t`, from a zero state.

    Args:
        q: `[B, T, H, DK]`, scaled already.
        k: `[B, T, H, DK]`, normalised already. Key heads are repeated to the H value heads.
        v: `[B, T, H, DV]`.
        g: `[B, T, H]`, log a, at most 0.
        beta: `[B, T, H]`.
        chunk: tokens solved together. The result does not depend on it beyond rounding.

    Returns:
        `[B, T, H, DV]`, in the dtype of the inputs.
    """
    return ChunkedStates(k, v, g, beta, chunk).read(q)


class ChunkedStates:
    """The states `S_t` of all tokens at once, held as what was written: read them with `read`.

    A state is never formed: `S_t y` is the decayed state before t's chunk times y, plus a masked product over
    the writes of the chunk up to and including t's own. Under autocast the inputs' dtype is kept.

    Args:
        k, v, g, beta, chunk: as for `gated_delta_chunked`.
    """

    def __init__(self, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = 64) -> None:
        self._length = k.shape[1]
        self._chunk = chunk
        with torch.autocast(k.device.type, enabled=False):
            self._solve(k, v, g, beta)

    def _solve(self, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
        chunk = self._chunk
        k, v, g, beta = (self._chunks(x) for x in (k, v, g, beta))
        cumulative = g.cumsum(-1)  # G_i, from the chunk's start
        # exp(G_i - G_j) for j <= i. Masked before exp: above the diagonal the exponent is positive and may
        # overflow.
        lower = torch.ones(chunk, chunk, dtype=torch.bool, device=k.device).tril()
        difference = cumulative[..., :, None] - cumulative[..., None, :]
        decay = difference.masked_fill(~lower, float("-inf")).exp()  # [B, H, n, chunk, chunk]

        # (I + A) U = diag(beta) (V - diag(e^G) K S0): solved for both parts of the right side, before S0 is
        # known.
        system = (beta[..., None] * (k @ k.transpose(-1, -2)) * decay).tril(-1)
        grown = cumulative.exp()[..., None]
        right = beta[..., None] * torch.cat([v, grown * k], dim=-1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        writes, reads = torch.split(solved, [v.shape[-1], k.shape[-1]], dim=-1)
        last = cumulative[..., -1:]
        keys = (last - cumulative).exp()[..., None] * k

        state = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])  # [B, H, DK, DV]
        states, corrected = [], []
        for n in range(k.shape[2]):
            states.append(state)
            u = writes[:, :, n] - reads[:, :, n] @ state
            corrected.append(u)
            state = last[:, :, n, :, None].exp() * state + keys[:, :, n].transpose(-1, -2) @ u
        self._keys, self._decay, self._grown = k, decay, grown
        self._before = torch.stack(states, dim=2)  # [B, H, n, DK, DV]
        self._writes = torch.stack(corrected, dim=2)  # [B, H, n, chunk, DV]

    def read(self, y: Tensor) -> Tensor:
        """`S_t y_t` for every t: `[B, T, H, DK]` -> `[B, T, H, DV]`."""
        y = self._chunks(y)
        with torch.autocast(y.device.type, enabled=False):
            inner = (y @ self._keys.transpose(-1, -2)) * self._decay
            out = (self._grown * y) @ self._before + inner @ self._writes
        return out.flatten(2, 3)[:, :, : self._length].transpose(1, 2)

    def _chunks(self, x: Tensor) -> Tensor:
        """`[B, T, H, ...]` -> `[B, H, T / chunk, chunk, ...]`; padding (k = beta = g = 0) changes nothing."""
        x = x.transpose(1, 2)
        x = F.pad(x, [0, 0] * (x.dim() - 3) + [0, -x.shape[2] % self._chunk])
        return x.reshape(*x.shape[:2], -1, self._chunk, *x.shape[3:])
