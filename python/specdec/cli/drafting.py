"""Options of drafting that `specdec generate` and `specdec bench` share."""

from __future__ import annotations

from collections.abc import Sequence

from specdec._checks import check_integer, check_number
from specdec._host import MAX_SERIAL_NODES
from specdec.acceptance.params import SamplingParams
from specdec.methods import DrafterSpec


def check_drafting(max_draft: int, oracle_p: float) -> None:
    """Refuses values of `--max-draft` and `--oracle-p` that are out of their ranges.

    Raises:
        ValueError: naming the argument.
    """
    check_integer("max_draft", max_draft, 1, MAX_SERIAL_NODES - 1)  # the root token is a node too
    check_number("oracle_p", oracle_p, 0.0, 1.0)


def check_useful(
    drafters: Sequence[DrafterSpec],
    sampling: SamplingParams,
    rules: Sequence[str],
    draft_tree: str | None,
    oracle_p: float,
    *,
    fixed_draft: bool,
) -> None:
    """Refuses options that would change nothing, so that nobody reads their effect out of the figures.

    Args:
        drafters: those that draft, none where no method takes one.
        sampling: of all requests.
        rules: what `--acceptance` names.
        draft_tree: `--draft-tree`, None where it was not given.
        oracle_p: `--oracle-p`.
        fixed_draft: `--fixed-draft`.

    Raises:
        ValueError: naming the option.
    """
    if list(rules) != ["auto"] and not drafters:
        raise ValueError(f"--acceptance: got {','.join(rules)}, but no method here drafts anything")
    if list(rules) != ["auto"] and sampling.greedy:
        raise ValueError("--acceptance: at temperature 0 no rule is at work, want a --temperature above 0")
    if draft_tree is not None and not any(spec.has_model for spec in drafters):
        raise ValueError(
            f"--draft-tree: got {draft_tree}, but only the drafters adapted, model:DIR and exit:N take it"
        )
    if oracle_p != 1.0 and not any(spec.kind == "oracle" for spec in drafters):
        raise ValueError(f"--oracle-p: got {oracle_p:g}, but only the drafter oracle takes it")
    if fixed_draft and not drafters:
        raise ValueError("--fixed-draft: no method here drafts anything")
