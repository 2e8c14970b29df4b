"""What early exits keep in memory: their hidden states beside what the target has anyway.

Bytes of all tensors that are alive after a pass, the weights left out, at the most of any pass: the durable
states, what is pending, what the passes of the round left behind, hidden states, logits. What an operator
allocates and frees within itself is not in it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from specdec.bench.studies.lab import Entry, Lab, Step
from specdec.bench.studies.section import Section
from specdec.bench.studies.tiers import PAPER
from specdec.drafters.plan import Plan
from specdec.methods import DrafterSpec
from specdec.models.base import CausalLM

TITLE = "Memory"
PASSES = ("forward", "run_layers", "readout")
ABOUT = (
    "Bytes of all tensors alive after a pass, at the most of any pass but those over the prompt, which are "
    "the same in all rows, without the weights, for one sequence: states or keys and values, what is "
    "pending, what the round's passes left behind, hidden states and logits. A chain that the target "
    "verifies leaves as much behind as one of the same length that exits drafted, so an oracle's chain of as "
    "many drafts stands beside each. Hidden states: nodes of the longest chain, the last emitted token among "
    "them, times the width, for each tier below the target."
)

Result = dict[str, Any]


class Alive:
    """Bytes of the tensors that were made since, each piece of memory once.

    Attributes:
        most: of all looks.
    """

    def __init__(self) -> None:
        self.most = 0
        gc.collect()  # what dies later would hide what comes to lie at its place
        self._known = {storage.data_ptr() for storage in _storages()}

    def look(self) -> None:
        """Counts them now."""
        sizes = {s.data_ptr(): s.nbytes() for s in _storages() if s.data_ptr() not in self._known}
        self.most = max(self.most, sum(sizes.values()))


def _storages() -> Iterator[torch.UntypedStorage]:
    for thing in gc.get_objects():
        # isinstance would ask objects that answer with imports. A tensor that is not strided (a sparse one
        # of the program around us) has no storage: it holds strided ones, which are no objects of Python.
        if type(thing) is torch.Tensor and thing.layout is torch.strided:
            yield thing.untyped_storage()


@contextmanager
def looking(model: CausalLM, look: Callable[[], None]) -> Iterator[None]:
    """Looks after every pass of a model, but those over prompts."""
    read, reading = model.prefill, False

    def prefill(*args: Any, **kwargs: Any) -> Any:
        nonlocal reading
        reading = True
        try:
            return read(*args, **kwargs)
        finally:
            reading = False

    def watched(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found = run(*args, **kwargs)
            if not reading:
                look()
            return found

        return call

    model.prefill = prefill  # type: ignore[method-assign]
    for name in PASSES:
        setattr(model, name, watched(getattr(model, name)))
    gc.freeze()  # what is there already need not be looked through each time
    try:
        yield
    finally:
        gc.unfreeze()
        for name in (*PASSES, "prefill"):
            delattr(model, name)


def plans(lab: Lab) -> list[Plan]:
    """The paper's setting in two and in three tiers, of the first and the last exit."""
    exits = lab.exits()
    length, tentative = PAPER
    made = [Plan(exits[0], length)]
    if len(exits) > 1:
        made.append(Plan(exits[0], length, exits[-1], tentative))
    return made


def steps(lab: Lab) -> int:
    """Calls of `step` that `measure` makes."""
    return 1 + 2 * len(plans(lab))


def measure(lab: Lab, step: Step) -> Result:
    """Decodes the same prompts in every way."""
    units, count = lab.units(1, 2), 16 if lab.quick else 48
    known = [lab.decoded(unit, count) for unit in units]
    width, item = lab.model.embeddings.shape[1], lab.model.embeddings.element_size()
    ways: list[tuple[str, Entry | None, int, int]] = [("plain decoding", None, 0, 0)]
    for plan in plans(lab):
        tiers = len(plan.spans)
        oracle = DrafterSpec.parse("oracle", p=1.0)
        chain = Entry("", oracle, max_draft=plan.most, adaptive=False)
        ways.append((f"plain verification of {plan.most} drafts", chain, plan.most, 0))
        spec = DrafterSpec.tiered(str(plan), adapters=lab.exit_adapters)
        exits = Entry("", spec, max_draft=plan.most, adaptive=False)
        ways.append((f"tiers {plan}", exits, plan.most, tiers))
    rows = []
    for name, entry, drafts, tiers in ways:
        contender = lab.contender(entry, 1)
        contender.run(units[0].prompts, count, known[0])  # what is made once and stays is no part of it
        alive = Alive()
        with looking(lab.model, alive.look):
            for unit, texts in zip(units, known, strict=True):
                contender.run(unit.prompts, count, texts)
                gc.collect()
        hidden = tiers * (1 + drafts) * width * item
        rows.append({"name": name, "drafts": drafts, "bytes": alive.most, "hidden_bytes": hidden})
        step(name)
    return {"memory": rows, "weights": lab.model.num_parameters * item}


def sections(result: Result) -> list[Section]:
    """A row a way to decode."""
    rows = result["memory"]
    plain = rows[0]["bytes"]
    return [
        Section(
            "At the most of a round",
            [ABOUT, f"The weights take {result['weights'] / 1e6:.1f} MB."],
            [
                "",
                "kB",
                "more than plain decoding, kB",
                "of which hidden states",
                "of weights and plain decoding",
            ],
            [
                [
                    row["name"],
                    f"{row['bytes'] / 1e3:.1f}",
                    f"{(row['bytes'] - plain) / 1e3:.1f}",
                    f"{row['hidden_bytes'] / 1e3:.1f}" if row["hidden_bytes"] else "",
                    f"{(row['bytes'] - plain) / (plain + result['weights']):.2%}",
                ]
                for row in rows
            ],
        )
    ]


def draw(result: Result, figure: Any) -> None:
    """Bytes as bars, the hidden states set apart."""
    rows: Sequence[dict[str, Any]] = result["memory"]
    figure.set_size_inches(8, 1.2 + 0.4 * len(rows))
    axes = figure.subplots()
    places = range(len(rows))
    rest = [(row["bytes"] - row["hidden_bytes"]) / 1e3 for row in rows]
    axes.barh(places, rest, 0.7, color="C0", label="states, what is pending, what passes left behind, logits")
    hidden = [row["hidden_bytes"] / 1e3 for row in rows]
    axes.barh(places, hidden, 0.7, left=rest, color="C1", label="hidden states at the exits")
    axes.set_yticks(places, [row["name"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("kB of tensors alive at the most, without weights")
    figure.legend(loc="outside upper center", ncols=2, fontsize=7, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
