"""Ways to bring an accepted path into the state, as whole rounds at the operator's level.

A round verifies `NODES` tokens and then has the first m of them in the state:

- replay: decode steps over the accepted tokens, the state read and written for each;
- prefill: the accepted tokens, kept as raw inputs, in one chunked pass that reads and writes the state once;
- snapshot: the state is stored after every token of the verification, and accepting picks one of them. Only
  the stores are counted, a copy of the state a token, as a kernel that steps could make them on its way;
- eager: the accepted factors, in a pass of their own;
- deferred: the accepted factors, while the next verification reads the state anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec import ops
from specdec.bench.operators import HEADS, LAYERS, WIDTH, Tokens, Workload, require
from specdec.bench.studies.lab import Lab, Step
from specdec.bench.studies.section import Section, times
from specdec.bench.timing import interleaved
from specdec.ops import Factors, Pending

TITLE = "Commits"
NODES = 8
WAYS = ("replay", "prefill", "snapshot", "eager", "deferred")

Result = dict[str, Any]


def steps(lab: Lab) -> int:
    """Calls of `step` that `measure` makes."""
    return len(_batches(lab)) * len(_lengths(lab))


def measure(lab: Lab, step: Step) -> Result:
    """Every way by batch and accepted length."""
    width, layers = (64, 4) if lab.quick else (WIDTH, LAYERS)
    rows = []
    for batch in _batches(lab):
        rounds = Rounds(Workload.random(batch, NODES, max(1, layers // batch), width=width))
        for accepted in _lengths(lab):
            us = rounds.time(accepted, 0.1 if lab.quick else 1.0)
            rows.append({"batch": batch, "accepted": accepted, "us": us})
            step(f"batch {batch}, {accepted} accepted")
    return {"rows": rows, "heads": HEADS, "width": width, "layers": layers, "nodes": NODES}


def _batches(lab: Lab) -> Sequence[int]:
    return (1,) if lab.quick else (1, 4, 16)


def _lengths(lab: Lab) -> Sequence[int]:
    return (1, 8) if lab.quick else range(1, NODES + 1)


class Rounds:
    """The rounds of every way, over the same tokens.

    Folding the same factors again and again is harmless: the gates forget, so that states stay of one size.
    """

    def __init__(self, work: Workload) -> None:
        self._work = work
        self._factors: Factors = work.verify(0)[1]
        self._snapshots = [torch.empty_like(work.states[0]) for _ in range(NODES)]
        self._singles: list[Tokens] = [work.nodes([node]) for node in range(NODES)]

    def time(self, accepted: int, seconds: float) -> dict[str, float]:
        """Microseconds of a round by way, and of the verification alone ("verify").

        Raises:
            RuntimeError: a way does not leave the state that the others leave.
        """
        self._check(accepted)
        names = ("verify", *WAYS)
        return interleaved({name: self._round(name, accepted) for name in names}, seconds, layers=1)

    def _round(self, way: str, accepted: int) -> Callable[[], object]:
        work = self._work
        states = [state.clone() for state in work.states]
        lengths = torch.full((states[0].shape[0],), accepted, dtype=torch.int32)
        pending = Pending(self._factors, None, lengths) if way == "deferred" else None

        def run() -> None:
            state = states[work.next_layer()]
            self._verify(work.tokens, state, pending)
            self._settle(way, state, accepted, lengths)

        return run

    def _settle(self, way: str, state: Tensor, accepted: int, lengths: Tensor) -> None:
        """What a way does besides the verification."""
        if way == "replay":
            last = None
            for tokens in self._singles[:accepted]:
                last = self._verify(tokens, state, None if last is None else Pending(last))
            # The last token's own update rides in the round's verification: each step has one.
        elif way == "prefill":
            q, k, v, g, beta = (t[:, :accepted] for t in self._work.tokens)
            ops.prefill(q, k, v, g, beta, state=state, qk_l2norm=True)
        elif way == "snapshot":
            for snapshot in self._snapshots:
                snapshot.copy_(state)
        elif way == "eager":
            ops.commit(state, self._factors, path_lengths=lengths)

    def _verify(self, tokens: Tokens, state: Tensor, pending: Pending | None) -> Factors:
        return ops.verify(*tokens, state=state, pending=pending, qk_l2norm=True, strategy="exact")[1]

    def _check(self, accepted: int) -> None:
        """Replay, prefill, eager and deferred commit leave the same state, to rounding."""
        work = self._work.row()
        factors = work.verify(0)[1]
        lengths = torch.tensor([accepted], dtype=torch.int32)
        want = work.states[0].clone()
        ops.commit(want, factors, path_lengths=lengths)
        late, read, stepped = (work.states[0].clone() for _ in range(3))
        self._verify(work.tokens, late, Pending(factors, None, lengths))
        ops.prefill(*(t[:, :accepted] for t in work.tokens), state=read, qk_l2norm=True)
        last = None
        for node in range(accepted + 1):  # a step more folds in the last one
            tokens = work.nodes([min(node, NODES - 1)])
            last = self._verify(tokens, stepped, None if last is None else Pending(last))
        for name, state in (("deferred", late), ("prefill", read), ("replay", stepped)):
            require(state, want.double(), f"commit, {name}")


def sections(result: Result) -> list[Section]:
    """Microseconds of a round by accepted length, and what the paper compares."""
    rows = []
    for row in result["rows"]:
        us = row["us"]
        rows.append(
            [
                f"{row['batch']}",
                f"{row['accepted']}",
                f"{us['verify']:.0f}",
                *(f"{us[way]:.0f}" for way in WAYS),
                times(us["replay"] / us["deferred"]),
                times(us["snapshot"] / us["deferred"]),
                times(us["eager"] / us["deferred"]),
                times((us["replay"] - us["verify"]) / (us["eager"] - us["verify"]))
                if us["eager"] > us["verify"]
                else "",
            ]
        )
    size = f"{result['heads']} heads of {result['width']}x{result['width']} float32"
    return [
        Section(
            "A round by how the accepted tokens come into the state, us",
            [
                f"{size}, chains of {result['nodes']}, states of {result['layers']} layers in turn (over the "
                "batch). verify: the verification alone. replay: decode steps over the accepted tokens. "
                "prefill: kept inputs, one chunked pass. snapshot: a store of the state for every verified "
                "token, nothing else. eager: a pass over the state with the accepted factors. deferred: they "
                "ride in the verification. The last column leaves the verification out, as the paper's 2.74x "
                "to 4.28x (H100) does; the paper's fused against separate commit, 1.15x to 1.44x, is eager / "
                "deferred.",
            ],
            [
                "batch",
                "accepted",
                "verify",
                *WAYS,
                "replay / deferred",
                "snapshot / deferred",
                "eager / deferred",
                "replay / eager, commit alone",
            ],
            rows,
        )
    ]


def draw(result: Result, figure: Any) -> None:
    """What each way adds to the verification, by accepted length, a panel a batch size."""
    batches = list(dict.fromkeys(row["batch"] for row in result["rows"]))
    figure.set_size_inches(4.2 * len(batches), 3.8)
    panels = figure.subplots(1, len(batches), squeeze=False)[0]
    for axes, batch in zip(panels, batches, strict=True):
        rows = [row for row in result["rows"] if row["batch"] == batch]
        for way in WAYS:
            lengths = [row["accepted"] for row in rows]
            axes.plot(lengths, [row["us"][way] / row["us"]["verify"] for row in rows], "o-", label=way)
        axes.axhline(1.0, color="0.4", linewidth=0.8)
        axes.set_xlabel("accepted tokens")
        axes.set_title(f"batch {batch}", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("round over its verification alone")
    panels[0].legend(frameon=False, fontsize=8)
