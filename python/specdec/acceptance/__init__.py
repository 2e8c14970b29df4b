"""Acceptance: which drafts are kept and which token follows, greedily or by an exact rule of sampling."""

from specdec.acceptance.decisions import Accepted, Decisions, SeededDecisions
from specdec.acceptance.greedy import accept_greedy
from specdec.acceptance.rng import Stream, categorical, resolve_seed, uniform, uniform_grid
from specdec.acceptance.round import accept_sampled, decide_round
from specdec.acceptance.rules import RULES, ProposalLike, resolve, rule_for
from specdec.acceptance.sampling import (
    PenaltyHistory,
    SamplingParams,
    greedy_tokens,
    penalise,
    process_logits,
)
from specdec.acceptance.typical import Typical

__all__ = [
    "RULES",
    "Accepted",
    "Decisions",
    "PenaltyHistory",
    "ProposalLike",
    "SamplingParams",
    "SeededDecisions",
    "Stream",
    "Typical",
    "accept_greedy",
    "accept_sampled",
    "categorical",
    "decide_round",
    "greedy_tokens",
    "penalise",
    "process_logits",
    "resolve",
    "resolve_seed",
    "rule_for",
    "uniform",
    "uniform_grid",
]
