"""The sampled distribution written out naively in float64: the independent twin of `process_logits`."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from specdec.acceptance import SamplingParams


def distribution(logits: Sequence[float], params: SamplingParams, seen: Collection[int] = ()) -> np.ndarray:
    """Probabilities [V] of one row, by sorting Python lists; `seen` may repeat tokens."""
    x = [float(v) for v in logits]
    for t in set(seen):
        x[t] = x[t] / params.repetition_penalty if x[t] > 0 else x[t] * params.repetition_penalty
    ranked = sorted(range(len(x)), key=lambda i: (-x[i], i))
    top = x[ranked[0]]
    if params.temperature == 0.0:
        return np.eye(len(x))[ranked[0]]
    weight = [math.exp((v - top) / params.temperature) for v in x]
    if params.top_k:
        ranked = ranked[: params.top_k]
    if params.top_p < 1.0:
        goal, mass, kept = params.top_p * math.fsum(weight[i] for i in ranked), 0.0, []
        for i in ranked:
            kept.append(i)
            mass += weight[i]
            if mass >= goal:
                break
        ranked = kept
    ranked = [i for i in ranked if weight[i] >= params.min_p]
    out = np.zeros(len(x))
    total = math.fsum(weight[i] for i in ranked)
    for i in ranked:
        out[i] = weight[i] / total
    return out
