"""The plain-torch model against golden.json, which comes from an independent float64 implementation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specdec.models.checkpoint import expected_tensors, load_config, load_weights, resolve_model
from specdec.models.config import GatedDeltaNetConfig
from specdec.models.reference import ReferenceGatedDeltaNet
from specdec.models.tokenizer import Tokenizer

GOLDEN = json.loads((Path(__file__).parent / "data" / "gdn_code_golden.json").read_text(encoding="utf-8"))
ENTRIES = GOLDEN["entries"]

# Both sides are float64 with sums of at most a few thousand terms of size about 10 through 10 layers; the
# golden file's author states agreement of two orders of summation to 1e-9.
GOLDEN_TOLERANCE = 1e-8


@pytest.fixture(scope="module")
def double_model() -> ReferenceGatedDeltaNet:
    return ReferenceGatedDeltaNet.from_directory("gdn-code", dtype=torch.float64)


def random_model(dtype: torch.dtype, seed: int = 0, **changes: object) -> ReferenceGatedDeltaNet:
    """A small model with random weights; `changes` are config.json keys."""
    values: dict[str, object] = {
        "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3, "num_heads": 2, "num_v_heads": 4,
        "head_dim": 8,
        "expand_v": 1.5, "intermediate_size": 40, "eos_token_id": None, "early_exit_layers": [1],
    }  # fmt: skip
    config = GatedDeltaNetConfig.from_dict({**values, **changes})
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * (0.3 if len(shape) > 1 else 0.5)
        for name, shape in expected_tensors(config).items()
    }
    return ReferenceGatedDeltaNet(config, weights, dtype)


@pytest.mark.parametrize("entry", ENTRIES, ids=[repr(e["prompt"][:16]) for e in ENTRIES])
def test_golden_logits_and_greedy_tokens(double_model: ReferenceGatedDeltaNet, entry: dict) -> None:
    tokens = torch.tensor([entry["prompt_tokens"]])
    state = double_model.initial_state(1)
    logits = double_model.forward(tokens, state)[0]
    expected = torch.tensor(entry["logsumexp_rows"], dtype=torch.float64)
    assert (logits.logsumexp(-1) - expected).abs().max() < GOLDEN_TOLERANCE
    assert logits.argmax(-1).tolist() == entry["argmax_rows"]
    values, indices = logits[-1].topk(len(entry["logits_last_row_top"]))
    assert indices.tolist() == [token for token, _ in entry["logits_last_row_top"]]
    for value, (_, wanted) in zip(values.tolist(), entry["logits_last_row_top"], strict=True):
        assert abs(value - wanted) < GOLDEN_TOLERANCE

    greedy, gap = [int(logits[-1].argmax())], torch.inf
    while len(greedy) < len(entry["greedy_tokens"]):
        best = double_model.step(torch.tensor(greedy[-1:]), state)[0].topk(2)
        greedy.append(int(best.indices[0]))
        gap = min(gap, float(best.values[0] - best.values[1]))
    assert greedy == entry["greedy_tokens"]
    # The file's gap may include the prompt's last row, which is not part of this loop.
    first = logits[-1].topk(2).values
    assert abs(min(gap, float(first[0] - first[1])) - entry["min_top2_gap"]) < GOLDEN_TOLERANCE


def test_golden_tokens_come_from_the_embedded_tokenizer() -> None:
    directory = resolve_model("gdn-code")
    tokenizer = Tokenizer.from_directory(directory, load_config(directory).bos_token_id)
    for entry in ENTRIES:
        assert tokenizer.encode(entry["prompt"]) == entry["prompt_tokens"]
        assert tokenizer.decode(entry["greedy_tokens"]) == entry["greedy_text"]


def test_float32_is_close_to_float64_and_gives_the_golden_tokens(
    double_model: ReferenceGatedDeltaNet,
) -> None:
    single = ReferenceGatedDeltaNet.from_directory("gdn-code")
    for entry in ENTRIES[:2]:
        tokens = torch.tensor([entry["prompt_tokens"] + entry["greedy_tokens"]])
        wide, narrow = double_model.forward(tokens), single.forward(tokens)
        # Each of 10 layers adds a relative rounding error of about sqrt(1024) eps to a residual stream that
        # ends in logits of size about 20: 10 * 32 * 6e-8 * 20 = 4e-4, with a factor of 2.5 for amplification
        # through the norms.
        assert (wide - narrow.double()).abs().max() < 1e-3
        start = len(entry["prompt_tokens"]) - 1
        assert narrow[0, start:-1].argmax(-1).tolist() == entry["greedy_tokens"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_gate": False},
        {"use_short_conv": False},
        {"conv_size": 1},
        {"conv_bias": True, "conv_size": 3},
        {"allow_neg_eigval": True, "tie_word_embeddings": True},
        {"num_v_heads": None, "expand_v": 1.0},
    ],
    ids=str,
)
def test_steps_equal_forward_however_it_is_split(changes: dict) -> None:
    model = random_model(torch.float64, seed=1, **changes)
    tokens = torch.randint(0, model.config.vocab_size, (3, 13), generator=torch.Generator().manual_seed(2))
    whole_state = model.initial_state(3)
    whole = model.forward(tokens, whole_state)
    state = model.initial_state(3)
    parts = [model.forward(tokens[:, :2], state), model.forward(tokens[:, 2:9], state)]
    snapshot = state.clone()
    parts += [model.step(tokens[:, t], state)[:, None] for t in range(9, 13)]
    # float64 through 3 layers with at most 40 terms a sum.
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-11, atol=1e-11)
    for name in ("recurrent", "conv"):
        for a, b in zip(getattr(state, name), getattr(whole_state, name), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    again = model.step(tokens[:, 9], snapshot)
    torch.testing.assert_close(again, whole[:, 9], rtol=1e-11, atol=1e-11)
    # Rows do not see each other.
    torch.testing.assert_close(model.forward(tokens[1:2]), whole[1:2], rtol=1e-11, atol=1e-11)


def test_mixer_against_the_textbook_formula() -> None:
    """One layer by hand, in the notation of the paper: S_t = S_{t-1} (a (I - b k k^T)) + b v k^T."""
    model = random_model(
        torch.float64, seed=3, num_hidden_layers=1, early_exit_layers=[], allow_neg_eigval=True
    )
    c = model.config
    generator = torch.Generator().manual_seed(3)
    w = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * (0.3 if len(shape) > 1 else 0.5)
        for name, shape in expected_tensors(c).items()
    }
    tokens = torch.tensor([5, 9, 5, 60, 0, 17])

    def layer(name: str) -> torch.Tensor:
        return w[f"model.layers.0.{name}"]

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * weight

    def silu(x: torch.Tensor) -> torch.Tensor:
        return x / (1 + (-x).exp())

    x = w["model.embeddings.weight"][tokens]
    h = norm(x, layer("attn_norm.weight"))
    streams = {}
    for s in "qkv":
        raw = h @ layer(f"attn.{s}_proj.weight").T
        taps = layer(f"attn.{s}_conv1d.weight")[:, 0]
        streams[s] = torch.zeros_like(raw)
        for t in range(len(tokens)):
            for i in range(c.conv_size):
                if t - i >= 0:
                    streams[s][t] += taps[:, c.conv_size - 1 - i] * raw[t - i]
        streams[s] = silu(streams[s])
    decay = (
        -layer("attn.A_log").exp()
        * (1 + (h @ layer("attn.a_proj.weight").T + layer("attn.dt_bias")).exp()).log()
    ).exp()
    beta = 2 / (1 + (-(h @ layer("attn.b_proj.weight").T)).exp())
    heads = []
    for hv in range(c.num_v_heads):
        hk = hv // (c.num_v_heads // c.num_heads)
        state = torch.zeros(c.head_v_dim, c.head_k_dim, dtype=torch.float64)
        rows = []
        for t in range(len(tokens)):
            q = streams["q"][t, hk * c.head_k_dim : (hk + 1) * c.head_k_dim]
            k = streams["k"][t, hk * c.head_k_dim : (hk + 1) * c.head_k_dim]
            v = streams["v"][t, hv * c.head_v_dim : (hv + 1) * c.head_v_dim]
            q, k = (z / (z.square().sum() + 1e-6).sqrt() for z in (q, k))
            erase = torch.eye(c.head_k_dim, dtype=torch.float64) - beta[t, hv] * torch.outer(k, k)
            state = decay[t, hv] * state @ erase + beta[t, hv] * torch.outer(v, k)
            rows.append(state @ q / c.head_k_dim**0.5)
        heads.append(norm(torch.stack(rows), layer("attn.o_norm.weight")))
    mixed = torch.cat(heads, -1) * silu(h @ layer("attn.g_proj.weight").T)
    x = x + mixed @ layer("attn.o_proj.weight").T
    h = norm(x, layer("mlp_norm.weight"))
    x = (
        x
        + (silu(h @ layer("mlp.gate_proj.weight").T) * (h @ layer("mlp.up_proj.weight").T))
        @ layer("mlp.down_proj.weight").T
    )
    expected = norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T
    torch.testing.assert_close(model.forward(tokens[None])[0], expected, rtol=1e-11, atol=1e-11)


def test_weights_that_do_not_fit_are_refused() -> None:
    directory = resolve_model("gdn-code")
    config = load_config(directory)
    weights = load_weights(directory, config)
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1]
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \[255\], want \[256\]"):
        ReferenceGatedDeltaNet(config, weights)
