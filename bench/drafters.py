"""Compares drafters of one target: how often they choose as it does, and how much of a chain is accepted.

    python bench/drafters.py --text python --out docs/results/drafters adapted=DIR alone=OTHER_DIR

Two readings of every drafter, each over chains of 5. On the text: at every token of its files, with the text
as it stands. Decoding: the target continues the beginnings of the files greedily, and the loop verifies the
chains. What a run of `specdec train-drafter` measured on the text that it held out is shown too, where DIR
has it.
"""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from specdec.bench.machine import describe, machine
from specdec.drafters.recurrent import RecurrentDrafter
from specdec.generation import Request
from specdec.methods.specla import specla
from specdec.models import load_model, load_tokenizer
from specdec.models.checkpoint import resolve_model, write_json
from specdec.models.drafter_checkpoint import VOCABULARY, load_drafter_config, load_drafter_weights
from specdec.models.features import Feature, FeatureTap
from specdec.models.recurrent_drafter import RecurrentDrafterModel
from specdec.training.drafter_model import TrainableDrafter
from specdec.training.evaluation import chain_matches, summarize
from specdec.training.running import HISTORY_NAME
from specdec.training.target import FrozenTarget

CHAIN = 5
WINDOW = 256  # tokens of a file that are read
GIVEN = 64  # tokens of a file that are continued
WRITTEN = 128
VOCABULARIES = (1024, 2048)  # most frequent tokens that a drafter is restricted to, for comparison


def windows(folder: Path, target: FrozenTarget, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first tokens of up to `most` Python files that are long enough, int64 `[files, WINDOW + 1]`, and
    the vocabulary in the order of how often each token comes in the rest of the files.
    """
    tokenizer = load_tokenizer(target.directory)
    rows, counts = [], torch.zeros(target.config.vocab_size, dtype=torch.int64)
    paths = sorted(folder.rglob("*.py"))
    random.Random(0).shuffle(paths)
    for path in paths:
        tokens = tokenizer.encode(path.read_text(encoding="utf-8"))
        if len(tokens) > WINDOW:
            rows.append(tokens[: WINDOW + 1])
        counts += torch.bincount(torch.tensor(tokens[WINDOW + 1 :], dtype=torch.int64), minlength=len(counts))
    if not rows:
        raise ValueError(f"--text: {str(folder)!r} has no Python file of {WINDOW + 1} tokens")
    return torch.tensor(rows[:most]), counts.argsort(descending=True, stable=True)


@torch.no_grad()
def on_text(
    directory: Path, target: FrozenTarget, tokens: torch.Tensor, vocabularies: dict[str, torch.Tensor | None]
) -> dict[str, Any]:
    """Acceptance at every token, with every vocabulary of `vocabularies`."""
    config = load_drafter_config(directory)
    weights = load_drafter_weights(directory, config)
    own = weights.pop(VOCABULARY, None)
    model = TrainableDrafter(config.layer, config.feature_size)
    model.load_state_dict(weights)
    features = [Feature.parse(name) for name in config.features]
    found: dict[str, list[torch.Tensor]] = {name: [] for name in vocabularies}
    for rows in tokens.split(16):
        last, read = (_features(target, rows, wanted) for wanted in ([target.last], features))
        assert last is not None
        outputs = model.unroll(read, target.embeddings[rows], CHAIN)
        for name, vocabulary in vocabularies.items():
            allowed = own.long() if own is not None else vocabulary
            matches = chain_matches(outputs, target.final_norm(last), target.head, allowed)
            found[name].append(matches)
    return {name: asdict(summarize(torch.cat(parts))) for name, parts in found.items()}


def _features(target: FrozenTarget, rows: torch.Tensor, features: list[Feature]) -> torch.Tensor | None:
    if not features:
        return None
    tap = FeatureTap(features)
    cache = target.model.new_cache(len(rows))
    target.model.prefill(rows[:, :-1].tolist(), cache=cache, slots=range(len(rows)), tap=tap)
    return tap.rows().clone()  # as it was made in inference mode


def decoding(directory: Path, target: FrozenTarget, tokens: torch.Tensor) -> dict[str, Any]:
    """Acceptance of the loop's rounds, one sequence at a time."""
    model = load_model(target.directory)
    drafter = RecurrentDrafter(RecurrentDrafterModel.from_directory(directory, model))
    loop = specla(model, drafter, max_draft=CHAIN, adaptive=False)
    requests = [Request(row[:GIVEN].tolist(), max_new_tokens=WRITTEN, ignore_eos=True) for row in tokens]
    loop.run(requests)
    statistics = loop.statistics
    tried = [statistics.drafting_rounds, *statistics.accepted_at[: CHAIN - 1]]
    match = [hits / max(1, of) for hits, of in zip(statistics.accepted_at[:CHAIN], tried, strict=True)]
    return {"match": match, "mean_accepted_length": statistics.emitted / statistics.rounds}


def measure(
    name: str, directory: Path, target: FrozenTarget, tokens: torch.Tensor, frequent: torch.Tensor
) -> dict[str, Any]:
    """Everything about one drafter."""
    config = load_drafter_config(directory)
    vocabularies: dict[str, torch.Tensor | None] = {"all": None}
    for size in VOCABULARIES:
        if config.draft_vocab_size is None and size < target.config.vocab_size:
            vocabularies[str(size)] = frequent[:size].sort().values
    row: dict[str, Any] = {
        "name": name,
        "features": list(config.features),
        "parameters": config.num_parameters,
        "text": on_text(directory, target, tokens, vocabularies),
        "decoding": decoding(directory, target, tokens),
    }
    history = directory / HISTORY_NAME
    if history.is_file():
        values = json.loads(history.read_text(encoding="utf-8"))
        row["held_out"] = values["held_out"][-1][1]
    return row


def report(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """Markdown."""
    lines = f"""# Drafters compared

Command (directories by their last part): `{about["command"]}`, on
{describe()};
all figures are in the JSON file of the same name. Target {about["target"]}. Chains of {CHAIN} tokens.
First: how often the first draft is the target's choice; length: mean accepted length, the bonus token
counted; of three readings:

- held-out text: at every token of what the training left out of its text (which the target has seen);
- unseen text: at every token of the first {WINDOW} of {about["files"]} Python files below `{about["text"]}`;
- decoding: rounds of the loop while the target continues the first {GIVEN} tokens of these files greedily by
  {WRITTEN}; what its acceptance counted, also for positions 2 to 5 where those before were right.

| drafter | features | parameters | held-out text: first, length | unseen text | decoding | positions 2 to 5 |
|---|---|---|---|---|---|---|""".splitlines()
    for row in rows:
        readings = (row.get("held_out"), row["text"]["all"], row["decoding"])
        cells = [f"{x['match'][0]:.3f}, {x['mean_accepted_length']:.2f}" if x else "" for x in readings]
        later = " ".join(f"{chance:.2f}" for chance in row["decoding"]["match"][1:])
        lines.append(
            f"| {row['name']} | {', '.join(row['features']) or 'none'} | {row['parameters']:,} "
            f"| {' | '.join(cells)} | {later} |"
        )
    lines += f"""
## Drafting fewer tokens
The head restricted to the most frequent tokens (counted in the rest of the files): first, length on unseen
text.

| drafter | all | {" | ".join(f"{size:,}" for size in VOCABULARIES)} |
|---|---|{"---|" * len(VOCABULARIES)}""".splitlines()
    for row in rows:
        found = [row["text"].get(name) for name in ("all", *map(str, VOCABULARIES))]
        cells = [f"{x['match'][0]:.3f}, {x['mean_accepted_length']:.2f}" if x else "" for x in found]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def directories(drafters: Sequence[str]) -> dict[str, Path]:
    """The directories of NAME=DIR by name."""
    found: dict[str, Path] = {}
    for drafter in drafters:
        name, equals, directory = drafter.partition("=")
        if not (name and equals and directory):
            raise typer.BadParameter(f"got {drafter!r}, want NAME=DIR")
        if name in found:
            raise typer.BadParameter(f"got the name {name!r} twice, want each once")
        found[name] = Path(directory)
    return found


def main(
    drafters: Annotated[list[str], typer.Argument(metavar="NAME=DIR...", help="Drafters by name.")],
    text: Annotated[Path, typer.Option(help="Folder of Python files.")],
    out: Annotated[Path, typer.Option(help="Where to write, without the ending: OUT.json and OUT.md.")],
    target: Annotated[str, typer.Option(help="The model that they draft for.")] = "gdn-code",
    files: Annotated[int, typer.Option(help="Most files that are read.")] = 64,
) -> None:
    """Measure drafters and write the table."""
    named = directories(drafters)
    loaded = FrozenTarget(resolve_model(target))
    tokens, frequent = windows(text, loaded, files)
    rows = []
    for name, directory in named.items():
        rows.append(measure(name, directory, loaded, tokens, frequent))
        print(json.dumps(rows[-1]), flush=True)
    command = ["python", "bench/drafters.py", "--text", text.name, "--files", str(files), "--out", out.name]
    command += ["--target", Path(target).name] if target != "gdn-code" else []
    command += [f"{name}={directory.resolve().name}" for name, directory in named.items()]
    about = {"command": shlex.join(command), "target": target, "text": text.name, "files": len(tokens)}
    write_json(out.with_suffix(".json"), {"machine": machine(), **about, "drafters": rows})
    out.with_suffix(".md").write_text(report(rows, about), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
