"""What the loop asks of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from specdec.acceptance.history import TokenHistory
from specdec.acceptance.params import SamplingParams
from specdec.drafters.proposal import Proposal
from specdec.models.base import CausalLM
from specdec.models.features import Feature, NodeFeatures

GREEDY = SamplingParams()


class Prices(NamedTuple):
    """What drafts must bring.

    Attributes:
        node: tokens that a verified node of one sequence must bring.
        second: tokens that a second of drafting must bring, all sequences together. 0 says that there are no
            prices, whatever `node` is: all that is allowed is drafted.
    """

    node: float = 0.0
    second: float = 0.0


FREE = Prices()


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Asks for one sequence's drafts.

    Attributes:
        slot: the sequence.
        max_nodes: most nodes of the proposal; 0 asks for none.
        max_depth: most nodes of a path.
        sampling: how the target chooses; a drafter that draws processes its logits in the same way.
        seed: the sequence's seed.
        position: index in the sequence, prompt included, of the first token to draft. All draws of the round
            take numbers of this position, told apart by the node.
        history: the sequence's tokens, where its sampling depends on them (`contextual`). It grows.
        prices: what drafts must bring. They come from measured times, except where drafts are drawn at
            random: there they are 0, which drafts whatever is allowed.
    """

    slot: int
    max_nodes: int
    max_depth: int
    sampling: SamplingParams = GREEDY
    seed: int = 0
    position: int = 0
    history: TokenHistory | None = None
    prices: Prices = FREE


class Drafter(Protocol):
    """Proposes tokens for sequences that live in slots.

    A slot's calls come in this order: `begin`; `observe` with the first emitted token; then for every round
    `propose` (where the loop drafts in that round) and `observe`; `end`. No slot begins or ends between a
    `propose` and the `observe` of its slots.
    """

    @property
    def name(self) -> str:
        """How the command line and the statistics call it."""

    @property
    def draws(self) -> bool:
        """Whether it draws tokens at random for sampled requests. It is a `DrawingDrafter` then."""

    @property
    def features(self) -> Sequence[Feature]:
        """What it wants to see of the target; () for nothing."""

    def begin(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """A sequence with this prompt was admitted into the slot, and its prompt was prefilled.

        Args:
            slot: the sequence.
            prompt: [T] token ids.
            features: [T, F] what the target offers after each of them; None where nothing is wanted.
        """

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One proposal for each request, in order and within its limits; `Proposal.empty()` for none."""

    def observe(
        self, slot: int, path: Sequence[int], tokens: Sequence[int], features: NodeFeatures | None = None
    ) -> None:
        """What became of a round, or of some rounds in which no drafts were asked for.

        Args:
            slot: the sequence.
            path: accepted nodes of the drafter's own proposal, root to leaf. () after the prefill.
            tokens: [m] all tokens that were emitted: the accepted ones and the target's own; after the
                prefill the first token.
            features: of m nodes, what the target offers after the node that each token came after: the last
                emitted token, then the accepted ones. None where nothing is wanted.
        """

    def end(self, slot: int) -> None:
        """The sequence left the slot. Also called where `begin` was not reached, and then does nothing."""


class DrawingDrafter(Drafter, Protocol):
    """A drafter that draws at random: how much it drafts for a sampled request may not depend on a clock."""

    def levels(self, max_nodes: int) -> Sequence[int]:
        """Nodes of a proposal that is 1, 2, ... tokens deep, as far as `max_nodes` go."""

    def step_cost(self, target: CausalLM) -> float | None:
        """What drafting one level costs, as a part of a decode step of the target; a constant, not a time.
        None says that the drafter knows by itself whether to draft, and is granted all levels.
        """
