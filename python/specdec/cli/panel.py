"""The statistics of a run, for people."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from specdec._rules import FOLLOW, is_lossless
from specdec.generation import Result, Statistics

if TYPE_CHECKING:
    from specdec.drafters.online_skips import OnlineSkipDrafter

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
        rule: what decides about drafts, see `DrafterSpec.decided_by`; None where there is no drafter.
    """

    seed: int
    rule: str | None


def print_panel(
    title: str,
    statistics: Statistics,
    result: Result,
    prompt_tokens: int,
    chance: Chance | None,
    plain: Comparison | None = None,
    refined: OnlineSkipDrafter | None = None,
    *,
    drafts: bool,
    as_it_pays: bool,
) -> None:
    """Prints the panel to stderr, where it is open.

    Args:
        title: method, drafter and model.
        statistics: of the run.
        result: the sequence.
        prompt_tokens: tokens of its prompt.
        chance: of a sampled run; None for a greedy one.
        plain: what plain decoding of as many tokens gave, where it was asked for.
        refined: the drafter that changed its set meanwhile, where one did.
        drafts: whether there is a drafter.
        as_it_pays: whether it is one that costs time and drafts only as much as seems to pay.
    """
    if sys.stderr is None:  # closed from the start; rich would take stdout
        return
    console = Console(file=sys.stderr, highlight=False)
    full = "█" if (console.encoding or "").lower().startswith("utf") else "#"
    summary = _summary(statistics, result, prompt_tokens, drafts, as_it_pays)
    if chance is not None:
        _add_chance(summary, chance, statistics)
    if refined is not None:
        _add_refinement(summary, refined)
    if plain is not None:
        _add_comparison(summary, plain, statistics, chance)
    parts: list[RenderableType] = [summary]
    if statistics.drafted:
        parts += ["", Text("acceptance by position", style="bold"), _positions(statistics, full)]
    if statistics.rounds:
        parts += ["", Text("time", style="bold"), _times(statistics, full)]
    console.print(Panel(Group(*parts), title=title, title_align="left", expand=False))


def _summary(stats: Statistics, result: Result, prompt_tokens: int, drafts: bool, as_it_pays: bool) -> Table:
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
    elif drafts and stats.rounds:
        table.add_row("drafts accepted", "nothing was drafted")
    # The last round may have had no room for drafts.
    if as_it_pays and 2 * stats.drafting_rounds < stats.rounds - 1:
        rounds = f"in {stats.drafting_rounds} of {stats.rounds} rounds"
        table.add_row("drafting", f"{rounds}: cut back, as it did not pay (--fixed-draft drafts in all)")
    return table


def _add_chance(table: Table, chance: Chance, stats: Statistics) -> None:
    if not is_lossless(chance.rule):
        table.add_row("acceptance", f"{chance.rule}: LOSSY, not the target's distribution")
    elif chance.rule is not None:
        table.add_row(
            "acceptance", chance.rule if stats.drafted else f"{chance.rule}, but nothing was drafted"
        )
    table.add_row("seed", str(chance.seed))


def _add_refinement(table: Table, drafter: OnlineSkipDrafter) -> None:
    told = drafter.refinement
    table.add_row(
        "skipped sub-layers",
        f"{drafter.skips}; {told.challengers} other sets tried, {told.switches} taken, in "
        f"{told.seconds * 1e3:.1f} ms ({told.share:.1%} of decoding)",
    )


def _add_comparison(table: Table, plain: Comparison, stats: Statistics, chance: Chance | None) -> None:
    speedup = plain.speedup(stats)
    if speedup is None:
        return
    tokens = "the same tokens" if plain.same_tokens else "other tokens"
    table.add_row(
        "plain decoding", f"{plain.tokens_per_second:.0f} tokens/s, {tokens}; this is {speedup:.2f}x"
    )
    drawn = chance is not None and chance.rule not in (None, FOLLOW) and is_lossless(chance.rule)
    if drawn and not plain.same_tokens:
        table.add_row("", "drawn drafts keep the distribution of the text, not the text of a seed")


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
