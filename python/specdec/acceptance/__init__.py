"""Acceptance: which drafts are kept and which token follows, greedily or by exact speculative sampling."""

from specdec.acceptance.editing import SequenceRows, edit_logits
from specdec.acceptance.greedy import accept_greedy
from specdec.acceptance.history import TokenHistory
from specdec.acceptance.params import SamplingParams
from specdec.acceptance.processing import greedy_tokens, process_logits
from specdec.acceptance.rng import Stream, categorical, resolve_seed, uniform, uniform_grid
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
    "ProposalLike",
    "SamplingParams",
    "SequenceRows",
    "Stream",
    "TokenHistory",
    "accept_chain",
    "accept_greedy",
    "accept_sampled",
    "categorical",
    "decide_round",
    "edit_logits",
    "greedy_tokens",
    "process_logits",
    "resolve_seed",
    "uniform",
    "uniform_grid",
]
