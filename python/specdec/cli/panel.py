"""The statistics of a run, for people."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from specdec._rules import RULES
from specdec.generation import Result, Statistics

BAR = 24  # columns of a full bar
POSITIONS = 16  # most positions shown


@dataclass(frozen=True)
class Comparison:
    """A run beside plain decoding of as many tokens.

    Attributes:
        tokens_per_second: of plain decoding, the prompt not counted.
        same_tokens: whether it wrote the same tokens.
    """

    tokens_per_second: float
    same_tokens: bool

    def speedup(self, statistics: Statistics) -> float | None:
        """The run's speed over plain decoding's; None where one token was written, which no round decodes."""
        if self.tokens_per_second == 0.0:
            return None
        return statistics.tokens_per_second / self.tokens_per_second


@dataclass(frozen=True)
class Chance:
    """What a sampled run came from.

    Attributes:
        seed: repeats it.
        rule: the rule of acceptance, a name in `specdec.acceptance.RULES`.
    """

    seed: int
    rule: str


def print_panel(
    title: str,
    statistics: Statistics,
    result: Result,
    prompt_tokens: int,
    chance: Chance | None,
    plain: Comparison | None = None,
) -> None:
    """Prints the panel to stderr, where it is open.

    Args:
        title: method, drafter and model.
        statistics: of the run.
        result: the sequence.
        prompt_tokens: tokens of its prompt.
        chance: of a sampled run; None for a greedy one.
        plain: what plain decoding of as many tokens gave, where it was asked for.
    """
    if sys.stderr is None:  # closed from the start; rich would take stdout
        return
    console = Console(file=sys.stderr, highlight=False)
    full = "█" if (console.encoding or "").lower().startswith("utf") else "#"
    parts: list[RenderableType] = [_summary(statistics, result, prompt_tokens, chance, plain)]
    if statistics.drafted:
        parts += ["", Text("acceptance by position", style="bold"), _positions(statistics, full)]
    if statistics.rounds:
        parts += ["", Text("time", style="bold"), _times(statistics, full)]
    console.print(Panel(Group(*parts), title=title, title_align="left", expand=False))


def _summary(
    stats: Statistics, result: Result, prompt_tokens: int, chance: Chance | None, plain: Comparison | None
) -> Table:
    table = Table.grid(padding=(0, 2))
    tokens = f"{len(result.tokens)} written ({result.finish_reason}), {prompt_tokens} in the prompt"
    table.add_row("tokens", tokens)
    if stats.rounds:
        table.add_row(
            "speed", f"{stats.tokens_per_second:.0f} tokens/s, {stats.rounds_per_second:.0f} rounds/s"
        )
        table.add_row(
            "mean accepted length", f"{stats.mean_accepted_length:.2f} tokens a round, {stats.rounds} rounds"
        )
    if stats.drafted:
        table.add_row("drafts accepted", f"{stats.accepted} of {stats.drafted} ({stats.acceptance_rate:.0%})")
    if chance is not None:
        if not RULES[chance.rule].lossless:
            table.add_row("acceptance", f"{chance.rule}: LOSSY, not the target's distribution")
        elif stats.drafted:
            table.add_row("acceptance", chance.rule)
        table.add_row("seed", str(chance.seed))
    speedup = None if plain is None else plain.speedup(stats)
    if plain is not None and speedup is not None:
        tokens = "the same tokens" if plain.same_tokens else "other tokens"
        table.add_row(
            "plain decoding", f"{plain.tokens_per_second:.0f} tokens/s, {tokens}; this is {speedup:.2f}x"
        )
    return table


def _positions(stats: Statistics, full: str) -> Table:
    table = Table.grid(padding=(0, 2))
    counts = list(zip(stats.accepted_at, stats.drafted_at, strict=True))
    for position, (accepted, drafted) in enumerate(counts[:POSITIONS], start=1):
        share = accepted / drafted if drafted else 0.0
        table.add_row(
            f"{position:>2}", Text(_bar(share, full), style="green"), f"{share:4.0%}", f"of {drafted}"
        )
    if len(counts) > POSITIONS:
        table.add_row("", f"and {len(counts) - POSITIONS} more positions")
    return table


def _times(stats: Statistics, full: str) -> Table:
    table = Table.grid(padding=(0, 2))
    seconds = stats.seconds
    total = seconds.prefill + seconds.decode
    for name in ("prefill", "draft", "verify", "accept", "commit"):
        spent = getattr(seconds, name)
        share = spent / total if total > 0 else 0.0
        table.add_row(name, Text(_bar(share, full), style="cyan"), f"{share:4.0%}", f"{spent * 1e3:.1f} ms")
    return table


def _bar(share: float, full: str) -> str:
    return (full * round(share * BAR)).ljust(BAR)
