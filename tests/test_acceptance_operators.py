"""The operators against the rules that the proofs run: decision by decision, and the law of what they emit.

The rules get the rows that the operators make (`sampling_probs`), in float64; operators and rules then differ
in the order of sums alone, which no decision of these fixed seeds hangs on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from lossless.statistics import ALPHA, chi_square
from specdec import ops
from specdec.acceptance import SamplingParams, SeededDecisions
from specdec.acceptance.round import walk
from specdec.acceptance.walking import children_of
from specdec.ops.acceptance import AcceptRule

DRAWN = sorted(set(AcceptRule) - {AcceptRule.FOLLOW})
WITHOUT_REPLACEMENT = (AcceptRule.RECURSIVE_WITHOUT_REPLACEMENT, AcceptRule.TRAVERSAL_WITHOUT_REPLACEMENT)
TREES = {
    "empty": [-1],
    "chain": [-1, 0, 1, 2, 3],
    "star": [-1, 0, 0, 0, 0],
    "binary": [-1, 0, 0, 1, 1, 2, 2],
    "ragged": [-1, 0, 1, 0, 2, 3, 3, 3],
    "another order": [-1, 0, 0, 2, 1, 2],
}


def int64(values: Sequence[int]) -> torch.Tensor:
    """The bits of unsigned numbers."""
    return torch.from_numpy(np.array(values, np.uint64).view(np.int64))


class Drafter:
    """Draws a batch of trees of one shape from order-1 logits, level by level, with the operators."""

    def __init__(self, logits: torch.Tensor, settings: dict[str, torch.Tensor], replacement: bool) -> None:
        self._logits, self._settings, self._replacement = logits, settings, replacement  # [V, V], of B rows

    def draw(
        self, root: torch.Tensor, parents: Sequence[int], seeds: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens int64 [B, N], rows that they were drawn from [B * N, V], and which, int32 [B, N]."""
        batch, nodes = len(root), len(parents)
        tokens = torch.zeros(batch, nodes, dtype=torch.int64)
        tokens[:, 0] = root
        probs = torch.full((nodes, batch, self._logits.shape[1]), float("nan"))  # by parent
        for parent, below in enumerate(children_of(parents)):
            if below:
                probs[parent] = q = ops.sampling_probs(self._logits[tokens[:, parent]], **self._settings)
                node = torch.full((batch,), parent, dtype=torch.int32)
                drawn = ops.draw_tokens(
                    q,
                    len(below),
                    replacement=self._replacement,
                    seeds=seeds,
                    positions=positions,
                    nodes=node,
                )
                tokens[:, below] = drawn.clamp(min=0)  # none left: a draft of probability zero
        rows = torch.tensor([max(p, 0) for p in parents])[None] * batch + torch.arange(batch)[:, None]
        return tokens, probs.flatten(0, 1), rows.to(torch.int32)


SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=1.4, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.2),
]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("rule", DRAWN)
def test_operators_decide_as_the_rules(rule: AcceptRule, tree: str) -> None:
    batch, vocab, parents = 60, 37, TREES[tree]
    g = torch.Generator().manual_seed(100 * rule + len(parents))
    target, draft = 1.5 * torch.randn(2, vocab, vocab, generator=g)
    target[torch.rand(vocab, vocab, generator=g) < 0.2] = -torch.inf
    params = [SETTINGS[b % len(SETTINGS)] for b in range(batch)]
    settings = {
        "temperature": torch.tensor([p.temperature for p in params]),
        "top_k": torch.tensor([p.top_k for p in params], dtype=torch.int32),
        "top_p": torch.tensor([p.top_p for p in params]),
        "min_p": torch.tensor([p.min_p for p in params]),
    }
    seeds = [2**64 - 1 - b for b in range(batch)]
    positions = torch.arange(batch) * 3
    root = torch.arange(batch) % vocab
    independent = rule not in WITHOUT_REPLACEMENT
    tokens, probs, rows = Drafter(draft, settings, independent).draw(root, parents, int64(seeds), positions)
    logits = target[tokens]  # [B, N, V]
    got = ops.accept_sampled(
        logits,
        tokens,
        torch.tensor([parents] * batch, dtype=torch.int32),
        rules=torch.full((batch,), int(rule), dtype=torch.int32),
        seeds=int64(seeds),
        positions=positions,
        draft_probs=probs,
        draft_rows=rows,
        **settings,
    )
    some = torch.randperm(batch, generator=g)[: batch // 2]  # in another order, without the others
    again = ops.accept_sampled(
        logits[some],
        tokens[some],
        torch.tensor([parents] * len(some), dtype=torch.int32),
        rules=torch.full((len(some),), int(rule), dtype=torch.int32),
        seeds=int64(seeds)[some],
        positions=positions[some],
        draft_probs=probs,
        draft_rows=rows[some],
        **{name: value[some] for name, value in settings.items()},
    )
    assert all(torch.equal(ours[some], theirs) for ours, theirs in zip(got, again, strict=True))
    lengths = set()
    for b in range(batch):
        every = {name: value[b : b + 1].expand(len(parents)).contiguous() for name, value in settings.items()}
        p = ops.sampling_probs(logits[b], **every).double().numpy()
        q = probs[rows[b].long()].double().numpy()
        decide = SeededDecisions(seeds[b], int(positions[b]))
        path, x = walk(rule, p.__getitem__, q.__getitem__, tokens[b].tolist(), parents, decide)
        length = int(got.path_lengths[b])
        assert (got.path[b, :length].tolist(), int(got.next_token[b])) == (path, x)
        lengths.add(length)
    assert tree == "empty" or len(lengths) > 1


def emitted(
    path: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, after: torch.Tensor
) -> np.ndarray:
    """int64 [B, 2], the first two tokens of each row's round; -1 where it has one."""
    one = torch.where(lengths > 1, tokens.gather(1, path[:, 1:2].long())[:, 0], after)
    third = path[:, 2:3].long() if path.shape[1] > 2 else torch.zeros(len(path), 1, dtype=torch.int64)
    two = torch.where(lengths > 2, tokens.gather(1, third)[:, 0], torch.where(lengths > 1, after, -1))
    return torch.stack([one, two], 1).numpy()


def sampled_round(
    target: torch.Tensor,
    drafter: Drafter,
    rule: AcceptRule,
    parents: list[int],
    root: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> np.ndarray:
    """What one round emits after each root token [B], by the operator; `target` is logits by token [V, V]."""
    batch = len(root)
    tokens, probs, rows = drafter.draw(root, parents, seeds, positions)
    got = ops.accept_sampled(
        target[tokens],
        tokens,
        torch.tensor([parents], dtype=torch.int32).repeat(batch, 1),
        rules=torch.full((batch,), int(rule), dtype=torch.int32),
        seeds=seeds,
        positions=positions,
        draft_probs=probs,
        draft_rows=rows,
    )
    return emitted(got.path, got.path_lengths, tokens, got.next_token)


@pytest.mark.parametrize(
    ("rule", "tree"),
    [(rule, tree) for rule in DRAWN for tree in ("binary", "ragged")]
    + [(AcceptRule.RECURSIVE, "chain"), (AcceptRule.TRAVERSAL, "chain")],
)
def test_pairs_from_the_operators_have_the_law(rule: AcceptRule, tree: str) -> None:
    """100,000 seeds in one batch; a second round where the first emitted one token."""
    batch, vocab, parents = 100_000, 4, TREES[tree]
    g = torch.Generator().manual_seed(5)
    target, draft = torch.randn(2, vocab, vocab, generator=g)
    drafter = Drafter(draft, {}, rule not in WITHOUT_REPLACEMENT)
    seeds = torch.arange(batch)

    def one_round(root: torch.Tensor, position: int) -> np.ndarray:
        positions = torch.full((batch,), position)
        return sampled_round(target, drafter, rule, parents, root, seeds, positions)

    texts = one_round(torch.zeros(batch, dtype=torch.int64), 3)
    again = one_round(torch.from_numpy(texts[:, 0]), 4)
    texts[:, 1] = np.where(texts[:, 1] < 0, again[:, 0], texts[:, 1])
    p = torch.softmax(target.double(), -1).numpy()
    assert chi_square(texts, p[0][:, None] * p) > ALPHA


def test_pairs_detect_a_rule_for_another_kind() -> None:
    batch, vocab, parents = 30_000, 4, TREES["star"]
    g = torch.Generator().manual_seed(5)
    target, draft = torch.randn(2, vocab, vocab, generator=g)
    seeds, positions = torch.arange(batch), torch.zeros(batch, dtype=torch.int64)
    root = torch.arange(batch) % vocab
    law = torch.softmax(target.double(), -1).numpy() / vocab
    for rule in DRAWN:
        # Siblings that are drawn as the rule does not expect it.
        drafter = Drafter(draft, {}, replacement=rule in WITHOUT_REPLACEMENT)
        first = sampled_round(target, drafter, rule, parents, root, seeds, positions)[:, :1]
        assert chi_square(np.hstack([root.numpy()[:, None], first]), law) < 1e-9
