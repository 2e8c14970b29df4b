"""Acceptance of single rounds: greedy walks, properties of sampled ones, errors."""

from __future__ import annotations

import doctest
from collections.abc import Callable, Collection

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec.acceptance.greedy
import specdec.acceptance.rules
from lossless.toys import PROMPT, Proposal, Toy, Tree, proposal_round
from specdec import ops
from specdec.acceptance import (
    RULES,
    ProposalKind,
    SamplingParams,
    SeededDecisions,
    TokenHistory,
    Typical,
    check_rule,
    decide_round,
    process_logits,
    resolve_rule,
    rule_for,
)
from specdec.acceptance.greedy import walk_greedy
from specdec.acceptance.typical import walk_typical
from specdec.acceptance.walking import path_to
from specdec.ops.acceptance import AcceptRule

VOCAB = 9
NO_DRAFTS = Proposal(Tree([]), ProposalKind.DETERMINISTIC)

Propose = Callable[[list[int]], tuple[list[int], list[int]]]


def walk(want: list[int], tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """All accepted paths from the root token, by recursion."""
    paths = [(0,)]
    for j in range(1, len(tokens)):
        paths += [(*p, j) for p in paths if p[-1] == parents[j] and tokens[j] == want[p[-1]]]
    return paths


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Parents and tokens of a round's nodes, node 0 the root token, and a seed for everything else."""
    n = draw(st.integers(1, 12))
    parents = [-1, *(draw(st.integers(0, j - 1)) for j in range(1, n))]
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=n, max_size=n))
    return parents, tokens, draw(st.integers(0, 2**32 - 1))


@given(trees(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_greedy_takes_the_deepest_accepted_path(tree: tuple[list[int], list[int], int], chain: bool) -> None:
    parents, tokens, seed = tree
    if chain:
        parents = list(range(-1, len(parents) - 1))
    tokens = [t % 3 for t in tokens]  # few values: drafts are often right
    rows = np.random.default_rng(seed).normal(size=(len(tokens), 3))
    want = rows.argmax(1).tolist()
    best = max(walk(want, tokens, parents), key=lambda p: (len(p), -p[-1]))
    assert walk_greedy(rows.__getitem__, tokens, parents) == (list(best), want[best[-1]])
    got = ops.accept_greedy(
        torch.from_numpy(rows.astype(np.float32))[None],
        torch.tensor([tokens]),
        torch.tensor([parents], dtype=torch.int32),
    )
    assert (got.path[0, : len(best)].tolist(), int(got.path_lengths[0])) == (list(best), len(best))
    assert int(got.next_token[0]) == want[best[-1]]


def test_greedy_is_not_misled_by_a_repeated_sibling() -> None:
    rows = np.eye(9)[[4, 0, 7, 8]]
    # Two children 4; only the second goes on.
    assert walk_greedy(rows.__getitem__, [1, 4, 4, 7], [-1, 0, 0, 2]) == ([0, 2, 3], 8)
    ties = np.zeros((2, 5))
    assert walk_greedy(ties.__getitem__, [1, 0], [-1, 0]) == ([0, 1], 0)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.5]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
)


class Model:
    """A model whose logits are a fixed function of the last two tokens, float32."""

    def __init__(self, seed: int) -> None:
        self.table = 2 * torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))

    def __call__(self, text: list[int]) -> torch.Tensor:
        return self.table[text[-2], text[-1]]


def decode(
    model: Model, params: SamplingParams, seed: int, prompt: list[int], count: int, propose: Propose
) -> list[int]:
    """A loop over rounds; `propose(text)` returns (parents, tokens) of the drafts."""
    text = list(prompt)
    history = TokenHistory(VOCAB, prompt)
    while len(text) < len(prompt) + count:
        parents, drafts = propose(text)
        above = [-1, *(j + 1 for j in parents)]
        nodes = [text[-1], *drafts]
        paths = [path_to(i, above) for i in range(len(nodes))]
        logits = torch.stack([model([*text, *(nodes[j] for j in p[1:])]) for p in paths])
        proposal = Proposal(Tree(parents), ProposalKind.DETERMINISTIC)
        path, x = decide_round(logits, nodes, proposal, params, history, SeededDecisions(seed, len(text)))
        assert path == path_to(path[-1], above)  # root to node
        new = [*(nodes[j] for j in path[1:]), x]
        for token in new:
            row = process_logits(model(text), params, TokenHistory(VOCAB, prompt, text[len(prompt) :]))
            assert row[token] > 0  # in the target's support
            text.append(token)
        history.extend(new)
    return text[len(prompt) :][:count]


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), PARAMS)
@settings(max_examples=60, deadline=None)
def test_deterministic_drafts_do_not_change_a_seeded_text(
    case: int, seed: int, params: SamplingParams
) -> None:
    model, g = Model(case), np.random.default_rng(case)

    def propose(text: list[int]) -> tuple[list[int], list[int]]:
        n = int(g.integers(0, 8))
        parents = [int(g.integers(-1, j)) for j in range(n)]
        return parents, g.integers(VOCAB, size=n).tolist()

    plain = decode(model, params, seed, [1, 2, 3], 20, lambda text: ([], []))
    assert decode(model, params, seed, [1, 2, 3], 20, propose) == plain


class Drawing(SeededDecisions):
    """A sequence's decisions, and a drafter's draws from another generator."""

    def __init__(self, seed: int, position: int) -> None:
        super().__init__(seed, position)
        self._g = np.random.default_rng([seed, position])

    def draft(self, parent: int, rank: int, q: np.ndarray, elder: Collection[int] | None) -> int:
        weights = np.array(q, np.float64)
        weights[list(elder or ())] = 0.0
        return int(self._g.choice(len(weights), p=weights / weights.sum()))


@given(trees(), PARAMS, st.sampled_from([ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT]), st.data())
@settings(max_examples=150, deadline=None)
def test_drawn_rounds_stay_in_the_support_and_repeat_in_any_order(
    tree: tuple[list[int], list[int], int], params: SamplingParams, kind: ProposalKind, data: st.DataObject
) -> None:
    """That the path runs from the root token to a node is checked by `proposal_round`."""
    parents, _, case = tree
    drafts = [p - 1 for p in parents[1:]]
    names = ["auto", "speculative", "traversal", "typical"] + ["k-seq"] * (kind is ProposalKind.IID)
    rule = data.draw(st.sampled_from(names))
    g = torch.Generator().manual_seed(case)
    models = 2 * torch.randn(3, 2, VOCAB, VOCAB, generator=g)  # float32
    models[models > 3.0] = -torch.inf
    toys = [Toy(target, draft, params) for target, draft in models]

    def run(toy: Toy) -> list[list[int]]:
        rounds, text, emitted = proposal_round(toy, drafts, kind, rule), PROMPT, []
        for _ in range(3):
            emitted.append(rounds(text, Drawing(case, len(text))))
            text = (*text, *emitted[-1])
        return emitted

    first = [run(toy) for toy in toys]
    assert [run(toy) for toy in toys[::-1]][::-1] == first
    for toy, rounds in zip(toys, first, strict=True):
        text = PROMPT
        for emitted in rounds:
            assert 1 <= len(emitted) <= 1 + max(len(path_to(i, parents)) - 1 for i in range(len(parents)))
            for token in emitted:
                assert toy.p(text)[token] > 0
                text = (*text, token)


@given(trees())
@settings(max_examples=100, deadline=None)
def test_temperature_zero_is_greedy_acceptance(tree: tuple[list[int], list[int], int]) -> None:
    parents, tokens, seed = tree
    tokens = [t % 3 for t in tokens]  # few, so that drafts are right and siblings repeat
    model = Model(seed)
    model.table[..., 3:] = -torch.inf
    text = [0, tokens[0]]
    paths = [path_to(i, parents) for i in range(len(tokens))]
    logits = torch.stack([model([*text, *(tokens[j] for j in p[1:])]) for p in paths])
    proposal = Proposal(Tree([p - 1 for p in parents[1:]]), ProposalKind.DETERMINISTIC)
    path, x = decide_round(logits, tokens, proposal, SamplingParams(), None, SeededDecisions(0, 0))
    assert (path, x) == walk_greedy(logits.numpy().__getitem__, tokens, parents)


def test_a_seed_decides_and_every_position_has_its_own_numbers() -> None:
    params = SamplingParams(temperature=1.0)
    flat = torch.zeros(1, 1000)
    at = [
        [
            decide_round(flat, [0], NO_DRAFTS, params, None, SeededDecisions(s, t)).next_token
            for t in range(20)
        ]
        for s in (1, 2)
    ]
    assert at[0] != at[1]
    assert len(set(at[0])) > 15


def test_a_large_vocabulary_decides_as_row_by_row() -> None:
    params, vocab = SamplingParams(temperature=0.7), 9001
    logits = 3 * torch.randn(8, vocab, generator=torch.Generator().manual_seed(9))
    tokens = [0]
    for i in range(8):
        alone = decide_round(
            logits[i : i + 1], [tokens[-1]], NO_DRAFTS, params, None, SeededDecisions(5, 40 + i)
        )
        tokens.append(alone.next_token)
    proposal = Proposal(Tree(list(range(-1, 6))), ProposalKind.DETERMINISTIC)
    assert decide_round(logits, tokens[:8], proposal, params, None, SeededDecisions(5, 40)) == (
        list(range(8)),
        tokens[8],
    )


def test_errors_name_the_argument() -> None:
    logits, params = torch.zeros(3, VOCAB), SamplingParams(temperature=1.0)
    fork, line = Tree([-1, -1]), Tree([-1, 0])
    rows = torch.full((2, VOCAB), 1 / VOCAB)

    def decide(tokens: list[int], proposal: Proposal) -> None:
        decide_round(logits, tokens, proposal, params, None, SeededDecisions(0, 0))

    with pytest.raises(ValueError, match="auto is not exact for a tree drawn without replacement"):
        decide([0, 1, 2], Proposal(fork, ProposalKind.WITHOUT_REPLACEMENT, rows))
    with pytest.raises(ValueError, match=r"draft_probs: got None, want \[R, 9\]"):
        decide([0, 1, 2], Proposal(line, ProposalKind.IID))
    with pytest.raises(
        ValueError, match=r"draft_probs: got \[1, 9\] and rows \[0, 1\], want \[R, 9\] with R > 1"
    ):
        decide([0, 1, 2], Proposal(line, ProposalKind.IID, rows[:1]))
    with pytest.raises(ValueError, match=r"draft 1: got token 9, want a token in \[0, 9\)"):
        decide([0, 1, 9], Proposal(line, ProposalKind.DETERMINISTIC))
    with pytest.raises(ValueError, match="tokens: got 3, want the root token and 0 drafts"):
        decide([0, 1, 2], NO_DRAFTS)
    with pytest.raises(ValueError, match=r"logits: got \(3, 9\), want \[N, V\] for N = 2"):
        decide([0, 1], NO_DRAFTS)
    logits[0, 3] = float("nan")
    with pytest.raises(ValueError, match="logits: the largest of node 0 is nan after edits"):
        decide([0, 1, 2], Proposal(line, ProposalKind.DETERMINISTIC))


DRAWN = {
    ProposalKind.IID: "independently",
    ProposalKind.WITHOUT_REPLACEMENT: "without replacement",
}
EXACT_RULES = {  # name, kind, chain -> the rule; what is missing is an error
    ("auto", "IID", True): AcceptRule.TRAVERSAL,
    ("auto", "IID", False): AcceptRule.TRAVERSAL,
    ("auto", "WITHOUT_REPLACEMENT", True): AcceptRule.TRAVERSAL,
    ("auto", "WITHOUT_REPLACEMENT", False): AcceptRule.TRAVERSAL_WITHOUT_REPLACEMENT,
    ("traversal", "IID", True): AcceptRule.TRAVERSAL,
    ("traversal", "IID", False): AcceptRule.TRAVERSAL,
    ("traversal", "WITHOUT_REPLACEMENT", True): AcceptRule.TRAVERSAL,
    ("traversal", "WITHOUT_REPLACEMENT", False): AcceptRule.TRAVERSAL_WITHOUT_REPLACEMENT,
    ("speculative", "IID", True): AcceptRule.RECURSIVE,
    ("speculative", "IID", False): AcceptRule.RECURSIVE,
    ("speculative", "WITHOUT_REPLACEMENT", True): AcceptRule.RECURSIVE,
    ("speculative", "WITHOUT_REPLACEMENT", False): AcceptRule.RECURSIVE_WITHOUT_REPLACEMENT,
    ("k-seq", "IID", True): AcceptRule.K_SEQ,
    ("k-seq", "IID", False): AcceptRule.K_SEQ,
    ("k-seq", "WITHOUT_REPLACEMENT", True): AcceptRule.K_SEQ,
    ("block", "IID", True): AcceptRule.TRAVERSAL,
    ("block", "WITHOUT_REPLACEMENT", True): AcceptRule.TRAVERSAL,
}


@pytest.mark.parametrize("name", RULES)
def test_pairing_of_rules_and_proposals(name: str) -> None:
    for kind in ProposalKind:
        for chain in (True, False):
            if name == "typical":
                assert resolve_rule(name, kind, chain=chain) == Typical()
            elif kind is ProposalKind.DETERMINISTIC:
                assert resolve_rule(name, kind, chain=chain) is AcceptRule.FOLLOW
            elif (name, kind.name, chain) in EXACT_RULES:
                assert resolve_rule(name, kind, chain=chain) is EXACT_RULES[name, kind.name, chain]
            else:
                with pytest.raises(ValueError, match=f"{name} is not exact for a tree drawn {DRAWN[kind]}"):
                    resolve_rule(name, kind, chain=chain)
    assert RULES[name].lossless == (name != "typical")
    assert ("LOSSY" in RULES[name].description) == (name == "typical")


def test_pairing_looks_at_rows_topology_and_temperature() -> None:
    q = torch.full((4, VOCAB), 1 / VOCAB)
    fork = Tree([-1, -1, 0])
    one_row = Proposal(fork, ProposalKind.IID, q, (2, 2, 0))
    for rows in (None, (0, 1, 2)):
        with pytest.raises(ValueError, match=r"k-seq is not exact .* want siblings drawn from one row"):
            rule_for("k-seq", Proposal(fork, ProposalKind.IID, q[:3], rows))
        for name in ("auto", "speculative", "traversal"):
            with pytest.raises(ValueError, match=f"{name} is not exact .* want siblings that name one row"):
                rule_for(name, Proposal(fork, ProposalKind.WITHOUT_REPLACEMENT, q[:3], rows))
        assert rule_for("speculative", Proposal(fork, ProposalKind.IID, q[:3], rows)) is AcceptRule.RECURSIVE
    assert rule_for("k-seq", one_row) is AcceptRule.K_SEQ
    assert rule_for("auto", one_row) is AcceptRule.TRAVERSAL
    assert rule_for("auto", one_row, greedy=True) is AcceptRule.FOLLOW
    assert rule_for("typical", one_row, greedy=True) == Typical()
    assert rule_for("block", Proposal(Tree([-1, 0]), ProposalKind.IID, q[:2])) is AcceptRule.TRAVERSAL
    assert rule_for("block", NO_DRAFTS) is AcceptRule.FOLLOW
    assert rule_for(Typical(0.5, 0.1), NO_DRAFTS) == Typical(0.5, 0.1)


@pytest.mark.parametrize("rule", ["fastest", "Block", "", None, 3, ["auto"]])
def test_an_unknown_rule_is_named(rule: object) -> None:
    with pytest.raises(ValueError, match=r"acceptance: got .*, want one of auto, speculative, k-seq, block"):
        check_rule(rule)  # type: ignore[arg-type]


def test_typical_acceptance_by_hand() -> None:
    p = np.array([[0.5, 0.5, 0.0], [0.98, 0.02, 0.0], [0.1, 0.1, 0.8], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    tokens, parents = [0, 0, 1, 1, 2], [-1, 0, 0, 1, 2]

    def decide(rule: Typical) -> tuple[list[int], int]:
        return walk_typical(p.__getitem__, tokens, parents, SeededDecisions(0, 0), rule)

    # Row 0 has exp(-H) = 0.5: its floor is min(0.09, 0.15), and both drafts of 0.5 are kept. At node 1 the
    # draft of 0.02 is not, at node 2 that of 0.8 is: the longest path ends at node 4.
    assert decide(Typical()) == ([0, 2, 4], 0)
    assert decide(Typical(epsilon=0.01))[0] == [0, 1, 3]  # of two longest the earlier
    assert decide(Typical(epsilon=0.5, delta=1.0))[0] == [0]  # p > 0.5 is not p >= 0.5
    assert decide(Typical(epsilon=0.0, delta=0.0))[0] == [0, 1, 3]  # whatever has any probability


def test_typical_names_the_wrong_threshold() -> None:
    with pytest.raises(ValueError, match=r"epsilon: got 1.5"):
        Typical(epsilon=1.5)
    with pytest.raises(ValueError, match="delta: got -1"):
        Typical(delta=-1)


def test_docstring_examples() -> None:
    for module in (specdec.acceptance.greedy, specdec.acceptance.rules):
        assert doctest.testmod(module).failed == 0
