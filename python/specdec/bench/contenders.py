"""What is compared: a method with its drafter, or the reference model in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import torch

from specdec.acceptance.params import SamplingParams
from specdec.generation import Request, Statistics
from specdec.loop import Loop
from specdec.methods import DrafterSpec, MethodOptions, build_drafter, get_method
from specdec.models.base import CausalLM
from specdec.models.reference import ReferenceGatedDeltaNet, ReferenceState

if TYPE_CHECKING:
    from specdec.methods.building import DrafterModel

Tokens = Sequence[Sequence[int]]  # one sequence of token ids a row

BASELINE = "autoregressive"
REFERENCE = "reference"


@dataclass(frozen=True)
class Run:
    """One timed run over a batch.

    Attributes:
        tokens: emitted tokens of each row, the first, which comes from the prefill, included.
        seconds: wall time without the prefill.
        emitted: tokens that came in this time.
        rounds: verification rounds, counted per row.
        drafted: draft tokens verified.
        accepted: draft tokens accepted.
        statistics: the loop's own; None where there was none.
    """

    tokens: list[list[int]]
    seconds: float
    emitted: int
    rounds: int
    drafted: int
    accepted: int
    statistics: Statistics | None = None


class Contender(Protocol):
    """Something that continues prompts and can be timed."""

    @property
    def method(self) -> str:
        """Its name in the tables."""

    @property
    def drafter(self) -> DrafterSpec | None:
        """Its drafter."""

    @property
    def acceptance(self) -> str | None:
        """What decides about its drafts (`DrafterSpec.decided_by`); None where it has none or is greedy."""

    def run(self, prompts: Tokens, count: int, known: Tokens, turn: int = 0) -> Run:
        """Writes `count` tokens after each prompt, end tokens ignored.

        Args:
            prompts: [B] prompts.
            count: tokens to write, at least 2.
            known: [B] what the baseline wrote (greedily).
            turn: number of the run on these prompts; sampled runs draw other numbers in each.
        """

    def differences(self, prompts: Tokens, known: Tokens, got: Tokens) -> list[tuple[int, int]]:
        """(row, position) of the first token of each row that should be the baseline's and is not."""


class MethodContender:
    """A method of this package. Every run has a fresh loop and drafter, so that no prompt profits from what
    was learned of the texts before. What rounds of the model cost on this machine is shared (`costs_of`).

    Args:
        method: its name.
        drafter: its drafter.
        model: the target.
        options: of the method.
        sampling: of all requests.
        dtype: of the model.
        drafter_model: what the drafter drafts with.
        watch: is shown every loop before it runs.
    """

    def __init__(
        self,
        method: str,
        drafter: DrafterSpec | None,
        model: CausalLM,
        options: MethodOptions,
        *,
        sampling: SamplingParams,
        dtype: torch.dtype,
        drafter_model: DrafterModel | None = None,
        watch: Callable[[Loop], None] | None = None,
    ) -> None:
        self.method = method
        self.drafter = drafter
        self.acceptance: str | None = None
        if drafter is not None and not sampling.greedy:
            self.acceptance = drafter.decided_by(options.acceptance)
        self._model = model
        self._options = options
        self._sampling = sampling
        self._dtype = dtype
        self._drafter_model = drafter_model
        self._watch = watch

    def run(self, prompts: Tokens, count: int, known: Tokens, turn: int = 0) -> Run:
        """See `Contender.run`."""
        drafter = None
        if self.drafter is not None:
            drafter = build_drafter(
                self.drafter,
                self._model,
                self._options,
                dtype=self._dtype,
                continuations=list(zip(prompts, known, strict=True))
                if self.drafter.needs_continuations
                else (),
                model=self._drafter_model,
            )
        loop = get_method(self.method).build(self._model, drafter, self._options)
        if self._watch is not None:
            self._watch(loop)
        # Prompts of one batch draw different numbers, and so does every turn.
        first = turn * len(prompts)
        requests = [
            Request(p, count, replace(self._sampling, seed=first + row), ignore_eos=True)
            for row, p in enumerate(prompts)
        ]
        start = perf_counter()
        results = loop.run(requests)
        stats = loop.statistics
        seconds = perf_counter() - start - stats.seconds.prefill
        return Run(
            [r.tokens for r in results],
            seconds,
            stats.emitted,
            stats.rounds,
            stats.drafted,
            stats.accepted,
            stats,
        )

    def differences(self, prompts: Tokens, known: Tokens, got: Tokens) -> list[tuple[int, int]]:
        """Every token must be the baseline's."""
        return [
            (row, next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y))
            for row, (a, b) in enumerate(zip(known, got, strict=True))
            if list(a) != list(b)
        ]


class ReferenceContender:
    """The same model in plain PyTorch, one token at a time: decoding without this package's operators."""

    method = REFERENCE
    drafter = None
    acceptance = None

    def __init__(self, model: ReferenceGatedDeltaNet) -> None:
        self._model = model

    @torch.inference_mode()
    def run(self, prompts: Tokens, count: int, known: Tokens, turn: int = 0) -> Run:
        """See `Contender.run`."""
        states, logits = [], []
        for prompt in prompts:
            state = self._model.initial_state(batch=1)
            logits.append(self._model.forward(torch.tensor([list(prompt)]), state)[:, -1])
            states.append(state)
        state = _stack(states)
        start = perf_counter()
        last = torch.cat(logits).argmax(-1)  # [B]
        columns = [last]
        for _ in range(count - 1):
            last = self._model.step(last, state).argmax(-1)
            columns.append(last)
        tokens = torch.stack(columns, dim=1).tolist()  # [B, count]
        seconds = perf_counter() - start
        rounds = len(prompts) * (count - 1)
        return Run(tokens, seconds, rounds, rounds, 0, 0)

    @torch.inference_mode()
    def differences(self, prompts: Tokens, known: Tokens, got: Tokens) -> list[tuple[int, int]]:
        """The baseline's tokens must be the reference's own choice, or a tie to within rounding.

        The two models round differently, so a near-tie can fall either way and free runs then part for good.
        The reference therefore reads the baseline's text and judges every token after the same ones before.
        """
        found = []
        for row, (prompt, tokens) in enumerate(zip(prompts, known, strict=True)):
            text = torch.tensor([[*prompt, *tokens[:-1]]])
            logits = self._model.forward(text)[0, len(prompt) - 1 :].float()  # [count, V]
            chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            gap = logits.amax(-1) - chosen
            # A logit sums as many rounded products as the model is wide, in every layer anew; such errors
            # add up like a random walk, and two logits are compared.
            terms = self._model.config.hidden_size * self._model.config.num_hidden_layers
            tie = 2 * terms**0.5 * torch.finfo(self._model.dtype).eps * logits.abs().amax(-1)
            wrong = (gap > tie).nonzero()
            if len(wrong):
                found.append((row, int(wrong[0])))
        return found


def _stack(states: Sequence[ReferenceState]) -> ReferenceState:
    """One state of B sequences from B states of one."""
    return ReferenceState(
        [torch.cat(layer) for layer in zip(*(s.recurrent for s in states), strict=True)],
        [torch.cat(layer) for layer in zip(*(s.conv for s in states), strict=True)],
    )
