"""Acceptance: which drafts are kept and which token follows, greedily or by an exact rule of sampling."""

from specdec._rules import RULES
from specdec.acceptance.decisions import Decisions, SeededDecisions
from specdec.acceptance.draws import draw_tokens
from specdec.acceptance.editing import SequenceRows, edit_logits
from specdec.acceptance.history import TokenHistory
from specdec.acceptance.logprobs import TokenLogprob, token_logprobs
from specdec.acceptance.params import SamplingParams
from specdec.acceptance.processing import process_logits
from specdec.acceptance.proposal import ProposalKind, ProposalLike
from specdec.acceptance.rng import Stream, categorical, resolve_seed, uniform
from specdec.acceptance.round import decide_round
from specdec.acceptance.rules import check_rule, follows, resolve_rule, rule_for
from specdec.acceptance.typical import Typical
from specdec.acceptance.walking import Verdict

__all__ = [
    "RULES",
    "Decisions",
    "ProposalKind",
    "ProposalLike",
    "SamplingParams",
    "SeededDecisions",
    "SequenceRows",
    "Stream",
    "TokenHistory",
    "TokenLogprob",
    "Typical",
    "Verdict",
    "categorical",
    "check_rule",
    "decide_round",
    "draw_tokens",
    "edit_logits",
    "follows",
    "process_logits",
    "resolve_rule",
    "resolve_seed",
    "rule_for",
    "token_logprobs",
    "uniform",
]
