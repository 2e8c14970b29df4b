"""Acceptance: which drafts are kept and which token follows, greedily or by an exact rule of sampling."""

from specdec.acceptance.decisions import Accepted, Decisions, SeededDecisions
from specdec.acceptance.draws import draw_tokens
from specdec.acceptance.editing import SequenceRows, edit_logits
from specdec.acceptance.history import TokenHistory
from specdec.acceptance.logprobs import TokenLogprob, token_logprobs
from specdec.acceptance.params import SamplingParams
from specdec.acceptance.processing import process_logits
from specdec.acceptance.rng import Stream, categorical, resolve_seed, uniform, uniform_grid
from specdec.acceptance.round import decide_round
from specdec.acceptance.rules import RULES, ProposalLike, resolve, rule_for
from specdec.acceptance.typical import Typical

__all__ = [
    "RULES",
    "Accepted",
    "Decisions",
    "ProposalLike",
    "SamplingParams",
    "SeededDecisions",
    "SequenceRows",
    "Stream",
    "TokenHistory",
    "TokenLogprob",
    "Typical",
    "categorical",
    "decide_round",
    "draw_tokens",
    "edit_logits",
    "process_logits",
    "resolve",
    "resolve_seed",
    "rule_for",
    "token_logprobs",
    "uniform",
    "uniform_grid",
]
