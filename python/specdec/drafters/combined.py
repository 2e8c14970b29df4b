"""Two drafters in one tree: what the text repeats, and what a model would say.

Where tokens are drawn at random the model drafts alone, if it draws: drawn tokens share no tree with others,
and to choose between the two by what they bring would be to look at a clock or at other texts, after which no
seed would repeat a text.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor

from specdec._checks import shown
from specdec.acceptance.proposal import ProposalKind
from specdec.drafters.base import Drafter, DraftRequest, Prices
from specdec.drafters.calibration import MOST, RunningRatio, outcomes
from specdec.drafters.proposal import Proposal
from specdec.drafters.stepping import SteppingDrafter
from specdec.drafters.tree import best_first_order, subtree
from specdec.drafters.worth import Worth
from specdec.learned import PerModel
from specdec.models.base import CausalLM
from specdec.models.features import NodeFeatures
from specdec.tree import TokenTree

COVERED = (0.01, 0.3, 0.6, 1.0, 2.0, 4.0)  # tokens that the free drafter brings: where classes begin
BEYOND = (1.0, 0.85, 0.7, 0.5, 0.25, 0.12, 0.06)  # what the other one brings beyond them, by class
WEIGHT = 5.0  # drafts that the drafters' own word counts for, in each case of agreement
MEMORY = 0.99  # of what became of the drafts of a case
RATE_MEMORY = 0.98  # of what follows a class of rounds
RATE_WEIGHT = 8.0  # tokens that the rate of all rounds counts for there

BOTH, FREE_ALONE, FREE_AGAINST, OTHER_ALONE, OTHER_AGAINST = range(5)


class _Agreement:
    """What it says about a draft that the other drafter says the same, something else, or nothing: a factor
    on its chance, learned.
    """

    def __init__(self) -> None:
        self._factors = [RunningRatio(MEMORY, WEIGHT) for _ in range(5)]

    def __call__(self, case: int, chance: float) -> float:
        return min(chance * self._factors[case].value, MOST)

    def observe(self, case: int, chance: float, kept: bool) -> None:
        self._factors[case].observe(kept, chance)


class _Following:
    """How fast tokens come after rounds of each class, without the costly drafter's help in the first.

    What its drafts bring, later rounds need not: where n-grams have nothing to say they mostly have nothing
    in the next round either, so a token is worth more there than at the rate of all rounds.
    """

    def __init__(self) -> None:
        self._tokens = [0.0] * len(BEYOND)
        self._seconds = [0.0] * len(BEYOND)

    def __call__(self, which: int, rate: float) -> float:
        """Tokens a second after a round of this class, where `rate` is that of all rounds."""
        tokens, seconds = self._tokens[which], self._seconds[which]
        return (tokens + RATE_WEIGHT) / (seconds + RATE_WEIGHT / rate)

    def observe(self, which: int, tokens: float, seconds: float) -> None:
        """Books the round after one of this class."""
        self._tokens[which] = RATE_MEMORY * self._tokens[which] + tokens
        self._seconds[which] = RATE_MEMORY * self._seconds[which] + seconds


_LEARNED = PerModel(lambda: (Worth(BEYOND), _Agreement(), _Following()))


@dataclass
class _Row:
    """A sequence's last rounds.

    Attributes:
        before: class of the round before the last, -1 where there was none.
        last: class of the last round.
        tokens: that it emitted.
    """

    before: int = -1
    last: int = -1
    tokens: int = 0


@dataclass(frozen=True)
class _Merged:
    """Two proposals as one, until the round is decided.

    Attributes:
        tree: all nodes of both, best first.
        sources: of each node the node of the free drafter's proposal and of the other's; -1: it has none.
        said: of each node the case of agreement and the chance, given its parent, before it was weighed.
    """

    tree: TokenTree
    sources: list[tuple[int, int]]
    said: list[tuple[int, float]]


class CombinedDrafter:
    """Asks a drafter whose proposals are free, and a costly one where it is expected to bring enough beyond
    them; both trees become one.

    Sampled requests get what `other` draws, or deterministic trees of both, where it does not draw.

    Args:
        free: such as the n-gram drafter; states chances, draws nothing and reads no features.
        other: the costly one.

    Raises:
        TypeError: one of them is something else.
        ValueError: `free` draws at random or reads features.
    """

    def __init__(self, free: Drafter, other: SteppingDrafter) -> None:
        if isinstance(free, type) or not hasattr(free, "propose"):
            raise TypeError(f"free: got {shown(free)}, want a Drafter such as NGramDrafter()")
        if not isinstance(other, SteppingDrafter):
            raise TypeError(f"other: got {shown(other)}, want a SteppingDrafter such as RecurrentDrafter")
        if free.features:
            raise ValueError(f"free: got {free.name}, which reads features, want a drafter that does not")
        if free.draws:
            raise ValueError(f"free: got {free.name}, which draws at random, want a drafter that does not")
        self.name = f"{other.name}+{free.name}"
        self.features = other.features
        self.draws = other.draws
        self._free = free
        self._other = other
        learned = _LEARNED(other.stepped, free.name, other.shape, torch.get_num_threads())
        self._worth, self._agreement, self._following = learned
        self._rows: dict[int, _Row] = {}
        self._start = 0.0  # of the last round
        self._seconds = 0.0  # of the last round, without what a reader of its tokens did after it
        self._merged: dict[int, _Merged] = {}
        self._drawn: set[int] = set()  # slots whose last proposal is the other drafter's alone

    def levels(self, max_nodes: int) -> Sequence[int]:
        """Nodes of a proposal of drawn tokens that is 1, 2, ... tokens deep."""
        return self._other.levels(max_nodes)

    def step_cost(self, target: CausalLM) -> float:
        """That of the other drafter, which draws."""
        return self._other.step_cost(target)

    def begin(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """Both begin."""
        self._free.begin(slot, prompt)
        self._other.begin(slot, prompt, features)

    def end(self, slot: int) -> None:
        """Both end."""
        self._merged.pop(slot, None)
        self._drawn.discard(slot)
        self._rows.pop(slot, None)
        self._free.end(slot)
        self._other.end(slot)

    def observe(
        self, slot: int, path: Sequence[int], tokens: Sequence[int], features: NodeFeatures | None = None
    ) -> None:
        """Tells both, each with its own nodes of the path."""
        row = self._rows.get(slot)
        if row is not None:
            row.tokens = len(tokens)
            self._seconds = perf_counter() - self._start
        merged = self._merged.pop(slot, None)
        if slot in self._drawn:
            self._drawn.discard(slot)
            self._free.observe(slot, (), tokens)
            self._other.observe(slot, path, tokens, features)
            return
        if merged is None:
            self._free.observe(slot, path, tokens)
            self._other.observe(slot, (), tokens, features)
            return
        for node, kept in outcomes(merged.tree, tokens):
            self._agreement.observe(*merged.said[node], kept)
        sources = [merged.sources[node] for node in path]
        self._free.observe(slot, [free for free, _ in sources if free >= 0], tokens)
        self._other.observe(slot, [other for _, other in sources if other >= 0], tokens, features)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """The free drafter's trees, with the other's where that pays.

        Raises:
            ValueError: the free drafter states no chances.
        """
        drawn = [r for r in requests if self.draws and not r.sampling.greedy]
        if drawn:
            return self._with_drawn(requests, drawn)
        free = self._free.propose(requests)
        if any(p.chances is None and len(p.tree) for p in free):
            raise ValueError(f"free: {self._free.name} states no chances, want a drafter that does")
        classes = [bisect(COVERED, sum(p.chances or ())) for p in free]
        requests = self._priced(requests, classes)
        chosen = self._chosen(requests, classes)
        if not any(chosen):
            return free
        asked = [r for r, good in zip(requests, chosen, strict=True) if good]
        found, seconds = self._other.draft(asked)
        start = perf_counter()
        drafted = iter(found)
        proposals, gains = [], []
        for request, proposal, covered, good in zip(requests, free, classes, chosen, strict=True):
            if not good:
                proposals.append(proposal)
                continue
            merged = self._merge(request, proposal, next(drafted))
            proposals.append(merged)
            price = request.prices.node
            gains.append((covered, merged.gain(price) - proposal.gain(price)))
        if asked[0].prices.second > 0.0:
            self._worth.observe(gains, seconds + perf_counter() - start)
        return proposals

    def _with_drawn(self, requests: Sequence[DraftRequest], drawn: Sequence[DraftRequest]) -> list[Proposal]:
        """Of a batch with drawn drafts: those, and the free drafter's for all others. What the two would be
        together is not worth the other drafter's going level by level for all.
        """
        self._drawn = {r.slot for r in drawn}
        self._rows.clear()  # such rounds tell nothing of what follows those of both
        asked = [r for r in drawn if min(r.max_nodes, r.max_depth) > 0]
        found = {}
        if asked:
            proposals, _ = self._other.draft(asked)
            found = dict(zip([r.slot for r in asked], proposals, strict=True))
        others = [r for r in requests if r.slot not in self._drawn]
        found.update(zip([r.slot for r in others], self._free.propose(others), strict=True))
        return [found.get(r.slot) or Proposal.empty() for r in requests]

    def _priced(self, requests: Sequence[DraftRequest], classes: Sequence[int]) -> Sequence[DraftRequest]:
        """The requests at the prices of what follows rounds like this one; books the round before."""
        seconds, self._start = self._seconds, perf_counter()
        for request, which in zip(requests, classes, strict=True):
            row = self._rows.setdefault(request.slot, _Row())
            if row.before >= 0:
                self._following.observe(row.before, row.tokens, seconds / len(requests))
            row.before, row.last, row.tokens = row.last, which, 0
        priced = []
        for request, which in zip(requests, classes, strict=True):
            prices = request.prices
            if prices.second > 0.0:
                rate = prices.second / len(requests)
                factor = self._following(which, rate) / rate
                prices = Prices(prices.node * factor, prices.second * factor)
            priced.append(replace(request, prices=prices))
        return priced

    def _chosen(self, requests: Sequence[DraftRequest], classes: Sequence[int]) -> list[bool]:
        """Which sequences the other drafter is asked for."""
        wanting = [i for i, r in enumerate(requests) if min(r.max_nodes, r.max_depth) > 0]
        chosen = [False] * len(requests)
        if wanting:
            prices = [requests[i].prices.second for i in wanting]
            good = (
                self._worth.choose([classes[i] for i in wanting], prices)
                if min(prices) > 0.0
                else [True] * len(wanting)
            )
            for i, asks in zip(wanting, good, strict=True):
                chosen[i] = asks
        return chosen

    def _merge(self, request: DraftRequest, free: Proposal, other: Proposal) -> Proposal:
        """Both trees as one, nodes of the same path once."""
        nodes: dict[tuple[int, int], int] = {}  # by parent and token
        tokens: list[int] = []
        parents: list[int] = []
        sources: list[list[int]] = []
        hopes: list[list[float]] = []  # the chance that each drafter gives a node, given its parent
        speaks: list[set[int]] = [set(), set()]  # nodes after which each drafter proposes something
        for which, proposal in enumerate((free, other)):
            chances = proposal.chances or ()
            places = {-1: -1}
            tree = proposal.tree
            for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
                above = places[parent]
                place = nodes.setdefault((above, token), len(tokens))
                if place == len(tokens):
                    tokens.append(token)
                    parents.append(above)
                    sources.append([-1, -1])
                    hopes.append([0.0, 0.0])
                sources[place][which] = node
                before = 1.0 if parent < 0 else chances[parent]
                hopes[place][which] = chances[node] / before if before > 0.0 else 0.0
                speaks[which].add(above)
                places[node] = place
        said: list[tuple[int, float]] = []
        total: list[float] = []
        for (in_free, in_other), parent, hope in zip(sources, parents, hopes, strict=True):
            if in_free >= 0 and in_other >= 0:
                case = BOTH
            elif in_free >= 0:
                case = FREE_AGAINST if parent in speaks[1] else FREE_ALONE
            else:
                case = OTHER_AGAINST if parent in speaks[0] else OTHER_ALONE
            said.append((case, max(hope)))
            total.append((total[parent] if parent >= 0 else 1.0) * self._agreement(case, max(hope)))
        order = best_first_order(total)[: request.max_nodes]
        merged = subtree(tokens, parents, order, root=-1)
        self._merged[request.slot] = _Merged(
            merged,
            [(sources[node][0], sources[node][1]) for node in order],
            [said[node] for node in order],
        )
        if not order:
            return Proposal.empty()
        return Proposal(merged, ProposalKind.DETERMINISTIC, chances=tuple([total[node] for node in order]))
