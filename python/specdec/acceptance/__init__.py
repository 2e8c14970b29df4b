"""Acceptance: which drafts are kept and which token follows, greedily or by exact speculative sampling."""

from specdec.acceptance.greedy import accept_greedy
from specdec.acceptance.rng import Stream, categorical, resolve_seed, uniform, uniform_grid
from specdec.acceptance.sampling import (
    PenaltyHistory,
    SamplingParams,
    greedy_tokens,
    penalise,
    process_logits,
)
from specdec.acceptance.speculative import (
    Accepted,
    Decisions,
    ProposalLike,
    accept_chain,
    accept_sampled,
    decide_round,
)

__all__ = [
    "Accepted",
    "Decisions",
    "PenaltyHistory",
    "ProposalLike",
    "SamplingParams",
    "Stream",
    "accept_chain",
    "accept_greedy",
    "accept_sampled",
    "categorical",
    "decide_round",
    "greedy_tokens",
    "penalise",
    "process_logits",
    "resolve_seed",
    "uniform",
    "uniform_grid",
]
