"""Options that several commands take, and the texts of help that they share. Nothing here imports torch."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from specdec._rules import RULES
from specdec.methods import DEFAULT_DRAFTER, DRAFTERS, METHODS


class Dtype(str, Enum):
    """Of a model's activations."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class TunedMethod(str, Enum):
    """What `specdec tune --model` is for."""

    self_speculative = "self-speculative"
    hispec = "hispec"


class Commit(str, Enum):
    """When an accepted path is folded into the state."""

    deferred = "deferred"
    eager = "eager"


def _listed(entries: list[tuple[str, str]]) -> str:
    return "; ".join(f"{name}: {description}" for name, description in entries)


METHODS_TEXT = _listed([(name, method.description) for name, method in METHODS.items()])
DRAFTERS_TEXT = _listed(list(DRAFTERS.items()))
DEFAULT_DRAFTER_TEXT = f"Default: adapted+ngram where a drafter comes with the model, else {DEFAULT_DRAFTER}."
RULES_TEXT = _listed([(name, rule.description) for name, rule in RULES.items()])

Model = Annotated[
    str,
    typer.Option(help="A model's name (gdn-code, smollm2), a directory with a checkpoint, or a GGUF file."),
]
DtypeOption = Annotated[Dtype, typer.Option(help="Of the activations; the recurrent state is float32.")]
CommitOption = Annotated[
    Commit, typer.Option(help="Fold accepted drafts into the state with the next round, or at once.")
]
MaxDraft = Annotated[
    int,
    typer.Option(
        help="Most draft tokens a round, 1 to 63, all nodes of a --draft-tree counted; fewer where more do "
        "not pay."
    ),
]
OracleP = Annotated[
    float, typer.Option("--oracle-p", help="Chance that a token of the oracle is right, 0 to 1.")
]
Acceptance = Annotated[
    str,
    typer.Option(
        help=f"What decides about drafts that are drawn at random (temperature above 0). {RULES_TEXT}."
    ),
]
DraftTree = Annotated[
    str | None,
    typer.Option(
        help="Children of each node by depth in what adapted, model:, exit: and self-speculative draft, such "
        "as 2,2,1; the last goes on for as long as --max-draft lasts; 1: chains; auto: the likeliest tokens, "
        "pruned by their chances. Default: auto for adapted, else 1.",
        show_default=False,
    ),
]
Skip = Annotated[
    Path | None,
    typer.Option(
        help="For self-speculative: the file that says which sub-layers drafts leave out; online, or "
        "online:FILE: others that suit the text better, found while it is written; none: nothing is left "
        "out, drafts are in int8. Default: the set that comes with the model.",
        show_default=False,
    ),
]
EXITS_TEXT = (
    "priced: where going on would not be worth its time; adaptive: below a token less likely than a "
    "threshold that follows what is accepted; static:T: below one less likely than T; fixed: at --max-draft. "
    "adaptive takes the paper's settings, of which adaptive:gamma0=0.6,alpha=0.85,eps=0.01,beta1=0.5,"
    "beta2=0.9 are the defaults; it and static take widen=N: up to N guesses of a chain's last token"
)
DraftInt8 = Annotated[
    bool | None,
    typer.Option(
        "--draft-int8/--no-draft-int8",
        help="For self-speculative: draft with int8 copies of the weights, or with the weights themselves. "
        "Default: as the file of --skip says, and with --skip none, which leaves nothing out. For hispec: "
        "with one of the head.",
        show_default=False,
    ),
]
Tiers = Annotated[
    str | None,
    typer.Option(
        help="For hispec: auto, or LAYERSxTOKENS of the draft exit and of a middle exit where there is one: "
        "2x3, 2x2/5x4; bench takes several, separated by commas. Default: auto, chosen for every round.",
        show_default=False,
    ),
]
ExitAdapters = Annotated[
    str | None,
    typer.Option(
        help="For hispec: a directory of specdec train-exits, whose adapters the exits are read through, or "
        "none: they are read as they are. Default: the adapters that come with the model, if there are any.",
        show_default=False,
    ),
]
FixedDraft = Annotated[
    bool,
    typer.Option("--fixed-draft", help="Draft --max-draft tokens every round, whether or not they pay."),
]
Temperature = Annotated[float, typer.Option(help="0 is greedy decoding; else 1e-30 to 1e30.")]
Seed = Annotated[int | None, typer.Option(help="Of the draws, 0 to 2^64 - 1; without one a seed is drawn.")]
