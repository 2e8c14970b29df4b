"""What a model remembers of a batch of sequences, addressed by slot, and the round in between.

A layer keeps a recurrent state and a convolution window, or keys and values; a hybrid model has layers of
both kinds. A verification leaves this durable memory alone and returns what each layer would add to it:
factors, or keys and values of its nodes. Accepting a path either commits it at once or leaves it pending for
the next forward pass (`DecodingCache`). A drafter moves ahead of the memory with `Steps`.
"""

from specdec.cache.decoding import DecodingCache, path_tensor
from specdec.cache.pool import KVPool
from specdec.cache.rounds import KVEntries, LayerEntries, LayerFactors, PendingRound, Round, Steps
from specdec.cache.specs import KVSpec, LayerSpec

__all__ = [
    "DecodingCache",
    "KVEntries",
    "KVPool",
    "KVSpec",
    "LayerEntries",
    "LayerFactors",
    "LayerSpec",
    "PendingRound",
    "Round",
    "Steps",
    "path_tensor",
]
