"""A recurrent drafter over specdec's ops: one Gated DeltaNet block between its target's embedding and head.

The token x that follows a token whose features f the target has shown enters as

    W_fuse rmsnorm(f) + W_embed rmsnorm(e(x))

and a drafted token x, of whose parent only the drafter's own output h is there, as

    W_own rmsnorm(h) + W_embed rmsnorm(e(x));

without features (the independent drafter) as W_embed rmsnorm(e(x)) alone. Through the block it becomes h, and
head(rmsnorm(h)) are the logits of the token after x. e and the head are the target's. The idea of drafting on
the target's features, and on the drafter's own outputs in their place, is EAGLE's (arXiv 2401.15077); the
recurrent block and its factors are SpecLA's setting (arXiv 2607.16673).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specdec import ops
from specdec.cache import DecodingCache, Round, Steps
from specdec.models.block import GatedDeltaNetBlock, layer_spec
from specdec.models.checkpoint import weights_sha256
from specdec.models.drafter_checkpoint import VOCABULARY, load_drafter_config, load_drafter_weights
from specdec.models.drafter_config import RecurrentDrafterConfig
from specdec.models.features import Feature
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM
from specdec.models.prompts import check_tokens


class RecurrentDrafterModel:
    """The drafter's weights as the ops take them, with its target's embedding and head.

    Call its methods under `torch.inference_mode()`: they are parts of one step, which enters it once.

    Args:
        config: the validated configuration.
        tensors: by name, those of `drafter_tensors(config)`.
        target: what it drafts for; activations have its dtype.

    Attributes:
        config: as given.
        dtype: of the activations.
        features: what it reads off the target.
        vocabulary: int64 [V'] the tokens that the columns of its logits stand for; None: all.
        eos_token_ids: tokens that end a text.

    Raises:
        ValueError: the sizes are not the target's.
    """

    def __init__(
        self,
        config: RecurrentDrafterConfig,
        tensors: Mapping[str, Tensor],
        target: GatedDeltaNetForCausalLM,
    ) -> None:
        self.config = config
        self.dtype = target.dtype
        self.features = tuple(Feature.parse(name) for name in config.features)
        _check_sizes(config, self.features, target)
        self._eps = eps = config.layer.norm_eps
        embed = ops.pack_weight(tensors["embed_proj.weight"])
        # What a token adds to its input, [V, D]: the same for every occurrence.
        self._table = ops.rms_norm_linear(target.embeddings, tensors["embed_norm.weight"], eps, embed)
        self._fuse: tuple[Tensor, ops.PackedWeight] | None = None
        self._own: tuple[Tensor, ops.PackedWeight] | None = None
        if self.features:
            self._fuse = tensors["fuse_norm.weight"], ops.pack_weight(tensors["fuse_proj.weight"])
            self._own = tensors["own_norm.weight"], ops.pack_weight(tensors["own_proj.weight"])
        self._block = GatedDeltaNetBlock(config.layer, tensors, "layer.")
        self._norm = tensors["norm.weight"]
        self._head = target.head
        self.vocabulary: Tensor | None = None
        if VOCABULARY in tensors:
            self.vocabulary = tensors[VOCABULARY].long()
            self._head = ops.pack_weight(target.head.unpack()[self.vocabulary])
        self.eos_token_ids = target.eos_token_ids
        self._num_parameters = self._head.in_features * self._head.out_features + sum(
            tensor.numel()
            for name, tensor in tensors.items()
            if not name.startswith(("fuse_", "embed_")) and name != VOCABULARY
        )
        self._spec = layer_spec(config.layer)

    @classmethod
    def from_directory(
        cls, directory: str | os.PathLike[str], target: GatedDeltaNetForCausalLM
    ) -> RecurrentDrafterModel:
        """Loads a directory with config.json and model.safetensors.

        Raises:
            ValueError: the configuration or a tensor is not what the format says, or the drafter was trained
                for other weights than the target's.
        """
        config = load_drafter_config(directory)
        if target.source is not None:
            digest = weights_sha256(target.source)
            if digest != config.target.sha256:
                raise ValueError(
                    f"{os.fspath(directory)}: was trained for {config.target.model} with weights of SHA-256 "
                    f"{config.target.sha256[:16]}..., but those of {target.source} have {digest[:16]}...; "
                    "train one for this target with `specdec train-drafter`"
                )
        return cls(config, load_drafter_weights(directory, config), target)

    @property
    def vocab_size(self) -> int:
        """Number of tokens V of the target."""
        return self.config.target.vocab_size

    @property
    def num_parameters(self) -> int:
        """Numbers that a drafted token reads: the block's, those that its parent's output goes through, and
        the head's. Not the fused input's, which the first token of a round reads alone, nor those that only
        made the table of tokens.
        """
        return self._num_parameters

    def new_cache(self, slots: int) -> DecodingCache:
        """An empty cache for `slots` sequences: float32 state, windows in the model's dtype."""
        return DecodingCache([self._spec], slots, dtype=self.dtype)

    def prefill(
        self,
        tokens: Tensor,
        features: Tensor | None,
        *,
        cache: DecodingCache,
        slots: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        """Reads whole texts into empty slots.

        Args:
            tokens: int64 [B, T], for each of them the one that follows.
            features: [B, T, F] what the target showed after the token before; None for the independent
                drafter.
            cache: written at `slots`.
            slots: one distinct slot a row.
            lengths: tokens of each row; 0 leaves its slot empty.

        Raises:
            ValueError: a token is outside the vocabulary, or `features` are missing or not wanted.
        """
        self._check_given(features, None)
        cache.reset(slots)
        if max(lengths) == 0:
            return
        check_tokens(tokens, self.vocab_size)
        self._block.prefill(
            self._inputs(tokens, features, None),
            cache=cache,
            layer=0,
            slots=torch.as_tensor(list(slots), dtype=torch.int32),
            lengths=torch.as_tensor(list(lengths), dtype=torch.int32),
        )

    def forward(
        self,
        tokens: Tensor,
        *,
        features: Tensor | None = None,
        own: Tensor | None = None,
        cache: DecodingCache,
        slots: Tensor,
        parents: Tensor | None = None,
        lengths: Tensor | None = None,
        prefix: Steps | None = None,
    ) -> tuple[Tensor, Round]:
        """Runs a chain or a tree of tokens a sequence; the state changes only by what was pending.

        Args:
            tokens: int64 [B, N].
            features: [B, N, F] of the target after the token before each; None for drafted tokens.
            own: [B, N, D] this model's outputs at each token's parent, where there are no features yet; None
                with `features`. The independent drafter takes neither.
            cache: read at `slots`; a pending round is folded in.
            slots: int32 [B], negative for padding rows.
            parents: int32 [B, N], -1 for a root; None for chains.
            lengths: int32 [B] valid nodes a row; None for N.
            prefix: uncommitted nodes that these continue, with parents counted over both.

        Returns:
            The outputs h, [B, N, D], of which `logits` makes logits, and the factors to commit.

        Raises:
            ValueError: `features` and `own` are both missing or both given, or not wanted.
        """
        self._check_given(features, own)
        x = self._inputs(tokens, features, own)
        h, _, factors = self._block.verify(
            x,
            cache=cache,
            layer=0,
            slots=slots,
            parents=parents,
            lengths=lengths,
            pending=cache.take_pending(slots),
            prefix=prefix,
        )
        return h, Round((factors,), slots, parents, tokens.shape[1])

    def logits(self, h: Tensor) -> Tensor:
        """Logits of the token after each output.

        Args:
            h: [..., D].

        Returns:
            float32 [..., V'], V' the drafter's vocabulary (`vocabulary`) or all of the target's.
        """
        return ops.rms_norm_linear(h.float(), self._norm, self._eps, self._head)

    def _inputs(self, tokens: Tensor, features: Tensor | None, own: Tensor | None) -> Tensor:
        """[B, N, D]."""
        added = self._table[tokens]
        if features is not None and self._fuse is not None:
            norm, weight = self._fuse
            return ops.rms_norm_linear(features, norm, self._eps, weight, residual=added)
        if own is not None and self._own is not None:
            norm, weight = self._own
            return ops.rms_norm_linear(own, norm, self._eps, weight, residual=added)
        return added

    def _check_given(self, features: Tensor | None, own: Tensor | None) -> None:
        """A drafter of features takes just one of the two, the independent one neither."""
        given = [name for name, value in (("features", features), ("own", own)) if value is not None]
        if len(given) != (1 if self.features else 0):
            want = "one of the two" if self.features else "neither, as this drafter reads no features"
            raise ValueError(f"features, own: got {' and '.join(given) or 'neither'}, want {want}")


def _check_sizes(
    config: RecurrentDrafterConfig, features: Sequence[Feature], target: GatedDeltaNetForCausalLM
) -> None:
    for name, got, want in (
        ("target.vocab_size", config.target.vocab_size, target.vocab_size),
        ("target.hidden_size", config.target.hidden_size, target.config.hidden_size),
        ("feature_size", config.feature_size, sum(target.feature_size(f) for f in features)),
    ):
        if got != want:
            raise ValueError(f"drafter config: {name}: got {got}, want the target's {want}")
