"""Training: the chunked rule and its gradients, resuming to the bit, and a model directory at the end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from small_training import interrupted
from specdec.models.checkpoint import expected_tensors, load_config, load_weights, save_model
from specdec.models.config import GatedDeltaNetConfig
from specdec.models.reference import ReferenceGatedDeltaNet
from specdec.models.tokenizer import Tokenizer
from specdec.training.chunked import gated_delta_chunked
from specdec.training.corpus import TokenWindows, read_texts, train_tokenizer, write_tokens
from specdec.training.loop import Training, TrainingOptions
from specdec.training.model import TrainableGatedDeltaNet, dropout_rates
from specdec.training.pretrain import app

SMALL = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 1, "num_v_heads": 2,
    "head_dim": 16, "expand_v": 1.0, "intermediate_size": 48, "tie_word_embeddings": True,
    "bos_token_id": 0, "eos_token_id": 0, "early_exit_layers": [1],
}  # fmt: skip


def small(**changes: object) -> GatedDeltaNetConfig:
    return GatedDeltaNetConfig.from_dict({**SMALL, **changes})


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 20 KB of repetitive text in several files, and files that must be left out."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "sub").mkdir()
    for i in range(8):
        lines = [f"def add_{i}_{j}(x, y):\n    return x + y * {j}\n" for j in range(50)]
        (folder / ("sub" if i % 2 else ".") / f"file{i}.py").write_text("\n".join(lines))
    (folder / "binary.dat").write_bytes(b"\xff\xfe\x00binary")
    (folder / "empty.txt").write_text("")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "x.py").write_text("HIDDEN " * 100)
    return folder


def sequential(q, k, v, g, beta):
    """The recurrence token by token, in the shapes of `gated_delta_chunked`."""
    state = q.new_zeros(q.shape[0], q.shape[2], v.shape[-1], q.shape[-1])
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        write = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhvk,bhk->bhv", state, k[:, t]))
        state = state + torch.einsum("bhv,bhk->bhvk", write, k[:, t])
        out.append(torch.einsum("bhvk,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1)


def rule_inputs(length: int, seed: int, decay: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(2, length, 3, *shape, generator=generator, dtype=torch.float64)

    k = torch.nn.functional.normalize(normal(5), dim=-1)
    return [normal(5), k, normal(7), -decay * normal().exp(), 2 * normal().sigmoid()]


@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (7, 4), (64, 32), (65, 32), (50, 1), (33, 64)])
@pytest.mark.parametrize("decay", [0.05, 30.0])
def test_chunked_rule_and_gradients_equal_the_recurrence(length: int, chunk: int, decay: float) -> None:
    results = []
    for rule in (sequential, lambda *x: gated_delta_chunked(*x, chunk=chunk)):
        inputs = [x.clone().requires_grad_() for x in rule_inputs(length, seed=length, decay=decay)]
        out = rule(*inputs)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        (out * weight).sum().backward()
        results.append([out, *(x.grad for x in inputs)])
    for ours, expected in zip(*reversed(results), strict=True):
        # float64; beta up to 2 lets errors grow by a few orders of magnitude over a chunk.
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_gate": False, "tie_word_embeddings": False},
        {"use_short_conv": False},
        {"conv_bias": True, "allow_neg_eigval": True},
    ],
    ids=str,
)
def test_the_trainable_model_is_the_reference_model(changes: dict) -> None:
    config = small(**changes)
    torch.manual_seed(4)
    model = TrainableGatedDeltaNet(config).double()
    weights = model.state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == expected_tensors(config)
    tokens = torch.randint(0, 300, (2, 70))
    logits = model(tokens)
    assert list(logits) == [1, 3]
    reference = ReferenceGatedDeltaNet(config, weights, torch.float64).forward(tokens)
    torch.testing.assert_close(logits[3].detach(), reference, rtol=1e-9, atol=1e-9)
    # An exit is the model cut off after that layer, which has the same tensors under the same names.
    short = small(**changes, num_hidden_layers=1, early_exit_layers=[])
    cut = ReferenceGatedDeltaNet(short, {n: weights[n] for n in expected_tensors(short)}, torch.float64)
    torch.testing.assert_close(logits[1].detach(), cut.forward(tokens), rtol=1e-9, atol=1e-9)


def test_dropped_layers_are_skipped_for_their_sequences_alone() -> None:
    config = small()
    torch.manual_seed(0)
    model = TrainableGatedDeltaNet(config).double()
    tokens = torch.randint(0, 300, (2, 9))
    keep = torch.tensor([[True, True], [True, False], [False, False]])
    mixed = model(tokens, keep)[3]
    for row, layers in ((0, [0, 1]), (1, [0])):
        weights = model.state_dict()
        short = small(num_hidden_layers=len(layers), early_exit_layers=[])
        part = ReferenceGatedDeltaNet(short, {n: weights[n] for n in expected_tensors(short)}, torch.float64)
        torch.testing.assert_close(mixed[row].detach(), part.forward(tokens)[row], rtol=1e-9, atol=1e-9)
    rates = dropout_rates(10, 0.15)
    assert rates[0] == 0
    assert float(rates[-1]) == pytest.approx(0.15)
    assert (rates.diff() > 0).all()
    assert dropout_rates(1, 0.5).tolist() == [0.0]


def test_corpus(text_folder: Path, tmp_path: Path) -> None:
    texts = list(read_texts(text_folder, seed=1))
    assert len(texts) == 8
    assert not any("HIDDEN" in text for text in texts)
    assert texts == list(read_texts(text_folder, seed=1))
    assert texts != list(read_texts(text_folder, seed=2))
    backend = train_tokenizer(text_folder, 300, seed=1)
    total = write_tokens(text_folder, backend, tmp_path / "tokens.bin", seed=1)
    windows = TokenWindows(tmp_path / "tokens.bin", 16, seed=3)
    assert (windows.num_training + windows.num_held_out) == (total - 1) // 16
    epoch = [windows.batch(step, 1)[0].tolist() for step in range(windows.num_training)]
    held = [row.tolist() for batch in windows.held_out(2, 10_000) for row in batch]
    assert len(held) == windows.num_held_out
    # One epoch and the held-out part are every window once, in another order; neighbours share one token.
    joined = backend.encode("".join(texts), add_special_tokens=False).ids
    assert abs(len(joined) - total) < 20
    assert sorted(t for row in epoch + held for t in row[:-1]) == sorted(
        torch.from_numpy(
            windows._tokens[: (windows.num_training + windows.num_held_out) * 16].astype("int64")
        ).tolist()
    )
    again = [
        windows.batch(step, 1)[0].tolist() for step in range(windows.num_training, 2 * windows.num_training)
    ]
    assert sorted(again) == sorted(epoch)
    assert again != epoch
    # A batch can be asked for again, and across an epoch's end.
    size = windows.num_training - 1
    assert windows.batch(0, size)[:3].tolist() == epoch[:3]
    assert windows.batch(1, size)[:2].tolist() == [epoch[-1], again[0]]


def options(**changes: object) -> TrainingOptions:
    values = {"config": small(), "tokens": 12 * 4 * 24, "batch_size": 4, "seq_len": 24, "lr": 5e-3, "seed": 7}
    return TrainingOptions(**{**values, **changes})  # type: ignore[arg-type]


def prepared(text_folder: Path, out: Path) -> Path:
    out.mkdir()
    write_tokens(text_folder, train_tokenizer(text_folder, 300, seed=0), out / "tokens.bin", seed=0)
    return out


def test_resumed_run_is_bit_equal(text_folder: Path, tmp_path: Path) -> None:
    whole = Training(prepared(text_folder, tmp_path / "whole"), options())
    assert whole.options.steps == 12
    assert whole.run(every=5)
    parts = Training(prepared(text_folder, tmp_path / "parts"), options())
    assert not parts.run(lambda: parts.step == 3, every=5)
    parts = Training.resume(tmp_path / "parts")
    assert parts.step == 3
    assert not parts.run(lambda: parts.step == 8, every=5)
    parts = Training.resume(tmp_path / "parts")
    assert parts.options == whole.options
    assert parts.run(every=5)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, parts.model.state_dict()[name]), name
    assert parts.history.training == whole.history.training
    assert parts.history.held_out == whole.history.held_out
    assert [step for step, _ in whole.history.training] == list(range(12))
    assert [step for step, _ in whole.history.held_out] == [5, 10, 12]
    for file in ("training.safetensors", "model.safetensors"):
        one, two = (load_file(tmp_path / name / file) for name in ("whole", "parts"))
        assert one.keys() == two.keys()
        assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    # Another seed gives another run: the comparison above can fail.
    other = Training(prepared(text_folder, tmp_path / "other"), options(seed=8))
    other.train_step()
    assert other.history.training[0] != whole.history.training[0]


def test_training_learns_and_ends_as_a_model(text_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    arguments = ["--text", str(text_folder), "--out", str(out), "--config", str(tmp_path / "config.json")]
    arguments += [
        "--tokens",
        "9600",
        "--batch-size",
        "4",
        "--seq-len",
        "48",
        "--exit-layers",
        "1,2",
        "--lr",
        "0.01",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "held-out loss" in result.output
    history = json.loads((out / "losses.json").read_text())
    losses = [loss for _, loss in history["training"]]
    assert len(losses) == 50
    # log(300) = 5.7 nats at the start; this text is close to a template.
    assert losses[0] == pytest.approx(5.7, abs=0.3)
    assert sum(losses[-5:]) / 5 < 0.6 * losses[0]
    assert list(history["held_out"][-1][1]) == ["1", "2", "3"]
    assert (out / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert not list(out.glob("*.partial"))

    config = load_config(out)
    assert config.early_exit_layers == (1, 2)
    assert load_weights(out, config, dtype=torch.bfloat16)["model.embeddings.weight"].dtype == torch.bfloat16
    tokenizer = Tokenizer.from_directory(out, config.bos_token_id)
    assert tokenizer.vocab_size == config.vocab_size
    tokens = tokenizer.encode("def add_1_1(x, y):\n    return x + y")
    logits = ReferenceGatedDeltaNet.from_directory(out).forward(torch.tensor([tokens]))
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], torch.tensor(tokens[1:]))
    assert float(loss) < 0.8 * losses[0]

    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 2
    assert "holds a run already" in again.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--text is missing"),
        (["--text", "/nowhere"], "'/nowhere' is not a folder"),
        (["--text", "TEXT", "--lr", "0"], "lr: got 0.0, want a number above 0"),
        (["--text", "TEXT", "--layer-dropout", "1"], "--layer-dropout: got 1.0"),
        (["--text", "TEXT", "--seq-len", "0"], "--seq-len: got 0, want an integer, at least 1"),
        (["--text", "TEXT", "--exit-layers", "two"], "--exit-layers: got 'two'"),
        (["--text", "TEXT", "--exit-layers", "99"], "early_exit_layers"),
        (["--text", "TEXT", "--config", "/nowhere.json"], "/nowhere.json: cannot be read"),
        (["--text", "TEXT", "--tokenizer", "/nowhere"], "has no tokenizer.json"),
        (["--text", "TEXT", "--seq-len", "100000"], "want at least 200001 (two windows of 100000)"),
        (["--resume"], "has no training.safetensors to resume from"),
        (["--resume", "--lr", "0.1"], "--lr: not with --resume"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_2(
    text_folder: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    arguments = [str(text_folder) if part == "TEXT" else part for part in arguments]
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2
    error = result.stderr.strip()
    assert error.startswith("error: ")
    assert "\n" not in error
    assert message in error
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_state_of_another_kind_is_refused(text_folder: Path, tmp_path: Path) -> None:
    out = prepared(text_folder, tmp_path / "out")
    torch.manual_seed(0)
    save_model(out, small(), TrainableGatedDeltaNet(small()).state_dict())
    os.replace(out / "model.safetensors", out / "training.safetensors")
    with pytest.raises(ValueError, match="not the state of a run"):
        Training.resume(out)
    run = Training(out, options())
    run.train_step()
    run.save()
    (out / "losses.json").write_text("{}")
    with pytest.raises(ValueError, match="not the state of a run"):
        Training.resume(out)


def test_ctrl_c_saves(text_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    arguments = ["--text", text_folder, "--out", out, "--config", tmp_path / "config.json"]
    arguments += ["--tokens", "100000000", "--batch-size", "1", "--seq-len", "16"]
    # The first save, after 200 steps.
    interrupted(["specdec.training.pretrain", *map(str, arguments)], out / "model.safetensors")
    assert Training.resume(out).step > 200
