"""SmolLM2-135M against `transformers`: the same weights on the same machine in one run, greedy decoding.

    python bench/peers_hf.py --json out.json

| ours | of transformers | asked for |
|---|---|---|
| plain decoding | `generate` | at least 1.3 times |
| the n-gram drafter | `prompt_lookup_num_tokens` | at least 1.2 times |
| self-speculative decoding | `assistant_early_exit` | at least 4 times |

Both have the file's weights dequantised to the same float32 numbers, float32 activations and as many threads.
Ours drafts for itself as `specdec generate --method self-speculative` does, with the set that comes with the
model.
A run is a prompt's reading and its new tokens, without the tokenizer. All contenders take turns on every
prompt, in another order each time, and a ratio is taken within a turn: what else the machine does meanwhile
then touches both alike. Texts are compared: two libraries round differently, so a near-tie may fall either
way, and where a text first parts from the peer's plain one, the difference of the peer's two logits is shown.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from specdec.bench.machine import describe, machine
from specdec.bench.prompts import Prompt, load_prompts
from specdec.drafters.ngram import NGramDrafter
from specdec.generation import Request
from specdec.loop import Loop
from specdec.methods import DRAFT_EXIT, DrafterSpec, MethodOptions, build_drafter, get_method, load_skip_file
from specdec.methods.autoregressive import autoregressive
from specdec.methods.specla import specla
from specdec.models import load_model, load_tokenizer
from specdec.models.base import SkippableLM
from specdec.models.checkpoint import resolve_model, write_json
from specdec.models.llama import LlamaForCausalLM
from specdec.models.llama_checkpoint import load_llama

MODEL = "smollm2"
# Ours, the peer's, and what the ratio is asked to be.
PAIRS = (
    ("plain", "hf generate", 1.3),
    ("n-gram", "hf prompt lookup", 1.2),
    ("self-speculative", "hf early exit", 4.0),
)
LOOKUP = 10  # tokens that prompt lookup drafts, as in the documentation of transformers


@dataclass
class Contender:
    """Somebody who continues prompts.

    Attributes:
        name: in the tables.
        run: tokens of a prompt, and how many to add -> new tokens.
        seconds: of each turn.
        texts: by prompt.
    """

    name: str
    run: Callable[[list[int], int], list[int]]
    seconds: list[float] = field(default_factory=list)
    texts: dict[int, list[int]] = field(default_factory=dict)


def peer_model() -> Any:
    """`transformers`' model with our float32 weights.

    It could read the file itself, which needs one more package; `tests/llama` compares what both read.
    """
    import transformers

    path = resolve_model(MODEL)
    config, weights = load_llama(path)
    peer = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name), dtype=torch.float32
    )
    peer.load_state_dict(weights, strict=not config.tie_word_embeddings)
    peer.tie_weights()
    return peer.eval()


def drafting_itself(model: SkippableLM, skip: Path | None) -> tuple[Loop, str]:
    """The loop of self-speculative decoding as the command makes it, and what its drafts are made with."""
    spec = DrafterSpec.skipping(None if skip is None else str(skip), exit=DRAFT_EXIT)
    options = MethodOptions()
    loop = get_method("self-speculative").build(
        model, build_drafter(spec, model, options, dtype=model.dtype), options
    )
    file = load_skip_file(spec, model)
    known = "all tokens" if file.vocabulary is None else f"{len(file.vocabulary)} tokens"
    return loop, f"skipped {file.skips}, {'int8' if file.int8 else 'the same'} weights, {known}"


def contenders(model: LlamaForCausalLM, peer: Any, own_drafts: Loop, early_exit: int) -> list[Contender]:
    """Everybody, in the order of the tables."""

    def ours(loop: Loop) -> Callable[[list[int], int], list[int]]:
        return lambda prompt, tokens: loop.run([Request(prompt, tokens, ignore_eos=True)])[0].tokens

    def theirs(**options: int) -> Callable[[list[int], int], list[int]]:
        def run(prompt: list[int], tokens: int) -> list[int]:
            given = torch.tensor([prompt])
            made = peer.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
                **options,
            )
            new: list[int] = made[0, len(prompt) :].tolist()
            return new

        return run

    return [
        Contender("plain", ours(autoregressive(model))),
        Contender("hf generate", theirs()),
        Contender("n-gram", ours(specla(model, NGramDrafter()))),
        Contender("hf prompt lookup", theirs(prompt_lookup_num_tokens=LOOKUP)),
        Contender("self-speculative", ours(own_drafts)),
        Contender("hf early exit", theirs(assistant_early_exit=early_exit)),
    ]


def take_turns(
    all_of_them: Sequence[Contender], prompts: Sequence[list[int]], tokens: int, repeats: int
) -> None:
    """Every contender continues every prompt, `repeats` times."""
    order = random.Random(0)
    for contender in all_of_them:  # what is made at a first run is not a cost of decoding
        contender.run(prompts[0][:16], 8)
    for _ in range(repeats):
        for i, prompt in enumerate(prompts):
            for contender in order.sample(all_of_them, len(all_of_them)):
                start = perf_counter()
                contender.texts[i] = contender.run(prompt, tokens)
                contender.seconds.append(perf_counter() - start)
                print(".", end="", flush=True)
    print()


@torch.inference_mode()
def first_difference(
    peer: Any, prompt: list[int], text: list[int], plain: list[int]
) -> tuple[int, float] | None:
    """Where a text parts from the peer's plain one, and by how much the peer prefers its own token."""
    at = next((i for i, (a, b) in enumerate(zip(text, plain, strict=True)) if a != b), None)
    if at is None:
        return None
    logits = peer(torch.tensor([[*prompt, *plain[:at]]])).logits[0, -1]
    return at, float(logits[plain[at]] - logits[text[at]])


def report(all_of_them: Sequence[Contender], tokens: int) -> tuple[list[Table], list[dict[str, Any]]]:
    """The two tables, and the ratios for the JSON file."""
    speeds = Table("", "tokens/s", "slowest, fastest turn")
    for c in all_of_them:
        rates = [tokens / s for s in c.seconds]
        speeds.add_row(c.name, f"{statistics.median(rates):.1f}", f"{min(rates):.1f}, {max(rates):.1f}")
    by_name = {c.name: c for c in all_of_them}
    ratios, found = Table("ours", "theirs", "ratio", "quartiles", "asked for"), []
    for ours, theirs, wanted in PAIRS:
        pairs = zip(by_name[ours].seconds, by_name[theirs].seconds, strict=True)
        turns = sorted(peer / own for own, peer in pairs)
        low, middle, high = statistics.quantiles(turns, n=4, method="inclusive") if turns[1:] else turns * 3
        met = "" if middle >= wanted else " (missed)"
        ratios.add_row(ours, theirs, f"{middle:.2f}", f"{low:.2f}, {high:.2f}", f"{wanted}{met}")
        found.append({"ours": ours, "theirs": theirs, "ratio": middle, "turns": turns, "asked_for": wanted})
    return [speeds, ratios], found


def main(
    json: Annotated[Path | None, typer.Option(help="Where to write all figures.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file as for `specdec bench --prompts`.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts, taken from all kinds in turn.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    repeats: Annotated[int, typer.Option(min=1)] = 1,
    skip: Annotated[
        Path | None, typer.Option(help="A skip.json for SmolLM2; by default the one that comes with it.")
    ] = None,
    early_exit: Annotated[int, typer.Option(help="Layers that the peer drafts with.")] = 8,
) -> None:
    """Compare with transformers and print the tables."""
    import transformers

    transformers.logging.set_verbosity_error()
    model, tokenizer = load_model(MODEL), load_tokenizer(MODEL)
    assert isinstance(model, LlamaForCausalLM)
    own_drafts, drafts = drafting_itself(model, skip)
    kinds: dict[str, list[Prompt]] = {}
    for entry in load_prompts(prompts):
        kinds.setdefault(entry.kind, []).append(entry)
    most = max(map(len, kinds.values()))
    chosen = [group[i] for i in range(most) for group in kinds.values() if i < len(group)][:count]
    texts = [tokenizer.encode(p.prompt) for p in chosen]
    peer = peer_model()
    everybody = contenders(model, peer, own_drafts, early_exit)
    take_turns(everybody, texts, max_new_tokens, repeats)

    plain = everybody[1].texts
    parted = Table("", "texts as of hf generate", "others: first at token, by logit")
    differences: dict[str, list[tuple[int, float] | None]] = {}
    for c in everybody:
        if c is everybody[1]:
            continue
        found = [first_difference(peer, texts[i], c.texts[i], plain[i]) for i in range(len(texts))]
        differences[c.name] = found
        others = "; ".join(f"{d[0]}, {d[1]:.1e}" for d in found if d is not None)
        parted.add_row(c.name, f"{found.count(None)} of {len(found)}", others)
    console = Console(highlight=False)
    tables, ratios = report(everybody, max_new_tokens)
    about = (
        f"SmolLM2-135M, float32, {len(chosen)} prompts, {max_new_tokens} new tokens; "
        f"our own drafts: {drafts}; early exit after {early_exit} layers, "
        f"transformers {transformers.__version__}"
    )
    console.print(f"{describe()}\n{about}", markup=False)
    for table in (*tables, parted):
        console.print(table)
    if json is not None:
        turns = {c.name: c.seconds for c in everybody}
        prompts_used = [f"{p.kind}/{p.name}" for p in chosen]
        write_json(
            json,
            {
                "machine": {**machine(), "transformers": transformers.__version__},
                "about": about,
                "prompts": prompts_used,
                "seconds": turns,
                "ratios": ratios,
                "first_differences": differences,
            },
        )


if __name__ == "__main__":
    typer.run(main)
