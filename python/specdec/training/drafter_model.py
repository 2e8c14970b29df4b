"""The differentiable recurrent drafter: one Gated DeltaNet block over the target's features.

Its state dict has exactly the names of a drafter's `model.safetensors`. `unroll` does for every position of a
text at once what drafting does from one of them.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from specdec.models.config import GatedDeltaNetConfig
from specdec.training.chunked import ChunkedStates
from specdec.training.model import Layer, Mixer, init_matrices, shifted


class TrainableDrafter(nn.Module):
    """The drafter for training. Weights are drawn from torch's global generator.

    Args:
        layer: sizes of its block; `hidden_size` is the target's.
        feature_size: width F of the target's features, 0 for a drafter that reads tokens alone.
    """

    def __init__(self, layer: GatedDeltaNetConfig, feature_size: int) -> None:
        super().__init__()
        hidden, eps = layer.hidden_size, layer.norm_eps
        self.has_features = feature_size > 0
        if self.has_features:
            self.fuse_norm = nn.RMSNorm(feature_size, eps=eps)
            self.fuse_proj = nn.Linear(feature_size, hidden, bias=False)
            self.own_norm = nn.RMSNorm(hidden, eps=eps)
            self.own_proj = nn.Linear(hidden, hidden, bias=False)
        self.embed_norm = nn.RMSNorm(hidden, eps=eps)
        self.embed_proj = nn.Linear(hidden, hidden, bias=False)
        self.layer = Layer(layer)
        self.norm = nn.RMSNorm(hidden, eps=eps)
        init_matrices(self, 1)

    def unroll(self, features: Tensor | None, embedded: Tensor, steps: int) -> list[Tensor]:
        """The drafter's normed outputs at the first `steps` positions of the chain drafted at every token.

        The pair of token i is (features after token i, embedding of token i + 1). Its output of step 1
        predicts token i + 2 from the true features up to i. Step j goes on from there as drafting does: with
        its own output of step j - 1 and the embedding of token i + j, over the state that the true pairs up
        to i left.

        Args:
            features: `[B, T, F]` after the first T tokens, or None without features.
            embedded: `[B, T + 1, D]`, the target's embeddings of the tokens.
            steps: positions of a chain, at least 1.

        Returns:
            One `[B, T, D]` a step, to be multiplied by the target's head. Row i of step j is meaningful where
            i + j <= T.
        """
        tokens = self.embed_proj(self.embed_norm(embedded))  # [B, T + 1, D]
        if features is None:
            first, _ = self._true_pairs(tokens[:, 1:])
            # Drafted and true inputs are the same: the output of step j at i is that of step 1 at i + j - 1.
            return [self.norm(_later(first, j)) for j in range(steps)]
        h, chains = self._true_pairs(self.fuse_proj(self.fuse_norm(features)) + tokens[:, 1:])
        outputs = [h]
        for j in range(2, steps + 1):
            x = self.own_proj(self.own_norm(h)) + _later(tokens, j)[:, :-1]
            normed = self.layer.attn_norm(x)
            h = self._finish(x, normed, chains.step(normed))
            outputs.append(h)
        return [self.norm(h) for h in outputs]

    def _true_pairs(self, x: Tensor) -> tuple[Tensor, _Chains]:
        """The block over true inputs `[B, T, D]`, and what drafting goes on from."""
        normed = self.layer.attn_norm(x)
        chains = _Chains(self.layer.attn, normed)
        return self._finish(x, normed, chains.roots), chains

    def _finish(self, x: Tensor, normed: Tensor, heads: Tensor) -> Tensor:
        """The block from the heads' outputs `[B, T, H, DV]` on."""
        x = x + self.layer.attn.finish(normed, heads)
        out: Tensor = x + self.layer.mlp(self.layer.mlp_norm(x))
        return out


class _Chains:
    """The chains drafted at all tokens of a text, side by side: token i's chain hangs below its state S_i.

    With the decays a and the writes (u, k) of the drafted steps, what a chain's state gives for y is
    `a_2 ... a_j S_i y + sum over its steps s of a_(s+1) ... a_j (k_s . y) u_s`.

    Args:
        mixer: of the drafter's block.
        normed: `[B, T, D]`, its true inputs.
    """

    def __init__(self, mixer: Mixer, normed: Tensor) -> None:
        self._mixer = mixer
        self._window = shifted(mixer.project(normed), mixer.config.conv_size)  # newest first
        q, k, v = mixer.streams(self._window)
        g, beta = mixer.gates(normed)
        self._states = ChunkedStates(k, v, g, beta)
        self._writes: list[tuple[Tensor, Tensor]] = []  # k [B, T, H, DK] and u [B, T, H, DV], decayed to now
        self._decay: Tensor | float = 1.0
        self.roots = self._states.read(q)  # [B, T, H, DV], what the true inputs' own queries read

    def step(self, normed: Tensor) -> Tensor:
        """Outputs `[B, T, H, DV]` for the next drafted input of every chain, `normed` `[B, T, D]`."""
        mixer = self._mixer
        self._window = [mixer.project(normed), *self._window[:-1]]
        q, k, v = mixer.streams(self._window)
        g, beta = mixer.gates(normed)
        a = g.exp()[..., None]
        self._decay = a * self._decay
        self._writes = [(key, a * u) for key, u in self._writes]
        u = beta[..., None] * (v - self._state_times(k))
        self._writes.append((k, u))
        return self._state_times(q)

    def _state_times(self, y: Tensor) -> Tensor:
        out: Tensor = self._decay * self._states.read(y)
        for key, u in self._writes:
            out = out + (key * y).sum(-1, keepdim=True) * u
        return out


def _later(x: Tensor, count: int) -> Tensor:
    """`x` `[B, T, C]` as it is `count` tokens later, zero beyond the end."""
    return F.pad(x, (0, 0, 0, count))[:, count:]
