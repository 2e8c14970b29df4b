"""The suffix automaton and the n-gram drafter against searches written out naively."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec._host import SuffixAutomaton
from specdec.drafters import DraftRequest, NGramDrafter, Proposal, ProposalKind
from specdec.tree import TokenTree

seeded = settings(deadline=None, derandomize=True)

texts = st.one_of(
    st.lists(st.integers(0, 1), max_size=60),
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.sampled_from([0, 7, 151_000, 2**31 - 1]), max_size=40),
    # Periods, broken once: long matches and overlapping occurrences.
    st.builds(
        lambda period, count, noise: [*(period * count), *noise, *(period * count)],
        st.lists(st.integers(0, 2), min_size=1, max_size=4),
        st.integers(1, 8),
        st.lists(st.integers(0, 2), max_size=2),
    ),
)


def earlier_ends(text: Sequence[int], suffix: Sequence[int]) -> list[int]:
    """Where `suffix` ends in `text` before the last position, most recent first."""
    n = len(suffix)
    return [e for e in range(len(text) - 2, n - 2, -1) if list(text[e - n + 1 : e + 1]) == list(suffix)]


def longest_match(text: Sequence[int], max_match: int) -> tuple[int, int]:
    for length in range(min(max_match, len(text) - 1), 0, -1):
        ends = earlier_ends(text, text[-length:])
        if ends:
            return length, ends[0]
    return 0, -1


def continuation(text: Sequence[int], start: int, depth: int) -> list[int]:
    grown = list(text)
    for i in range(depth):
        grown.append(grown[start + i])  # may read what it has just written: the text goes on as a period
    return grown[len(text) :]


def naive_paths(
    text: Sequence[int], min_match: int, max_match: int, depth: int, branches: int
) -> list[list[int]]:
    """At each matching suffix, longest first, the latest continuation of each token that followed it."""
    paths: list[list[int]] = []
    prefixes: set[tuple[int, ...]] = set()
    for length in range(longest_match(text, max_match)[0], min_match - 1, -1):
        followers: set[int] = set()
        for end in earlier_ends(text, text[-length:]):
            if text[end + 1] in followers or len(paths) == branches:
                continue
            followers.add(text[end + 1])
            path = continuation(text, end + 1, depth)
            if tuple(path) not in prefixes:
                paths.append(path)
                prefixes.update(tuple(path[:i]) for i in range(1, depth + 1))
    return paths


def automaton_of(text: Sequence[int], max_match: int) -> SuffixAutomaton:
    automaton = SuffixAutomaton(max_match)
    automaton.extend(text)
    return automaton


@seeded
@given(texts, st.integers(1, 12))
def test_longest_match_after_every_token(text: list[int], max_match: int) -> None:
    automaton = SuffixAutomaton(max_match)
    assert automaton.match() == (0, -1)
    for i, token in enumerate(text):
        automaton.extend([token])
        assert len(automaton) == i + 1
        assert automaton.match() == longest_match(text[: i + 1], max_match)


@seeded
@given(texts, st.integers(1, 5), st.integers(1, 8), st.integers(1, 10))
def test_first_path_continues_the_latest_longest_match(
    text: list[int], min_match: int, max_match: int, depth: int
) -> None:
    tokens, parents, length = automaton_of(text, max_match).propose(min_match, 256, depth, 1)
    expected, end = longest_match(text, max_match)
    assert parents is None
    assert length == expected
    assert list(tokens) == (continuation(text, end + 1, depth) if expected >= min_match else [])


@seeded
@given(texts, st.integers(1, 3), st.integers(1, 8), st.integers(1, 6), st.integers(2, 6), st.integers(0, 40))
def test_branches_merge_into_a_tree(
    text: list[int], min_match: int, max_match: int, depth: int, branches: int, nodes: int
) -> None:
    tokens, parents, _ = automaton_of(text, max_match).propose(min_match, nodes, depth, branches)
    tree = TokenTree(tokens, parents)
    paths = naive_paths(text, min_match, max_match, depth, branches)
    assert tree == TokenTree.from_paths(paths).truncate(nodes)
    assert len(tree.leaves) <= branches
    assert (parents is None) == tree.is_chain


@seeded
@given(texts, texts, st.lists(st.integers(1, 9), max_size=20), st.integers(1, 6))
def test_chunking_and_clearing_change_nothing(
    text: list[int], before: list[int], chunks: list[int], max_match: int
) -> None:
    chunked = automaton_of(before, max_match)
    chunked.clear()
    assert (len(chunked), chunked.match()) == (0, (0, -1))
    at = 0
    for chunk in [*chunks, len(text)]:
        chunked.extend(text[at : at + chunk])
        at += chunk
    whole = automaton_of(text, max_match)
    assert chunked.match() == whole.match()
    assert chunked.propose(1, 64, 8, 4) == whole.propose(1, 64, 8, 4)


@settings(seeded, max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from([2, 50, 150_000]))
def test_long_texts(seed: int, vocab: int) -> None:
    draw = random.Random(seed)
    text = [draw.randrange(vocab) for _ in range(400)]
    for _ in range(6):  # copies of earlier pieces
        start = draw.randrange(len(text))
        text += text[start : start + draw.randrange(1, 80)]
    assert automaton_of(text, 32).match() == longest_match(text, 32)
    tokens, parents, _ = automaton_of(text, 32).propose(1, 256, 8, 4)
    assert TokenTree(tokens, parents) == TokenTree.from_paths(naive_paths(text, 1, 32, 8, 4))


@pytest.mark.parametrize("kind", ["random", "constant", "fibonacci", "code-like"])
def test_memory_is_linear(kind: str) -> None:
    n = 40_000
    draw = random.Random(1)
    if kind == "random":
        text = [draw.randrange(150_000) for _ in range(n)]
    elif kind == "constant":
        text = [3] * n
    elif kind == "fibonacci":  # many states
        a, b = [0], [0, 1]
        while len(b) < n:
            a, b = b, b + a
        text = b[:n]
    else:
        text = [min(int(draw.paretovariate(0.6)), 30_000) for _ in range(n)]
    # At most 2n states of 16 bytes, 3n transitions of 16 and, half full after a doubling, 4 * 3n slots of 4;
    # a vector's capacity is at most twice its size. A row of 150k entries a state would be thousands of times
    # that.
    bound = 2 * (2 * 16 + 3 * 16 + 4) + 4 * 3 * 4
    automaton = automaton_of(text, 32)
    assert automaton.memory() < bound * n + 4096
    half = automaton_of(text[: n // 2], 32)
    assert automaton.memory() <= 2.5 * half.memory() + 4096


def drafter_with(prompt: Sequence[int], **options: int) -> NGramDrafter:
    drafter = NGramDrafter(**options)
    drafter.begin(0, prompt)
    return drafter


def propose(drafter: NGramDrafter, nodes: int = 8, depth: int = 8) -> Proposal:
    return drafter.propose([DraftRequest(0, nodes, depth, None)])[0]


def test_proposes_what_followed_and_states_the_match() -> None:
    proposal = propose(drafter_with([1, 2, 3, 4, 5, 9, 2, 3]), depth=3)
    assert proposal.tree == TokenTree([4, 5, 9])
    assert proposal.kind is ProposalKind.DETERMINISTIC
    assert proposal.draft_probs is None
    assert proposal.chances == pytest.approx((0.5, 0.3, 0.21))  # of matches of 2, 3 and 4 tokens


def test_chances_are_learned_from_what_comes_out_verified_or_not() -> None:
    drafter = drafter_with([1, 2, 3, 4, 1, 2])
    before = propose(drafter).chances
    drafter.observe(0, (), [3, 4, 1, 2])  # right, although nothing was accepted
    after = propose(drafter).chances
    assert before is not None
    assert after is not None
    assert after[0] > before[0]
    drafter.observe(0, (), [9])
    drafter.observe(0, (), [1, 2])
    wrong = propose(drafter).chances
    assert wrong is not None
    assert wrong[0] < after[0]


def test_proposes_nothing_without_a_match() -> None:
    assert propose(drafter_with([])) is Proposal.empty()
    assert propose(drafter_with([1, 2, 3, 4])) is Proposal.empty()
    assert propose(drafter_with([1, 2, 3, 9, 3])) is Proposal.empty()  # one token matches, two are wanted
    assert propose(drafter_with([1, 2, 1, 2]), nodes=0) is Proposal.empty()
    assert propose(drafter_with([1, 2, 1, 2]), depth=0) is Proposal.empty()
    assert len(propose(drafter_with([1, 2, 3, 9, 3], min_match=1)).tree) == 8


def test_shorter_suffixes_add_branches() -> None:
    # After (2, 3) came 4; after 3 alone came 7 most recently.
    prompt = [2, 3, 4, 8, 3, 7, 6, 2, 3]
    proposal = propose(drafter_with(prompt, min_match=1, branches=2), depth=2)
    assert proposal.tree == TokenTree.from_paths([[4, 8], [7, 6]])
    assert propose(drafter_with(prompt, min_match=1, branches=2), nodes=3, depth=2).tree == TokenTree(
        [4, 8, 7], [-1, 0, -1]
    )


def test_slots_are_independent_and_follow_what_is_emitted() -> None:
    drafter = NGramDrafter()
    drafter.begin(0, [1, 2, 3, 4])
    drafter.begin(5, [6, 7, 8, 9])
    drafter.observe(5, (), [6])
    drafter.observe(5, (), [7])
    drafter.observe(0, (), [1, 2])
    five, zero = drafter.propose([DraftRequest(5, 2, 8, None), DraftRequest(0, 8, 1, None)])
    assert five.tree == TokenTree([8, 9])
    assert zero.tree == TokenTree([3])
    drafter.begin(5, [1, 1])  # the slot's next sequence
    assert drafter.propose([DraftRequest(5, 2, 2, None)]) == [Proposal.empty()]
    drafter.end(5)
    drafter.end(5)
    with pytest.raises(ValueError, match=r"slot: got 5, want a slot in which a sequence began \(\[0\]\)"):
        drafter.propose([DraftRequest(5, 2, 2, None)])
    with pytest.raises(ValueError, match="slot: got 5"):
        drafter.observe(5, (), [1])


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="min_match: got 0, want an integer, from 1"):
        NGramDrafter(min_match=0)
    with pytest.raises(ValueError, match=r"max_match: got 2, want an integer, from 3"):
        NGramDrafter(min_match=3, max_match=2)
    with pytest.raises(ValueError, match="branches: got 0"):
        NGramDrafter(branches=0)
    with pytest.raises(ValueError, match="max_match is 0"):
        SuffixAutomaton(0)
    automaton = automaton_of([1, 2], 4)
    with pytest.raises(ValueError, match=r"tokens\[1\] is -5, want a token id"):
        automaton.extend([3, -5])
    assert len(automaton) == 2  # nothing of the bad chunk was taken
