"""What models that are a stack of blocks between an embedding and a head share.

A block keeps what its layer remembers in a `DecodingCache` and leaves what it made of new nodes in a `Round`.
All ways to run a part of such a model are one: layers [first, last) over hidden states (`run_layers`), some
of their sub-layers left out where the model is a view (`skipping`), read through the one norm and head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from specdec import ops
from specdec._checks import check_integer
from specdec._rows import take_rows
from specdec.cache import DecodingCache, KVSpec, LayerEntries, LayerSpec, PendingRound, Round, Steps
from specdec.models.config import GatedDeltaNetConfig
from specdec.models.features import FeatureTap
from specdec.models.llama_config import LlamaConfig
from specdec.models.skip_file import check_vocabulary
from specdec.models.skipping import SkipSet

T = TypeVar("T")
M = TypeVar("M", bound="Layered")


class Pass(NamedTuple):
    """What blocks are given beside the residual stream; letters and arguments as of `CausalLM.forward`.

    Attributes:
        pending: what the cache handed out for these slots.
        rotation: float32 [B, N, 2, D'] of the nodes' positions, where the model turns queries and keys.
    """

    cache: DecodingCache
    slots: Tensor
    parents: Tensor | None
    lengths: Tensor | None
    pending: PendingRound | None
    prefix: Steps | None
    rotation: Tensor | None


class Block(Protocol):
    """A block, as far as the stack knows it."""

    def to_int8(self: T) -> T:
        """A copy with int8 matrices."""


class Layered(ABC):
    """A stack of blocks with an embedding before it and norm and head behind it.

    A subclass sets the attributes, the protected ones too, and says what a block does.

    Attributes:
        config: the validated configuration.
        dtype: of the activations.
        source: where the weights came from; None where from no file.
        vocabulary: int64 [V'] the tokens that the columns of its logits stand for, ascending; None: all.
    """

    config: GatedDeltaNetConfig | LlamaConfig
    dtype: torch.dtype
    source: Path | None = None
    vocabulary: Tensor | None = None
    _embeddings: Tensor
    _head: ops.PackedWeight
    _final_norm: Tensor
    _eps: float
    _spec: LayerSpec | KVSpec
    _layers: Sequence[Block]
    _skips = SkipSet()
    _int8: Layered | None = None  # the model with int8 matrices, once a view asked for it
    _byte_ratio = 1  # of an int8 copy: bytes of a weight over those of its copy
    _reads: frozenset[int] | None = None  # layers whose memory a view reads; None: no view

    @abstractmethod
    def _block(
        self, layer: int, x: Tensor, call: Pass, *, mixer: bool, mlp: bool
    ) -> tuple[Tensor, Tensor | None, LayerEntries]:
        """Runs a block over new nodes: the residual stream after it, [B, N, D], what its recurrence read,
        where it has one, and what to commit. `mixer` and `mlp` say what is not skipped.
        """

    def _rotation_at(
        self, cache: DecodingCache, slots: Tensor, nodes: int, parents: Tensor | None, prefix: Steps | None
    ) -> Tensor | None:
        """`Pass.rotation` of N nodes; None for a model that turns nothing."""
        return None

    @property
    def vocab_size(self) -> int:
        """Number of tokens V."""
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        """Blocks, each of a token mixer and an MLP."""
        return len(self._layers)

    @property
    def early_exit_layers(self) -> tuple[int, ...]:
        """Numbers of layers, ascending, after which norm and head were trained to predict too."""
        return ()

    @property
    def embeddings(self) -> Tensor:
        """[V, D] the rows that tokens enter as, in the dtype of the activations."""
        return self._embeddings

    @property
    def head(self) -> ops.PackedWeight:
        """[V, D] the output head."""
        return self._head

    @property
    def num_parameters(self) -> int:
        """Number of weights that a decode step reads, the embedding counted with a tied head; int8 copies are
        counted by their bytes, in weights of the model that they are copies of.
        """
        c, skips = self.config, self._skips
        skipped = len(skips.mixers) * c.mixer_parameters + len(skips.mlps) * c.mlp_parameters
        columns = c.vocab_size if self.vocabulary is None else len(self.vocabulary)
        read = c.num_parameters - skipped - (c.vocab_size - columns) * c.hidden_size
        return read // self._byte_ratio

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        return frozenset(self.config.eos_token_ids)

    def first_layers(self: M, count: int) -> M:
        """An early exit: the first `count` layers with this model's norm and head. The weights are shared.

        Raises:
            ValueError: `count` is not 1 to the number of layers.
        """
        check_integer("count", count, 1, len(self._layers))
        part = self._copied()
        part.config = self.config.first_layers(count)
        part._layers = self._layers[:count]
        part._int8 = None
        part.source = None
        return part

    def skipping(
        self: M, skips: SkipSet, vocabulary: Sequence[int] | None = None, *, int8: bool = False
    ) -> M:
        """A view of this model that leaves sub-layers out; see `SkippableLM.skipping`."""
        skips.check_layers(len(self._layers))
        if vocabulary is not None and self.vocabulary is not None:
            raise ValueError("vocabulary: this view has one already, want a view of the whole model")
        view = (self._int8_copy() if int8 else self)._copied()
        view._skips = skips
        view._reads = frozenset(range(len(self._layers))) - skips.mixers
        view.source = None
        if vocabulary is not None:
            check_vocabulary(vocabulary, self.vocab_size)
            view.vocabulary = torch.tensor(list(vocabulary))
            head = self._head.unpack()[view.vocabulary].float()
            view._head = ops.pack_weight(head, torch.int8 if view._in_int8 else None)
            view._int8 = None  # it has the whole vocabulary
        return view

    @property
    def _in_int8(self) -> bool:
        return self._head.dtype == torch.int8

    def _int8_copy(self: M) -> M:
        """This model with int8 matrices, made once."""
        if self._in_int8:
            return self
        if self._int8 is None:
            part = self._copied()
            part._layers = [layer.to_int8() for layer in self._layers]
            part._head = self._head.to_int8()
            part._byte_ratio = self._head.dtype.itemsize
            self._int8 = part
        assert isinstance(self._int8, type(self))
        return self._int8

    def _copied(self: M) -> M:
        """A model that shares the weights, to be changed."""
        return copy(self)

    def sub_layers(
        self,
        nodes: int,
        *,
        cache: DecodingCache,
        slots: Tensor,
        parents: Tensor | None = None,
        prefix: Steps | None = None,
    ) -> list[Callable[[Tensor], Tensor]]:
        """The sub-layers one by one; see `SkippableLM.sub_layers`."""
        cache.flush()
        rotation = self._rotation_at(cache, slots, nodes, parents, prefix)
        call = Pass(cache, slots, parents, None, None, prefix, rotation)

        def part(number: int) -> Callable[[Tensor], Tensor]:
            layer, mlp = divmod(number, 2)
            return lambda x: self._block(layer, x, call, mixer=not mlp, mlp=bool(mlp))[0]

        return [part(number) for number in range(2 * len(self._layers))]

    def new_cache(self, slots: int) -> DecodingCache:
        """An empty cache for `slots` sequences: float32 states; windows, keys and values in the model's
        dtype.
        """
        return DecodingCache([self._spec] * len(self._layers), slots, dtype=self.dtype)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        *,
        cache: DecodingCache,
        slots: Tensor,
        parents: Tensor | None = None,
        lengths: Tensor | None = None,
        prefix: Steps | None = None,
        tap: FeatureTap | None = None,
    ) -> tuple[Tensor, Round]:
        """Verifies a chain or a tree of tokens a sequence; see `CausalLM.forward`."""
        x = take_rows(self._embeddings, tokens)  # [B, N, D]
        pending = None
        if self._reads is None:
            pending = cache.take_pending(slots)
        else:
            cache.settle(self._reads)
        x, round = self.run_layers(
            x,
            range(len(self._layers)),
            cache=cache,
            slots=slots,
            parents=parents,
            lengths=lengths,
            pending=pending,
            prefix=prefix,
            tap=tap,
        )
        return self.readout(x), round

    @torch.inference_mode()
    def run_layers(
        self,
        x: Tensor,
        layers: range,
        *,
        cache: DecodingCache,
        slots: Tensor,
        parents: Tensor | None = None,
        lengths: Tensor | None = None,
        pending: PendingRound | None = None,
        prefix: Steps | None = None,
        tap: FeatureTap | None = None,
    ) -> tuple[Tensor, Round]:
        """Runs nodes through some layers; see `LayeredLM.run_layers`."""
        nodes = x.shape[1]
        rotation = self._rotation_at(cache, slots, nodes, parents, prefix)
        call = Pass(cache, slots, parents, lengths, pending, prefix, rotation)
        made: list[LayerEntries] = [None] * len(self._layers)
        x = self._run(x, layers, call, made, tap)
        return x, Round(tuple(made), slots, parents, nodes)

    def _run(
        self, x: Tensor, layers: range, call: Pass, made: list[LayerEntries], tap: FeatureTap | None
    ) -> Tensor:
        """Runs nodes through some layers, block by block: the residual stream after them, [B, N, D]. What is
        to commit goes to these layers' places in `made`.
        """
        skips = self._skips
        for i in layers:
            mixer, mlp, read = i not in skips.mixers, i not in skips.mlps, None
            if mixer or mlp:
                x, read, made[i] = self._block(i, x, call, mixer=mixer, mlp=mlp)
            if tap is not None and i in tap.layers:
                if read is not None:
                    tap.offer("readout", i, read)
                tap.offer("hidden", i, x)
        return x

    def grow(
        self,
        logits: Tensor,
        requests: Sequence[ops.TreeRequest],
        rules: ops.TreeRules,
        *,
        outputs: Tensor,
        layers: range,
        cache: DecodingCache,
        prefix: Steps,
        head: ops.PackedWeight | None = None,
        adapter: ops.DraftAdapter | None = None,
        sampling: ops.DraftSampling | None = None,
    ) -> ops.GrownTrees | None:
        """Drafts with the first layers in one call, where the model can; see `LayeredLM.grow`."""
        return None

    @torch.inference_mode()
    def readout(self, x: Tensor, head: ops.PackedWeight | None = None) -> Tensor:
        """Logits float32 [..., V'] of hidden states [..., D]; see `LayeredLM.readout`. In float32, so that a
        bfloat16 model does not round its logits into ties.
        """
        head = self._head if head is None else head
        return ops.rms_norm_linear(x.float(), self._final_norm, self._eps, head)
