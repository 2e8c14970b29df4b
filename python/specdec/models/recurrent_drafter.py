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
from specdec._rows import take_rows
from specdec.cache import DecodingCache, LayerFactors, Round, Steps
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
        weight_dtype: of the matrices, its own copy of the head among them, as `ops.pack_weight` takes it;
            None for one that loses nothing and shares the head.

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
        *,
        weight_dtype: torch.dtype | None = None,
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
            self._fuse = (
                tensors["fuse_norm.weight"],
                ops.pack_weight(tensors["fuse_proj.weight"], weight_dtype),
            )
            self._own = tensors["own_norm.weight"], ops.pack_weight(tensors["own_proj.weight"], weight_dtype)
        self._block = GatedDeltaNetBlock(config.layer, tensors, "layer.", dtype=weight_dtype)
        self._norm = tensors["norm.weight"]
        self._head = target.head
        self.vocabulary: Tensor | None = None
        if VOCABULARY in tensors:
            self.vocabulary = tensors[VOCABULARY].long()
        if self.vocabulary is not None or weight_dtype is not None:
            rows = target.head.unpack()
            self._head = ops.pack_weight(
                rows if self.vocabulary is None else rows[self.vocabulary], weight_dtype
            )
        self.eos_token_ids = target.eos_token_ids
        self._num_parameters = self._head.in_features * self._head.out_features + sum(
            tensor.numel()
            for name, tensor in tensors.items()
            if not name.startswith(("fuse_", "embed_")) and name != VOCABULARY
        )
        self._spec = layer_spec(config.layer)
        self._drafting = ops.Drafting(
            self._table, self._own, ops.BlockStack([self._block.weights]), self._norm, self._head
        )

    @classmethod
    def from_directory(
        cls, directory: str | os.PathLike[str], target: GatedDeltaNetForCausalLM
    ) -> RecurrentDrafterModel:
        """Loads a directory with config.json and model.safetensors. Its matrices, which need not be exact,
        are kept in int8: most of the drafter's work is reading them.

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
        weights = load_drafter_weights(directory, config)
        return cls(config, weights, target, weight_dtype=torch.int8)

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
        self._check_given(features)
        cache.reset(slots)
        if max(lengths) == 0:
            return
        check_tokens(tokens, self.vocab_size)
        self._block.prefill(
            self._inputs(tokens, features),
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
        cache: DecodingCache,
        slots: Tensor,
        parents: Tensor | None = None,
        lengths: Tensor | None = None,
        prefix: Steps | None = None,
    ) -> tuple[Tensor, Round]:
        """Runs emitted tokens, chains or trees; the state changes only by what was pending.

        Args:
            tokens: int64 [B, N].
            features: [B, N, F] of the target after the token before each; None for the independent drafter.
            cache: read at `slots`; a pending round is folded in.
            slots: int32 [B], negative for padding rows.
            parents: int32 [B, N], -1 for a root; None for chains.
            lengths: int32 [B] valid nodes a row; None for N.
            prefix: uncommitted nodes that these continue, with parents counted over both.

        Returns:
            The outputs h, [B, N, D], of which `logits` makes logits, and the factors to commit.

        Raises:
            ValueError: `features` are missing or not wanted.
        """
        self._check_given(features)
        x = self._inputs(tokens, features)
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

    def step(
        self,
        tokens: Tensor,
        outputs: Tensor,
        *,
        cache: DecodingCache,
        slots: Tensor,
        parents: Tensor | None = None,
        lengths: Tensor | None = None,
        prefix: Steps,
    ) -> tuple[Tensor, Tensor]:
        """Runs a level of drafted tokens on this model's own outputs and appends it to the prefix.

        Args:
            tokens: int64 [B, N].
            outputs: [B, NP, D] h of the prefix's nodes.
            cache: read at `slots`.
            slots: int32 [B].
            parents: int32 [B, N] each token's parent in the prefix; None where N is 1 and all continue its
                last node.
            lengths: int32 [B] valid nodes a row; None for N.
            prefix: uncommitted nodes that these continue; the new ones are appended.

        Returns:
            Logits float32 [R, V'] after each valid node, one row's after the other's, and the outputs of all
            nodes, [B, NP + N, D].
        """
        step = ops.draft_step(
            tokens,
            self._drafting,
            self._place(outputs, cache, slots, prefix),
            parents=parents,
            lengths=lengths,
        )
        prefix.replace((LayerFactors(*step.entries[0]),), parents, tokens.shape[1])
        return step.logits, step.outputs

    def grow(
        self,
        logits: Tensor,
        outputs: Tensor,
        requests: Sequence[ops.TreeRequest],
        rules: ops.TreeRules,
        *,
        cache: DecodingCache,
        slots: Tensor,
        prefix: Steps,
        sampling: ops.DraftSampling | None = None,
    ) -> ops.GrownTrees:
        """Drafts trees of the likeliest tokens, or drawn chains, in one call; the prefix stays as it is.

        Args:
            logits: float32 [B, V'] after each row's last emitted token.
            outputs: [B, NP, D] h of the prefix's nodes.
            requests: a row's each.
            rules: of all of them.
            cache, slots, prefix: as in `step`.
            sampling: how chains are drawn; None: the likeliest tokens.
        """
        place = self._place(outputs, cache, slots, prefix)
        return ops.draft_tree(logits, requests, rules, self._drafting, place, sampling=sampling)

    def _place(self, outputs: Tensor, cache: DecodingCache, slots: Tensor, prefix: Steps) -> ops.DraftPlace:
        """Where the operators go on that continue a prefix."""
        window, round = cache.conv[0], prefix.round
        assert window is not None
        assert round is not None
        entries = round.layers[0]
        assert isinstance(entries, LayerFactors)
        assert entries.conv is not None
        nodes = ops.StackPrefix([ops.BlockEntries(entries.recurrent, entries.conv)], round.parents)
        return ops.DraftPlace(outputs, nodes, [window], [cache.state[0]], slots, self._block.scale)

    def logits(self, h: Tensor) -> Tensor:
        """Logits of the token after each output.

        Args:
            h: [..., D].

        Returns:
            float32 [..., V'], V' the drafter's vocabulary (`vocabulary`) or all of the target's.
        """
        return ops.rms_norm_linear(h.float(), self._norm, self._eps, self._head)

    def _inputs(self, tokens: Tensor, features: Tensor | None) -> Tensor:
        """[B, N, D]."""
        added = take_rows(self._table, tokens)
        if features is None or self._fuse is None:
            return added
        norm, weight = self._fuse
        return ops.rms_norm_linear(features, norm, self._eps, weight, residual=added)

    def _check_given(self, features: Tensor | None) -> None:
        if (features is None) == bool(self.features):
            got, want = ("None", "a tensor") if features is None else ("a tensor", "None")
            raise ValueError(
                f"features: got {got}, want {want}: the drafter reads {list(self.config.features)}"
            )


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
