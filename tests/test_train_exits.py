"""Training of exit adapters: frozen models, loss, sampled vocabulary, resuming, files, the command."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from small_training import gated_deltanet, interrupted, llama, write_text
from specdec.cli.app import app
from specdec.models import load_model
from specdec.models.exit_adapter import ExitAdapters, ExitAdaptersConfig
from specdec.models.features import Feature, FeatureTap
from specdec.training import exit_loop, running
from specdec.training.distillation import VocabularySample, distillation_loss
from specdec.training.evaluation import exit_agreement
from specdec.training.exit_loop import ExitTraining
from specdec.training.exit_model import TrainableExitAdapters
from specdec.training.exit_run import ExitRequest, prepare
from specdec.training.features import FeatureCache
from specdec.training.llama_target import FrozenLlama
from specdec.training.target import FrozenTarget, frozen_model

FAMILIES = {"gated deltanet": gated_deltanet, "llama": llama}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def models(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make(text, tmp_path_factory.mktemp("model")) for name, make in FAMILIES.items()}


def started(text: Path, model: Path, out: Path, **changes: object) -> ExitTraining:
    values = {"exits": "1,2", "width": 40, "tokens": 9 * 4 * 32, "batch_size": 4, "seq_len": 32, "seed": 5}
    request = ExitRequest(str(model), text, out, **{**values, **changes})  # type: ignore[arg-type]
    cache, begin = prepare(request, lambda line: None)
    assert cache.compute()
    return begin()


def test_a_frozen_llama_computes_what_the_model_does(text: Path, tmp_path: Path) -> None:
    directory = llama(text, tmp_path, tie_word_embeddings=False)
    model = load_model(directory)
    frozen = FrozenLlama(directory, autocast=False)
    features = [Feature("hidden", layer) for layer in (0, 2, 3)]
    tokens = torch.randint(0, 300, (3, 70), generator=torch.Generator().manual_seed(1))
    rows = []
    for read in (
        lambda tap: frozen.read(tokens, tap),
        lambda tap: model.prefill(tokens.tolist(), cache=model.new_cache(3), slots=range(3), tap=tap),
    ):
        tap = FeatureTap(features)
        read(tap)
        rows.append(tap.rows())
    # Four layers of sums of up to 77 terms and attention over 70 tokens, in two orders.
    terms = 4 * (frozen.hidden_size + 77 + 70)
    tolerance = terms * torch.finfo(torch.float32).eps * float(rows[1].abs().max())
    torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=tolerance)
    last = rows[0][..., -frozen.hidden_size :]
    logits = frozen.final_norm(last) @ frozen.head.T
    torch.testing.assert_close(logits, model.readout(rows[1][..., -60:].contiguous()), rtol=0, atol=tolerance)
    assert [frozen.feature_size(feature) for feature in features] == [60] * 3
    for wrong in (Feature("hidden", 4), Feature("readout", 0)):
        with pytest.raises(ValueError, match="feature: got"):
            frozen.feature_size(wrong)
    in_bfloat16 = FeatureTap(features)
    FrozenLlama(directory, autocast=True).read(tokens, in_bfloat16)
    error = (in_bfloat16.rows() - rows[1]).norm() / rows[1].norm()
    assert (
        tolerance < float(error) < 4 * torch.finfo(torch.bfloat16).eps
    )  # products are rounded, sums are not


def test_both_families_are_read(models: dict[str, Path]) -> None:
    assert isinstance(frozen_model(models["llama"]), FrozenLlama)
    assert isinstance(frozen_model(models["gated deltanet"]), FrozenTarget)


@pytest.mark.parametrize("biased", [False, True])
def test_divergence_of_exits_and_its_gradient(biased: bool) -> None:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    head, targets, weights = normal(11, 6), normal(2, 5, 6), [0.7, 0.3]
    bias = normal(11).abs() if biased else None
    outputs = [normal(2, 5, 6).requires_grad_() for _ in weights]
    loss, each = distillation_loss(outputs, targets, head, weights, later=False, bias=bias)
    loss.backward()
    plain = [x.detach().double().requires_grad_() for x in outputs]
    added = 0.0 if bias is None else bias.double()
    p = (targets.double() @ head.double().T + added).log_softmax(-1)
    terms = [(p.exp() * (p - (x @ head.double().T + added).log_softmax(-1))).sum(-1).mean() for x in plain]
    total = sum(w * term for w, term in zip(weights, terms, strict=True))
    total.backward()
    # As in the test of a drafter's: 6 products, 11 exponentials, a logarithm.
    magnitude = max(float((x.detach().abs() @ head.abs().T).max()) for x in [targets, *outputs]) + 4
    tolerance = 2 * (6 + 11 + 1) * torch.finfo(torch.float32).eps * magnitude
    torch.testing.assert_close(each.double(), torch.stack(terms).detach(), rtol=0, atol=tolerance)
    for x, exact in zip(outputs, plain, strict=True):
        torch.testing.assert_close(
            x.grad.double(), exact.grad, rtol=0, atol=tolerance * float(head.abs().max())
        )


def test_figures_of_exits_are_those_of_plain_code() -> None:
    generator = torch.Generator().manual_seed(3)
    head, targets = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (11, 40))
    near = targets + 0.5 * torch.randn(40, 6, generator=generator, dtype=torch.float64)
    far = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    logits = targets @ head.T
    found = exit_agreement([targets, near, far], targets, head)
    for (kl, agreement), output in zip(found, (targets, near, far), strict=True):
        theirs = output @ head.T
        plain = F.kl_div(
            theirs.log_softmax(-1), logits.log_softmax(-1), log_target=True, reduction="batchmean"
        )
        assert kl == pytest.approx(float(plain), abs=1e-12)
        assert agreement == float((theirs.argmax(-1) == logits.argmax(-1)).double().mean())
    assert found[0][1] == 1.0 > found[1][1] > found[2][1]


def test_a_sampled_vocabulary_stands_for_all_of_it() -> None:
    """Its sums of exponentials are right on average, and it is repeated by seed and step."""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
    frequent = torch.tensor([3, 8, 20])
    sample = VocabularySample(frequent, 50, 9, seed=4)
    sums = []
    for step in range(2000):
        tokens, bias = sample.at(step)
        assert len(set(tokens.tolist())) == len(tokens) == len(bias) == 12
        assert tokens[:3].tolist() == [3, 8, 20]
        sums.append(float((logits[tokens] + bias).exp().sum()))
    found = torch.tensor(sums, dtype=torch.float64)
    error = (found.mean() - logits.double().exp().sum()).abs()
    assert float(error) < 4 * float(found.std()) / len(sums) ** 0.5
    assert torch.equal(sample.at(7)[0], VocabularySample(frequent, 50, 9, seed=4).at(7)[0])
    assert not torch.equal(sample.at(7)[0], sample.at(8)[0])
    assert not torch.equal(sample.at(7)[0], VocabularySample(frequent, 50, 9, seed=5).at(7)[0])
    whole = VocabularySample(frequent, 50, 99, seed=4).at(0)
    assert (sorted(whole[0].tolist()), float(whole[1].abs().max())) == (list(range(50)), 0.0)
    alone = VocabularySample(frequent, 50, 0, seed=4).at(0)
    assert (alone[0].tolist(), alone[1].tolist()) == ([3, 8, 20], [0.0] * 3)


def test_what_is_trained_is_what_is_run() -> None:
    """The adapters of training are those of inference, and begin as the identity."""
    torch.manual_seed(0)
    config = ExitAdaptersConfig({1: 24, 3: 7}, "m", "0" * 64, 5, 61, 1e-5)
    trained = TrainableExitAdapters(config.widths, config.hidden_size, config.norm_eps)
    assert {name: tuple(x.shape) for name, x in trained.state_dict().items()} == config.tensors()
    x = torch.randn(2, 4, 61)
    assert all(torch.equal(y, x) for y in trained({1: x, 3: x}).values())
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
        expected = trained({1: x, 3: x})
    run = ExitAdapters.of(config, trained.state_dict())
    for exit in (1, 3):
        # Products of 61 and 24 terms in two orders.
        size = float(expected[exit].abs().max()) * 61 * 24**0.5
        torch.testing.assert_close(
            run.apply(exit, x), expected[exit], rtol=0, atol=size * torch.finfo(torch.float32).eps
        )


def test_a_norm_starts_with_channels_of_equal_size() -> None:
    torch.manual_seed(0)
    trained = TrainableExitAdapters({2: 8}, 16, 1e-6)
    hidden = torch.randn(500, 16) * torch.logspace(-2, 2, 16)
    hidden[:, 3] = 0.0
    trained.balance(2, hidden)
    normed = trained.exits["2"].norm(hidden)
    sizes = normed.square().mean(0).sqrt()
    kept = [i for i in range(16) if i != 3]
    torch.testing.assert_close(sizes[kept], torch.ones(15), rtol=1e-4, atol=0)
    assert bool(torch.isfinite(normed).all())


@pytest.mark.parametrize(("family", "loss_vocab"), [("gated deltanet", 8192), ("llama", 8192), ("llama", 80)])
def test_training_raises_agreement_and_ends_as_adapters(
    family: str, loss_vocab: int, text: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    changes = {"tokens": 60 * 8 * 32, "batch_size": 8, "lr": 1e-2, "loss_vocab": loss_vocab}
    run = started(text, models[family], tmp_path / "out", **changes)
    assert run.run()
    before, after = run.history.held_out[0][1], run.history.held_out[-1][1]
    assert [step for step, _ in run.history.held_out] == [0, 60]
    for exit in ("1", "2"):
        assert after[exit]["kl"] < 0.8 * before[exit]["kl"]
        assert 1 - after[exit]["agreement"] < 0.9 * (1 - before[exit]["agreement"])
    losses = [loss for _, loss in run.history.training]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    model = load_model(models[family])
    adapters = ExitAdapters.from_directory(tmp_path / "out", model)
    assert list(adapters) == [1, 2]
    # Read off the model as it runs, with the adapters as they are stored, the agreement is the same.
    windows = list(run.windows.held_out_indices(1, 32))
    right = {1: 0, 2: 0}
    total = 0
    for window in windows:
        tokens = run.windows.rows(window)[:, :-1]
        tap = FeatureTap([Feature("hidden", layer) for layer in (0, 1, model.num_layers - 1)])
        model.prefill(tokens.tolist(), cache=model.new_cache(1), slots=[0], tap=tap)
        first, second, last = tap.rows().chunk(3, dim=-1)
        choices = model.readout(last.contiguous()).argmax(-1)
        total += choices.numel()
        for exit, hidden in ((1, first), (2, second)):
            adapted = model.readout(adapters.apply(exit, hidden.contiguous()))
            right[exit] += int((adapted.argmax(-1) == choices).sum())
    for exit, hits in right.items():
        # bfloat16 features in training move near-ties.
        assert abs(hits / total - after[str(exit)]["agreement"]) < 0.05
    config = ExitAdaptersConfig.from_file(tmp_path / "out" / "config.json")
    stored = config.measured["held_out_agreement"]["2"]
    assert stored == {"without": before["2"]["agreement"], "with": after["2"]["agreement"]}


@pytest.mark.parametrize(("family", "loss_vocab"), [("gated deltanet", 8192), ("llama", 80)])
def test_resumed_run_is_bit_equal(
    family: str, loss_vocab: int, text: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    model = models[family]
    whole = started(text, model, tmp_path / "whole", loss_vocab=loss_vocab)
    assert whole.steps == 9
    assert whole.run(every=4)
    parts = started(text, model, tmp_path / "parts", loss_vocab=loss_vocab)
    assert not parts.run(lambda: parts.step == 2, every=4)
    for stop in (6, 99):
        parts = ExitTraining.resume(tmp_path / "parts")
        assert parts.options == whole.options
        parts.run(lambda: parts.step == stop, every=4)  # noqa: B023 - called at once
    assert parts.history == whole.history
    assert [step for step, _ in whole.history.held_out] == [0, 4, 8, 9]
    for file in ("training.safetensors", "model.safetensors"):
        one, two = (load_file(tmp_path / name / file) for name in ("whole", "parts"))
        assert one.keys() == two.keys()
        assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    # Another seed gives another run: the comparison above can fail.
    other = started(text, model, tmp_path / "other", loss_vocab=loss_vocab, seed=6)
    other.train_step()
    assert other.history.training[0] != whole.history.training[0]


def test_runs_share_a_cache(text: Path, models: dict[str, Path], tmp_path: Path) -> None:
    """Of a second run only the hidden states of other exits are computed."""
    model, shared = models["llama"], tmp_path / "cache"
    started(text, model, tmp_path / "first", cache=shared)
    kept = {path.name: path.stat().st_mtime_ns for path in shared.glob("*.bin") if path.stem != "tokens"}
    assert set(kept) == {"hidden-0.bin", "hidden-1.bin", "hidden-3.bin"}
    request = ExitRequest(str(model), text, tmp_path / "second", "2,3", cache=shared, seq_len=32, seed=5)
    cache, begin = prepare(request, lambda line: None)
    assert cache.missing_bytes == cache.windows * 32 * 60 * 2
    assert cache.compute()
    assert begin().model.exits.keys() == {"2", "3"}
    assert {name: (shared / name).stat().st_mtime_ns for name in kept} == kept
    assert isinstance(cache, FeatureCache)
    assert cache.missing_windows == 0


@pytest.fixture(scope="module")
def saved_run(text: Path, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of one step."""
    run = started(text, models["llama"], tmp_path_factory.mktemp("run") / "out", text_tokens=3000)
    run.train_step()
    run.save()
    return run.out


@pytest.mark.parametrize("writes", range(3))
def test_a_save_that_is_cut_short_leaves_no_gap(
    writes: int, saved_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(saved_run, out)
    run = ExitTraining.resume(out)
    run.out = out
    done: list[str] = []

    def until(write: Callable[..., None], *arguments: object) -> None:
        if len(done) == writes:
            raise KeyboardInterrupt
        done.append("one more")
        write(*arguments)

    for module, name in (
        (running, "write_tensors"),
        (running, "write_json"),
        (exit_loop, "save_exit_adapters"),
    ):
        monkeypatch.setattr(module, name, partial(until, getattr(module, name)))
    with pytest.raises(KeyboardInterrupt):
        run.run(lambda: run.step == 3)
    monkeypatch.undo()
    again = ExitTraining.resume(out)
    assert again.step == (3 if writes == 2 else 1)
    assert [step for step, _ in again.history.training] == list(range(again.step))


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ({}, {"tokens_sha256": None}),
        ({}, {"step": "two"}),
        ({}, {"options": "[]"}),
        ({}, {"options": '{"config": {}}'}),
        ({"weights/exits.1.norm.weight": torch.ones(1)}, {}),  # would be broadcast
        ({"exp_avg/exits.2.up_proj.weight": torch.ones(3)}, {}),
    ],
    ids=lambda changed: ",".join(changed) or "-",
)
def test_a_damaged_state_is_one_error(
    saved_run: Path, tmp_path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str | None]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(saved_run, out)
    path = out / "training.safetensors"
    with safe_open(path, "pt") as file:
        kept = {**file.metadata(), **metadata}
    save_file({**load_file(path), **tensors}, path, {k: v for k, v in kept.items() if v is not None})
    with pytest.raises(ValueError, match=r"training\.safetensors: not the state of a run \("):
        ExitTraining.resume(out)


def test_a_run_is_for_its_model_and_features(text: Path, models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no training\.safetensors to resume from"):
        ExitTraining.resume(tmp_path / "nothing")
    model = tmp_path / "model"
    shutil.copytree(models["llama"], model)
    run = started(text, model, tmp_path / "out")
    run.save()
    (tmp_path / "out" / "features" / "hidden-1.bin").unlink()
    with pytest.raises(ValueError, match="does not hold the features of the run"):
        ExitTraining.resume(tmp_path / "out")
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x11")
    with pytest.raises(ValueError, match="has other weights than those that the run"):
        ExitTraining.resume(tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model is missing"),
        (["--model", "MODEL"], "--text is missing"),
        (["--model", "MODEL", "--text", "TEXT"], "--exits is missing"),
        (["--model", "/nowhere", "--text", "TEXT", "--exits", "1"], "model '/nowhere': neither a directory"),
        (["--model", "MODEL", "--text", "/nowhere", "--exits", "1"], "--text: '/nowhere' is not a folder"),
        (["RUN", "--exits", "first"], "--exits: got 'first', want numbers of layers such as 2,5"),
        (["RUN", "--exits", "1,1"], "--exits: got '1,1', want each at most once"),
        (["RUN", "--exits", "0"], "--exits: got 0, want an integer, from 1 to 3"),
        (["RUN", "--exits", "1,4"], "--exits: got 4, want an integer, from 1 to 3"),
        (["RUN", "--width", "0"], "--width: got 0"),
        (["RUN", "--tokens", "0"], "--tokens: got 0, want an integer, at least 1"),
        (["RUN", "--text-tokens", "0"], "--text-tokens: got 0"),
        (["RUN", "--batch-size", "0"], "--batch-size: got 0"),
        (["RUN", "--seq-len", "100000"], "want at least 200001 (two windows of 100000)"),
        (["RUN", "--loss-vocab", "3"], "--loss-vocab: got 3, want an integer, at least 4"),
        (["RUN", "--lr", "1"], "--lr: got 1.0"),
        (["RUN", "--seed", "-1"], "--seed: got -1"),
        (["--resume"], "has no training.safetensors to resume from"),
        (["--resume", "--width", "9"], "--width: not with --resume"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_2(
    text: Path, models: dict[str, Path], tmp_path: Path, arguments: list[str], message: str
) -> None:
    model = str(models["llama"])
    values = {
        "MODEL": [model],
        "TEXT": [str(text)],
        "RUN": ["--model", model, "--text", str(text), *([] if "--exits" in arguments else ["--exits", "1"])],
    }
    given = [part for argument in arguments for part in values.get(argument, [argument])]
    result = CliRunner().invoke(app, ["train-exits", "--out", str(tmp_path / "out"), *given])
    assert result.exit_code == 2, result.output
    error = result.stderr.strip()
    assert error.startswith("specdec: error: ")
    assert "\n" not in error
    assert message in error
    assert not (tmp_path / "out" / "training.safetensors").exists()


def test_a_tokenizer_without_an_end_is_refused(text: Path, models: dict[str, Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(models["llama"], model)
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**values, "eos_token_id": []}))
    with pytest.raises(ValueError, match=r"tokenizer: has no <\|endoftext\|> token"):
        started(text, model, tmp_path / "out")


def test_command_trains_stops_at_ctrl_c_and_goes_on(
    text: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ["--model", str(models["llama"]), "--text", str(text), "--exits", "2", "--seq-len", "16"]
    # The first save, after 400 steps.
    command = ["specdec", "train-exits", "--out", str(out), *arguments]
    interrupted([*command, "--batch-size", "1", "--tokens", "100000000"], out / "losses.json")
    assert ExitTraining.resume(out).step >= 400
    again = CliRunner().invoke(app, ["train-exits", "--out", str(out), *arguments])
    assert again.exit_code == 2
    assert "holds a run already" in again.stderr


def test_command_ends_with_figures_and_curves(text: Path, models: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--model", str(models["llama"]), "--text", str(text), "--exits", "3,1", "--tokens", "3000"]
    result = CliRunner().invoke(
        app, ["train-exits", "--out", str(out), *arguments, "--seq-len", "32", "--cache", str(tmp_path / "c")]
    )
    assert result.exit_code == 0, result.output
    for exit in (1, 3):
        assert f"after {exit} layers: 0." in result.stdout
    assert (out / "training.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "c" / "features.json").exists()
    assert not (out / "features").exists()
    assert list(ExitAdapters.from_directory(out, load_model(models["llama"]))) == [1, 3]
