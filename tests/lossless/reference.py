"""The sampled distribution written out naively in float64: the independent twin of `process_logits`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from specdec.acceptance import SamplingParams


def edits(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> list[float]:
    """One row after penalties, bias and masks; `output` has the node's own path. Without the callback."""
    x = [float(v) for v in logits]
    banned = set(params.banned_tokens)
    for t in range(len(x)):
        if t in prompt or t in output:
            x[t] = x[t] / params.repetition_penalty if x[t] > 0 else x[t] * params.repetition_penalty
        times = sum(1 for o in output if o == t)
        if times:
            x[t] -= params.presence_penalty
        x[t] -= params.frequency_penalty * times
        x[t] += dict(params.logit_bias).get(t, 0.0)
        if t in banned or (params.allowed_tokens is not None and t not in params.allowed_tokens):
            x[t] = -math.inf
    return x


def distribution(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> np.ndarray:
    """Probabilities [V] of one row, by sorting Python lists."""
    x = edits(logits, params, prompt, output)
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
