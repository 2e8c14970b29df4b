"""Acceptance of single rounds: greedy walks, properties of sampled ones, errors."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec.acceptance.greedy
import specdec.acceptance.rules
from lossless.toys import Kind, Proposal, Tree
from specdec.acceptance import (
    SamplingParams,
    TokenHistory,
    accept_greedy,
    accept_sampled,
    process_logits,
)

VOCAB = 9

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


@given(st.lists(trees(), min_size=1, max_size=4), st.booleans())
@settings(max_examples=150, deadline=None)
def test_greedy_takes_the_deepest_accepted_path(
    batch: list[tuple[list[int], list[int], int]], chains: bool
) -> None:
    width = max(len(t[0]) for t in batch) + 1
    g = np.random.default_rng(batch[0][2])
    want = g.integers(3, size=(len(batch), width))  # few values: drafts are often right
    have = g.integers(3, size=(len(batch), width))
    above = g.integers(-5, 99, size=(len(batch), width))  # poison beyond the lengths
    sizes = [len(t[0]) for t in batch]
    sizes[-1] *= int(g.integers(2))
    for b, (parents, _, _) in enumerate(batch):
        above[b, : len(parents)] = np.arange(-1, len(parents) - 1) if chains else parents
    path, lengths, after = accept_greedy(
        torch.from_numpy(want),
        torch.from_numpy(have),
        None if chains else torch.from_numpy(above),
        torch.tensor(sizes, dtype=torch.int32),
    )
    assert (path.dtype, lengths.dtype, after.dtype) == (torch.int32, torch.int32, torch.int64)
    assert path.shape[1] == max(1, int(lengths.max()))
    for b, size in enumerate(sizes):
        if size == 0:
            assert lengths[b] == 0
            assert after[b] == 0
            assert not path[b].any()
            continue
        accepted = walk(want[b].tolist(), have[b, :size].tolist(), above[b, :size].tolist())
        best = max(accepted, key=lambda p: (len(p), [-j for j in p[-1:]]))
        assert tuple(path[b, : lengths[b]].tolist()) == best
        assert not path[b, lengths[b] :].any()
        assert after[b] == want[b, best[-1]]


def test_greedy_takes_strided_inputs_and_an_empty_batch() -> None:
    wide = torch.tensor([[5, 0, 6, 0, 7, 0], [1, 0, 2, 0, 3, 0]])
    tokens = torch.tensor([[9, 5, 6], [9, 4, 2]]).t().contiguous().t()
    path, lengths, after = accept_greedy(wide[:, ::2], tokens, None, torch.tensor([3, 3]))
    assert (path.tolist(), lengths.tolist(), after.tolist()) == ([[0, 1, 2], [0, 0, 0]], [3, 1], [7, 1])
    none = torch.empty(0, 3, dtype=torch.int64)
    for parents in (None, none):
        path, lengths, after = accept_greedy(none, none, parents, torch.empty(0, dtype=torch.int64))
        assert (path.shape, lengths.shape, after.shape) == ((0, 1), (0,), (0,))


def test_greedy_is_not_misled_by_a_repeated_sibling() -> None:
    want = torch.tensor([[4, 0, 7, 8]])
    tokens = torch.tensor([[1, 4, 4, 7]])  # two children 4; only the second goes on
    path, lengths, after = accept_greedy(want, tokens, torch.tensor([[-1, 0, 0, 2]]), torch.tensor([4]))
    assert (path.tolist(), lengths.tolist(), after.tolist()) == ([[0, 2, 3]], [3], [8])


def test_greedy_names_the_wrong_argument() -> None:
    a, size = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3, 3])
    with pytest.raises(ValueError, match=r"tokens: got \(2, 2\)"):
        accept_greedy(a, a[:, :2], None, size)
    with pytest.raises(ValueError, match=r"parents: got \(1, 3\)"):
        accept_greedy(a, a, a[:1], size)
    with pytest.raises(ValueError, match=r"lengths: got \(1,\), want \[2\]"):
        accept_greedy(a, a, None, size[:1])


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


def path_to(node: int, parents: list[int]) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


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
        proposal = Proposal(Tree(parents), Kind.DETERMINISTIC)
        path, x = accept_sampled(logits, nodes, proposal, params, history, seed, len(text))
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


@given(st.integers(0, 2**32 - 1), PARAMS, st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_chain_rounds_stay_in_the_support_and_repeat_in_any_order(
    case: int, params: SamplingParams, n: int
) -> None:
    g = torch.Generator().manual_seed(case)
    rounds = []
    for b in range(4):
        history = TokenHistory(VOCAB, [0, b])
        logits, draft_logits = 2 * torch.randn(2, n + 1, VOCAB, generator=g)
        drafts: list[int] = []
        rows = []
        for i in range(n):
            q = process_logits(draft_logits[i], params, history.with_path(drafts))
            drafts.append(int(torch.multinomial(q, 1, generator=g)))
            rows.append(q)
        proposal = Proposal(Tree(list(range(-1, n - 1))), Kind.IID, torch.stack(rows))
        rounds.append((logits, [b, *drafts], proposal, params, history, 1000 + b, 2))
    first = [accept_sampled(*r) for r in rounds]
    assert [accept_sampled(*r) for r in rounds[::-1]][::-1] == first
    for (logits, tokens, *_, history, _, _), (path, x) in zip(rounds, first, strict=True):
        assert path == list(range(len(path)))
        for i, token in enumerate([*tokens[1 : len(path)], x]):
            row = process_logits(logits[i], params, history.with_path(tokens[1 : i + 1]))
            assert row[token] > 0


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
    proposal = Proposal(Tree([p - 1 for p in parents[1:]]), Kind.DETERMINISTIC)
    path, x = accept_sampled(logits, tokens, proposal, SamplingParams(), None, 0, 0)
    one = [torch.tensor([row]) for row in (tokens, parents)]
    row = accept_greedy(logits.argmax(-1)[None], *one, torch.tensor([len(tokens)]))
    assert (path, x) == (row[0][0].tolist(), int(row[2]))


def test_a_seed_decides_and_every_position_has_its_own_numbers() -> None:
    params = SamplingParams(temperature=1.0)
    flat = torch.zeros(1, 1000)
    at = [[accept_sampled(flat, [0], None, params, None, s, t).next_token for t in range(20)] for s in (1, 2)]
    assert at[0] != at[1]
    assert len(set(at[0])) > 15


def test_a_large_vocabulary_decides_as_row_by_row() -> None:
    params, vocab = SamplingParams(temperature=0.7), 9001  # target rows are made a few at a time
    logits = 3 * torch.randn(8, vocab, generator=torch.Generator().manual_seed(9))
    tokens = [0]
    for i in range(8):
        alone = accept_sampled(logits[i : i + 1], [tokens[-1]], None, params, None, 5, 40 + i)
        tokens.append(alone.next_token)
    proposal = Proposal(Tree(list(range(-1, 6))), Kind.DETERMINISTIC)
    assert accept_sampled(logits, tokens[:8], proposal, params, None, 5, 40) == (list(range(8)), tokens[8])


def test_errors_name_the_argument() -> None:
    logits, params = torch.zeros(3, VOCAB), SamplingParams(temperature=1.0)
    fork, line = Tree([-1, -1]), Tree([-1, 0])
    rows = torch.full((2, VOCAB), 1 / VOCAB)

    def decide(tokens: list[int], proposal: Proposal | None) -> None:
        accept_sampled(logits, tokens, proposal, params, None, 0, 0)

    with pytest.raises(ValueError, match="speculative is not exact for a tree of kind WITHOUT_REPLACEMENT"):
        decide([0, 1, 2], Proposal(fork, Kind.WITHOUT_REPLACEMENT, rows))
    with pytest.raises(ValueError, match=r"draft_probs: got None, want \[R, 9\]"):
        decide([0, 1, 2], Proposal(line, Kind.IID))
    with pytest.raises(
        ValueError, match=r"draft_probs: got \[1, 9\] and rows \[0, 1\], want \[R, 9\] with R > 1"
    ):
        decide([0, 1, 2], Proposal(line, Kind.IID, rows[:1]))
    with pytest.raises(ValueError, match=r"draft 1: got token 9, want a token in \[0, 9\)"):
        decide([0, 1, 9], Proposal(line, Kind.DETERMINISTIC))
    with pytest.raises(ValueError, match="tokens: got 3, want the root token and 0 drafts"):
        decide([0, 1, 2], None)
    with pytest.raises(ValueError, match=r"logits: got \(3, 9\), want \[N, V\] for N = 2"):
        decide([0, 1], None)
    logits[0, 3] = float("nan")
    with pytest.raises(ValueError, match="positive finite sum"):
        decide([0, 1, 2], Proposal(line, Kind.DETERMINISTIC))


def test_docstring_examples() -> None:
    for module in (specdec.acceptance.greedy, specdec.acceptance.rules):
        assert doctest.testmod(module).failed == 0
