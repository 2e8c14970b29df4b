"""Decisions of acceptance on every backend: against float64, and to the bit where bits are promised."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ops.backends import BACKENDS, COMPILED, Backend
from ops.rounds import DTYPES, WITHOUT_REPLACEMENT, expect_same, random_round
from ops.sampling import accept_greedy, accept_with_margins
from specdec import ops
from specdec.ops import Accepted, AcceptRule

# A target row is off by about 2^-18 of its numbers (`probs_bound` at |x| < 28). What a rejection leaves is
# off by twice that over its sum, which seldom is below 2^-5: by 2^-12 then, and a walk meets a few of them.
# Draws, which are as near to other tokens as the vocabulary is large, count their distance times DRAW_SCALE
# and times the sum of what the last rejection left: 2^-16 of a whole row.
NEAR = 2.0**-10
SIZES = [1, 2, 5, 127, 129, 1000, 4096, 8193, 60]  # V
STAR = [-1] + [0] * 40
BUSHES = [-1] + [0] * 7 + [1] * 6 + [2] * 9 + [4] * 3 + [7] * 5  # wide nodes below a wide node


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("rule", list(AcceptRule))
def test_decisions_match_float64(backend: Backend, rule: AcceptRule, tree: bool) -> None:
    accepted = near = total = 0
    for i, V in enumerate(SIZES if backend.share < 32 else SIZES[1:4]):
        B, N = (6, 6) if V > 1000 else (12, 9)
        case = random_round(i, rule, B=B, N=N, V=V, tree=tree, dtype=DTYPES[i % 3])
        got = backend.accept_sampled(**case)
        want, margins = accept_with_margins(**case)
        far = [b for b in range(B) if margins[b] > NEAR]
        expect_same(got, want, far)
        near, total = near + B - len(far), total + B
        accepted += int((want.path_lengths[far] - 1).clamp(min=0).sum())
    assert near < total / 3  # ever more as V grows
    assert accepted > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [STAR, BUSHES], ids=["star", "bushes"])
@pytest.mark.parametrize("rule", [rule for rule in AcceptRule if rule != AcceptRule.K_SEQ])
def test_many_siblings(backend: Backend, rule: AcceptRule, shape: list[int]) -> None:
    # k-SEQ's bisection compares 1 - (1 - beta)^k with rho beta; with 40 children both are 1 where q covers
    # p / rho, and rounding decides, of which the margins know nothing. The C++ tests have it to the bit.
    rejected = far = 0
    for i, V in enumerate(backend.some([60, 4096, 5, 300])):
        case = random_round(i, rule, B=6, N=len(shape), V=V, tree=shape)
        other = 2 * torch.randn(6, len(shape), V, generator=torch.Generator().manual_seed(i))
        case["logits"][::2] += other[::2]  # rows that have less to do with the drafts
        got = backend.accept_sampled(**case)
        want, margins = accept_with_margins(**case)
        sure = [b for b in range(6) if margins[b] > NEAR]
        expect_same(got, want, sure)
        far += len(sure)
        rejected += int((got.path_lengths[sure] == 1).sum())
    assert far > 0
    assert rejected > 0 or backend.share > 1


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy(backend: Backend, dtype: torch.dtype) -> None:
    for V in backend.some([1, 2, 5, 127, 129, 4096, 8193, 33]):
        for tree in (False, True):
            case = random_round(V, AcceptRule.FOLLOW, B=12, N=7, V=V, tree=tree, dtype=dtype)
            arguments = [case[name] for name in ("logits", "tokens", "parents", "lengths")]
            logits, tokens, parents, lengths = arguments
            for b in range(12):  # most drafts become right
                for n in range(1, int(lengths[b])):
                    above = n - 1 if parents is None else int(parents[b, n])
                    if (b + n) % 4:
                        tokens[b, n] = logits[b, above].float().argmax()
            want = accept_greedy(*arguments)
            expect_same(backend.accept_greedy(*arguments), want)
            assert V == 1 or want.path_lengths.unique().numel() > 2


@pytest.mark.parametrize("backend", COMPILED)
def test_temperature_zero_is_greedy(backend: Backend) -> None:
    # Without replacement the second child of a one-hot row has probability 0 and is refused, as it has to be.
    for rule in sorted(set(AcceptRule) - set(WITHOUT_REPLACEMENT)):
        case = random_round(3, rule, B=6, N=6, V=200, tree=rule % 2 == 0)
        case["temperature"] = torch.zeros(6)
        if rule != AcceptRule.FOLLOW:  # a drafter at temperature 0 draws the argmax of its own row
            best = case["draft_probs"].nan_to_num().argmax(1)
            case["draft_probs"] = torch.nn.functional.one_hot(best, 200).float()
            for b, n in np.ndindex(6, 6):
                if 0 < n < case["lengths"][b]:
                    case["tokens"][b, n] = best[case["draft_rows"][b, n]]
        sampled = backend.accept_sampled(**case)
        greedy = backend.accept_greedy(*(case[name] for name in ("logits", "tokens", "parents", "lengths")))
        assert torch.equal(sampled.path_lengths, greedy.path_lengths)
        assert torch.equal(sampled.next_token, greedy.next_token)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("rule", list(AcceptRule))
def test_a_sequence_alone_and_in_a_batch(backend: Backend, rule: AcceptRule) -> None:
    case = random_round(11, rule, B=7, N=8, V=700, tree=True)
    together = backend.accept_sampled(**case)
    again = backend.accept_sampled(**case)
    expect_same(again, together)
    for b in backend.some(range(7)):
        alone = {name: x if name == "draft_probs" else x[b : b + 1] for name, x in case.items()}
        got = backend.accept_sampled(**alone)
        expect_same(got, Accepted(*(x[b : b + 1] for x in together)))
    other = backend.accept_sampled(**{**case, "seeds": case["seeds"] + 1})
    assert not torch.equal(other.next_token, together.next_token)


def test_a_long_row() -> None:
    for rule in (AcceptRule.FOLLOW, AcceptRule.K_SEQ, AcceptRule.TRAVERSAL_WITHOUT_REPLACEMENT):
        case = random_round(int(rule), rule, B=6, N=4, V=150_001, tree=True)
        got = ops.accept_sampled(**case)
        want, margins = accept_with_margins(**case)
        far = [b for b in range(6) if margins[b] > NEAR]
        assert len(far) > 1
        expect_same(got, want, far)
        one = {name: x if name == "draft_probs" else x[:1] for name, x in case.items()}
        expect_same(ops.accept_sampled(**one), Accepted(*(x[:1] for x in got)))


def test_threads_do_not_matter() -> None:
    before = torch.get_num_threads()
    case = random_round(5, AcceptRule.TRAVERSAL, B=1, N=4, V=40_000, tree=False)
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(ops.accept_sampled(**case))
    finally:
        torch.set_num_threads(before)
    expect_same(results[1], results[0])
    expect_same(results[2], results[0])


# --- instruction sets ---

_BITS = """
import sys; sys.path[:0] = {path!r}
import hashlib
import torch
from ops.rounds import DTYPES, random_logits, random_round, settings_of
from specdec import ops
from specdec.ops import AcceptRule
digest = hashlib.sha256()
for i, V in enumerate((5, 129, 1000, 8193, 20000)):
    logits = random_logits(torch.Generator().manual_seed(i), 12, V, dtype=DTYPES[i % 3])
    probs = ops.sampling_probs(logits, **settings_of(12))
    digest.update(probs.numpy().tobytes())
    how = dict(seeds=torch.arange(12), positions=torch.arange(12), nodes=torch.arange(12, dtype=torch.int32))
    for replacement in (True, False):
        digest.update(ops.draw_tokens(probs, 3, replacement=replacement, **how).numpy().tobytes())
    for rule in AcceptRule:
        for tree in (True, [-1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]):
            N = 6 if tree is True else len(tree)
            for x in ops.accept_sampled(**random_round(i, rule, B=6, N=N, V=min(V, 2000), tree=tree)):
                digest.update(x.numpy().tobytes())
print(ops.cpu_isa(), digest.hexdigest())
"""


@pytest.mark.skipif("SPECDEC_CPU_ISA" in os.environ, reason="this run is for one instruction set already")
def test_instruction_sets_agree() -> None:
    code = _BITS.format(path=[*sys.path, str(Path(__file__).resolve().parent.parent)])
    found = {}
    for isa in ops._load.cpu_isa_builds():
        environment = {**os.environ, "SPECDEC_CPU_ISA": isa}
        run = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        if run.returncode != 0 and re.search("SPECDEC_CPU_ISA: got", run.stderr):
            continue  # not on this machine
        assert run.returncode == 0, run.stderr
        name, digest = run.stdout.split()
        found[name] = digest
    assert ops.cpu_isa() in found
    assert len(set(found.values())) == 1, found
