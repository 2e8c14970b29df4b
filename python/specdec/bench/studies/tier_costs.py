"""What the passes of tiers take by themselves, without anything between them.

A layer is not all that a draft costs: every tier reads the head, the end of every draft runs through the tier
below once more, and a pass over several nodes takes longer than one over one. With those times measured a
round has a price that no program around the same operators can go below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from specdec.bench.studies.lab import Lab
from specdec.bench.timing import interleaved
from specdec.drafters.plan import Plan

NODES = (1, 2, 3, 4, 6, 8, 11)  # that passes are timed with; between them a line


class PassCosts:
    """Seconds of passes of one sequence.

    Args:
        seconds: by what a pass is of, and its nodes: spans "0-2", and "head 2" behind so many layers.
        layers: of the model.
    """

    def __init__(self, seconds: Mapping[str, Mapping[int, float]], layers: int) -> None:
        self._seconds = seconds
        self._layers = layers

    def of(self, name: str, nodes: float) -> float:
        """A pass over so many nodes."""
        known = self._seconds[name]
        return float(np.interp(nodes, list(known), list(known.values())))

    def span(self, first: int, last: int, nodes: float) -> float:
        """Layers [first, last)."""
        return self.of(f"{first}-{last}", nodes) if first < last else 0.0

    @property
    def plain(self) -> float:
        """A round of plain decoding."""
        return self.span(0, self._layers, 1) + self.of(f"head {self._layers}", 1)

    def round(self, plan: Plan, checks: float) -> float:
        """A round of a plan with so many checks by its middle exit, if any."""
        low, layers = plan.exit, self._layers
        draft = plan.length * (self.span(0, low, 1) + self.of(f"head {low}", 1))
        last = self.span(0, low, 1)  # of the last draft, by the tier above
        if not plan.middle:
            nodes = 1 + plan.length
            above = self.span(low, layers, nodes) + self.of(f"head {layers}", nodes)
            return draft + last + above
        middle, inner = plan.middle, 1 + plan.length
        check = last + self.span(low, middle, inner) + self.of(f"head {middle}", inner)
        drafts = 1 + max(plan.tentative, checks)  # a check brings a token at least
        end = last + self.span(low, middle, 1)
        above = self.span(middle, layers, drafts) + self.of(f"head {layers}", drafts)
        return checks * (draft + check) + end + above


@torch.inference_mode()
def pass_costs(lab: Lab) -> PassCosts:
    """Times them, all in turn."""
    model = lab.model
    adapters = lab.adapters
    exits, layers = lab.exits(), model.num_layers
    prompt = lab.units(1, 1)[0].prompts[0]
    cache, slots = model.new_cache(1), torch.tensor([0], dtype=torch.int32)
    model.prefill([prompt], cache=cache, slots=[0])
    hidden = model.embeddings[: max(NODES)].clone()[None]  # [1, N, D]

    def span(part: range, nodes: int) -> Callable[[], object]:
        return lambda: model.run_layers(hidden[:, :nodes], part, cache=cache, slots=slots)

    def head(exit: int, nodes: int) -> Callable[[], object]:
        return lambda: model.readout(adapters.apply(exit, hidden[:, :nodes]))

    bounds = [0, *exits, layers]
    spans = {(a, b) for i, a in enumerate(bounds) for b in bounds[i + 1 :]}
    functions: dict[str, Callable[[], object]] = {}
    for n in NODES:
        functions |= {f"{a}-{b} {n}": span(range(a, b), n) for a, b in sorted(spans)}
        functions |= {f"head {exit} {n}": head(exit, n) for exit in (*exits, layers)}
    us = interleaved(functions, 1.0 if lab.quick else 20.0, layers=1)
    seconds: dict[str, dict[int, float]] = {}
    for name, took in us.items():
        what, _, nodes = name.rpartition(" ")
        seconds.setdefault(what, {})[int(nodes)] = 1e-6 * took
    return PassCosts(seconds, layers)
