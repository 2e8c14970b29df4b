"""Times acceptance against the verification round that it follows.

    python bench/acceptance.py --json acceptance.json

A round is one call of the target over N drafts and the root token, without what the drafter costs. Two
targets: the embedded model gdn-code (V = 4096), and a Gated DeltaNet with random bfloat16 weights at the
sizes of a small language model with a large vocabulary (V = 150,000). gdn-code verifies text: the last tokens
of the bundled prompts, a path of the tree having the tokens that follow, whatever the sibling. Both verify
random tokens, after which logits are flat (many tokens are about as likely): the dearest case for top-p.
Acceptance starts at the logits: softmax, top-k and top-p, the rule and the draw of the next token.
The drafts it decides about are drawn from rows near the target's, 8 sets of them; a figure is the median over
turns of the mean over the sets, model and rules taking turns within one run. Before it is
timed, the first set's decisions are compared with those of the rule in float64 Python; a difference ends the
script.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import specdec
from specdec import ops
from specdec.acceptance import SeededDecisions
from specdec.acceptance.round import walk
from specdec.bench.machine import machine
from specdec.bench.prompts import load_prompts
from specdec.models.checkpoint import expected_tensors
from specdec.models.config import GatedDeltaNetConfig
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM
from specdec.ops import AcceptRule

DRAFTS, SETS, NOISE = 16, 8, 0.5
SEED_STEP, POSITION = 77, 100  # of the random numbers
LARGE = GatedDeltaNetConfig(
    vocab_size=150_000,
    hidden_size=1024,
    num_hidden_layers=24,
    num_heads=8,
    num_v_heads=8,
    head_dim=128,
    expand_v=1.0,
    intermediate_size=2816,
    tie_word_embeddings=True,
)
# Settings of every sequence.
SETTINGS: dict[str, dict[str, float]] = {
    "temperature 0.8": {"temperature": 0.8},
    "0.8, top-k 50, top-p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
}
CHAIN = list(range(-1, DRAFTS))
TREE = [-1, *(n // 2 for n in range(DRAFTS))]  # every node has two children
RULES: dict[str, tuple[AcceptRule, list[int]]] = {
    "follow, tree": (AcceptRule.FOLLOW, TREE),
    "speculative, chain": (AcceptRule.RECURSIVE, CHAIN),
    "block, chain": (AcceptRule.TRAVERSAL, CHAIN),
    "recursive, tree": (AcceptRule.RECURSIVE, TREE),
    "recursive without replacement": (AcceptRule.RECURSIVE_WITHOUT_REPLACEMENT, TREE),
    "k-seq, tree": (AcceptRule.K_SEQ, TREE),
    "traversal, tree": (AcceptRule.TRAVERSAL, TREE),
    "traversal without replacement": (AcceptRule.TRAVERSAL_WITHOUT_REPLACEMENT, TREE),
}


def large_model() -> GatedDeltaNetForCausalLM:
    """Random weights, standard deviation 1 / sqrt(inputs)."""
    rng = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in expected_tensors(LARGE).items():
        noise = torch.randn(shape, generator=rng)
        weights[name] = 1 + 0.1 * noise if name.endswith("norm.weight") else noise * shape[-1] ** -0.5
        if len(shape) == 2:
            weights[name] = weights[name].bfloat16()
    return GatedDeltaNetForCausalLM(LARGE, weights)


@dataclass
class Round:
    """B sequences with the same tree of drafts, and what a call of the target made of them."""

    logits: Tensor  # [B, N, V]
    tokens: Tensor  # int64 [B, N]
    parents: Tensor  # int32 [B, N]
    draft_probs: Tensor  # [B * N, V]
    draft_rows: Tensor  # int32 [B, N]
    settings: dict[str, Tensor]

    @classmethod
    def drawn(
        cls, logits: Tensor, rule: AcceptRule, parents: list[int], settings: dict[str, float], seed: int
    ) -> Round:
        """Drafts from softmax(logits + noise), children of a node as the rule wants them drawn."""
        B, N, V = logits.shape
        near = logits + NOISE * torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
        rows = _settings(settings, B * N)
        probs = ops.sampling_probs(near.view(B * N, V), **rows)
        apart = rule in (
            AcceptRule.RECURSIVE_WITHOUT_REPLACEMENT,
            AcceptRule.TRAVERSAL_WITHOUT_REPLACEMENT,
        )
        nodes = torch.arange(N, dtype=torch.int32).repeat(B)
        seeds = torch.arange(B).repeat_interleave(N) + 1000 * seed
        positions = torch.zeros(B * N, dtype=torch.long)
        drawn = ops.draw_tokens(
            probs, 2, replacement=not apart, seeds=seeds, positions=positions, nodes=nodes
        ).view(B, N, 2)
        drawn.clamp_(min=0)  # a row with one token only: the second is drafted in vain
        tokens = torch.zeros(B, N, dtype=torch.long)
        draft_rows = torch.zeros(B, N, dtype=torch.int32)
        taken = [0] * N
        for n in range(1, N):
            tokens[:, n] = drawn[:, parents[n], taken[parents[n]]]
            draft_rows[:, n] = torch.arange(B, dtype=torch.int32) * N + parents[n]
            taken[parents[n]] += 1
        tree = torch.tensor([parents] * B, dtype=torch.int32)
        return cls(logits, tokens, tree, probs, draft_rows, _settings(settings, B))

    def accept(self, rule: AcceptRule, seed: int) -> ops.Accepted:
        B = self.tokens.shape[0]
        return ops.accept_sampled(
            self.logits,
            self.tokens,
            self.parents,
            rules=torch.full((B,), int(rule), dtype=torch.int32),
            seeds=torch.arange(B) + SEED_STEP * seed,
            positions=torch.full((B,), POSITION),
            draft_probs=self.draft_probs,
            draft_rows=self.draft_rows,
            **self.settings,
        )

    def check(self, rule: AcceptRule, seed: int) -> None:
        """Raises AssertionError where `accept` decides otherwise than the rule in Python on the same rows."""
        got = self.accept(rule, seed)
        B, N = self.tokens.shape
        for b in range(B):
            settings = {name: value[b].repeat(N) for name, value in self.settings.items()}
            p = ops.sampling_probs(self.logits[b], **settings).double().numpy()  # [N, V]
            q = self.draft_probs.numpy()
            rows = self.draft_rows[b].tolist()
            path, token = walk(
                rule,
                p.__getitem__,
                lambda node, q=q, rows=rows: q[rows[node]],
                self.tokens[b].tolist(),
                self.parents[b].tolist(),
                SeededDecisions(b + SEED_STEP * seed, POSITION),
            )
            length = int(got.path_lengths[b])
            found = got.path[b, :length].tolist(), int(got.next_token[b])
            assert found == (path, token), f"{rule.name}: the operator gave {found}, want {(path, token)}"


def _settings(settings: dict[str, float], rows: int) -> dict[str, Tensor]:
    return {
        name: torch.full((rows,), value, dtype=torch.int32 if name == "top_k" else torch.float32)
        for name, value in settings.items()
    }


def seconds_of(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def random_tokens(vocab: int, B: int) -> list[list[int]]:
    """B sequences of 24 tokens and a round's."""
    rng = torch.Generator().manual_seed(B)
    return torch.randint(0, vocab, (B, 24 + DRAFTS + 1), generator=rng).tolist()  # type: ignore[no-any-return]


def text_tokens(B: int) -> list[list[int]]:
    """B of the bundled prompts, each of another kind."""
    prompts = load_prompts()
    tokenizer = specdec.load_tokenizer("gdn-code")
    return [tokenizer.encode(prompt.prompt) for prompt in prompts[:: len(prompts) // B][:B]]


def measure(
    model: GatedDeltaNetForCausalLM, sequences: list[list[int]], turns: int
) -> Iterator[dict[str, Any]]:
    """One record for each rule and each of the settings; the last tokens of the sequences are verified."""
    B, N = len(sequences), DRAFTS + 1
    cache = model.new_cache(B)
    slots = list(range(B))
    model.prefill([tokens[:-N] for tokens in sequences], cache=cache, slots=slots)
    slot_tensor = torch.tensor(slots, dtype=torch.int32)
    chain = torch.tensor([tokens[-N:] for tokens in sequences])
    tree = torch.tensor([TREE] * B, dtype=torch.int32)
    depths = [0] * N
    for n in range(1, N):
        depths[n] = depths[TREE[n]] + 1

    def verify(shape: str) -> Tensor:
        if shape == "chain":
            return model.forward(chain, cache=cache, slots=slot_tensor)[0]
        return model.forward(chain[:, depths], cache=cache, slots=slot_tensor, parents=tree)[0]

    logits = {shape: verify(shape) for shape in ("tree", "chain")}
    for name, settings in SETTINGS.items():
        for rule_name, (rule, parents) in RULES.items():
            shape = "chain" if parents is CHAIN else "tree"
            sets = [Round.drawn(logits[shape], rule, parents, settings, s) for s in range(SETS)]
            sets[0].check(rule, 0)
            verified, accepted, lengths = [], [], []
            for _ in range(turns):
                verified.append(seconds_of(lambda s=shape: verify(s)))
                times = []
                for s, drafted in enumerate(sets):
                    begin = time.perf_counter()
                    result = drafted.accept(rule, s)
                    times.append(time.perf_counter() - begin)
                    lengths.append(result.path_lengths.float().mean().item())
                accepted.append(statistics.mean(times))
            yield {
                "batch": B,
                "vocabulary": model.vocab_size,
                "rule": rule_name,
                "settings": name,
                "accepted_length": statistics.mean(lengths),
                "acceptance_us": statistics.median(accepted) * 1e6,
                "round_us": statistics.median(verified) * 1e6,
            }


def main(
    turns: Annotated[int, typer.Option(help="Rounds timed for each row of the table.")] = 15,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    large: Annotated[bool, typer.Option(help="Also the model with V = 150,000.")] = True,
) -> None:
    """Prints acceptance as a share of a verification round."""
    torch.set_grad_enabled(False)
    console = Console(width=110)
    console.print(machine())
    targets = {"gdn-code": specdec.load_model("gdn-code")}
    if large:
        targets["random"] = large_model()
    records = []
    for target, model in targets.items():
        c = model.config
        title = (
            f"{target}: V = {c.vocab_size}, hidden {c.hidden_size}, {c.num_hidden_layers} layers, "
            f"{c.num_parameters / 1e6:.0f}M weights; {DRAFTS} drafts"
        )
        runs = [(B, "random tokens", random_tokens(c.vocab_size, B)) for B in (1, 4)]
        if target == "gdn-code":
            runs += [(B, "text", text_tokens(B)) for B in (1, 4)]
        for B, verified, sequences in runs:
            caption = f"{title}, batch {B}, {verified}"
            table = Table("rule", "settings", "path", "us", "round us", "share", title=caption)
            for record in measure(model, sequences, turns):
                records.append({"target": target, "verified": verified, **record})
                share = record["acceptance_us"] / record["round_us"]
                table.add_row(
                    record["rule"],
                    record["settings"],
                    f"{record['accepted_length']:.1f}",
                    f"{record['acceptance_us']:.0f}",
                    f"{record['round_us']:.0f}",
                    f"{share:.1%}",
                )
            console.print(table)
    if json_path is not None:
        json_path.write_text(json.dumps({"machine": machine(), "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
