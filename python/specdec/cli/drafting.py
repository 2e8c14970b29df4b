"""Options of drafting that `specdec generate` and `specdec bench` share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specdec._checks import check_integer, check_number
from specdec._host import MAX_SERIAL_NODES
from specdec.acceptance.params import SamplingParams
from specdec.bench.machine import cpu_model
from specdec.cli.errors import note
from specdec.methods import ADAPTIVE_TIERS, DRAFT_EXIT, NOTHING, DrafterSpec, load_skip_file
from specdec.models.base import CausalLM


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
    skip: Path | None,
    draft_exit: str | None,
    draft_int8: bool | None,
    tiers: str | None,
    exit_adapters: str | None,
) -> None:
    """Refuses options that would change nothing, so that nobody reads their effect out of the figures.

    Args:
        drafters: those that draft, none where no method takes one.
        sampling: of all requests.
        rules: what `--acceptance` names.
        draft_tree: `--draft-tree`, None where it was not given.
        oracle_p: `--oracle-p`.
        fixed_draft: `--fixed-draft`.
        skip: `--skip`, None where it was not given.
        draft_exit: `--draft-exit`, likewise.
        draft_int8: `--draft-int8` or `--no-draft-int8`, likewise.
        tiers: `--tiers`, None where it was not given.
        exit_adapters: `--exit-adapters`, likewise.

    Raises:
        ValueError: naming the option.
    """
    skipping, tiered = ("skip", "self-speculative"), ("tiers", "hispec")
    for name, given, takers in (
        ("--skip", skip, [skipping]),
        ("--draft-exit", draft_exit, [skipping]),
        ("--tiers", tiers, [tiered]),
        ("--exit-adapters", exit_adapters, [tiered]),
        ("--draft-int8", draft_int8, [skipping, tiered]),
    ):
        if given is not None and not {kind for kind, _ in takers} & {spec.kind for spec in drafters}:
            told = "" if isinstance(given, bool) else f"got {given}, but "
            methods = " and ".join(method for _, method in takers)
            takes = "takes" if len(takers) == 1 else "take"
            of = "method" if len(takers) == 1 else "methods"
            raise ValueError(f"{name}: {told}only the {of} {methods} {takes} it")
    if list(rules) != ["auto"] and not drafters:
        raise ValueError(f"--acceptance: got {','.join(rules)}, but no method here drafts anything")
    if list(rules) != ["auto"] and sampling.greedy:
        raise ValueError("--acceptance: at temperature 0 no rule is at work, want a --temperature above 0")
    if draft_tree is not None and not any(spec.has_model for spec in drafters):
        raise ValueError(
            f"--draft-tree: got {draft_tree}, but only the drafters adapted, model:DIR and exit:N and the "
            "methods self-speculative and hispec take it"
        )
    if oracle_p != 1.0 and not any(spec.kind == "oracle" for spec in drafters):
        raise ValueError(f"--oracle-p: got {oracle_p:g}, but only the drafter oracle takes it")
    if fixed_draft and not drafters:
        raise ValueError("--fixed-draft: no method here drafts anything")


def skip_spec(
    skip: Path | None, draft_exit: str | None, draft_tree: str | None, *, int8: bool | None = None
) -> DrafterSpec:
    """The drafter of the method self-speculative, from `--skip`, `--draft-exit` and `--draft-tree`, each None
    where it was not given, and `--draft-int8`.

    Raises:
        ValueError: naming the argument.
    """
    file = None if skip is None else str(skip)
    exit = DRAFT_EXIT if draft_exit is None else draft_exit
    return DrafterSpec.skipping(file, exit=exit, tree=draft_tree, int8=int8)


def tiers_spec(
    tiers: str | None, exit_adapters: str | None, draft_tree: str | None, *, int8: bool | None = None
) -> DrafterSpec:
    """The drafter of the method hispec, from `--tiers`, `--exit-adapters`, `--draft-tree` and `--draft-int8`,
    each None where it was not given.

    Raises:
        ValueError: naming the argument.
    """
    return DrafterSpec.tiered(
        ADAPTIVE_TIERS if tiers is None else tiers,
        adapters=exit_adapters,
        int8=int8,
        tree=draft_tree,
    )


def note_other_machine(spec: DrafterSpec, model: CausalLM, dtype: str) -> None:
    """Says so on stderr where the set of `--skip` was chosen on another device or for another dtype."""
    if spec.kind != "skip" or spec.model in ("", NOTHING):
        return
    file = load_skip_file(spec, model)
    device = cpu_model()
    if (file.device, file.dtype) != (device, dtype):
        note(f"--skip: chosen on {file.device} in {file.dtype}, this is {device} in {dtype}")
