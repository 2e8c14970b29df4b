"""Training of drafters: unrolling is drafting, loss and gradient, the cache, resuming, the command."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from small_training import gated_deltanet, interrupted, small, write_text
from specdec.cache import Steps
from specdec.cli.app import app
from specdec.models.config import GatedDeltaNetConfig
from specdec.models.drafter_checkpoint import load_drafter_config, load_drafter_weights
from specdec.models.drafter_config import DrafterTarget, RecurrentDrafterConfig
from specdec.models.features import Feature, FeatureTap
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM
from specdec.models.recurrent_drafter import RecurrentDrafterModel
from specdec.training import drafter_loop, running
from specdec.training.corpus import frequent_tokens, train_tokenizer, write_tokens
from specdec.training.distillation import distillation_loss
from specdec.training.drafter_loop import DrafterTraining
from specdec.training.drafter_model import TrainableDrafter
from specdec.training.drafter_run import TrainingRequest, prepare
from specdec.training.evaluation import chain_matches, summarize
from specdec.training.features import FeatureCache
from specdec.training.model import TrainableGatedDeltaNet
from specdec.training.target import FrozenTarget


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def target(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gated_deltanet(text, tmp_path_factory.mktemp("target"))


def drafter_config(layer: GatedDeltaNetConfig, feature_size: int, features: tuple[str, ...]):
    return RecurrentDrafterConfig(
        features,
        feature_size,
        layer,
        None,
        DrafterTarget("small", "0" * 64, layer.vocab_size, layer.hidden_size),
    )


@pytest.mark.parametrize("with_features", [True, False])
@pytest.mark.parametrize(
    "changes",
    [{}, {"use_short_conv": False}, {"conv_bias": True, "allow_neg_eigval": True, "use_gate": False}],
    ids=str,
)
def test_unrolling_is_drafting(changes: dict, with_features: bool) -> None:
    """From every tried token, drafting with the ops gives the outputs that training unrolled there."""
    torch.manual_seed(3)
    config = small(**changes)
    target = GatedDeltaNetForCausalLM(config, TrainableGatedDeltaNet(config).state_dict())
    features = (Feature("readout", 1), Feature("hidden", 2)) if with_features else ()
    size = sum(map(target.feature_size, features))
    layer = small(**changes, num_hidden_layers=1, bos_token_id=None, eos_token_id=None)
    trained = TrainableDrafter(layer, size)
    with torch.no_grad():
        for parameter in trained.parameters():
            # Far from the initial values, where norms are one and a state hardly matters.
            parameter.add_(torch.randn(parameter.shape) * (0.15 if parameter.dim() == 2 else 0.3))
    drafter = RecurrentDrafterModel(
        drafter_config(layer, size, tuple(map(str, features))), trained.state_dict(), target
    )
    length, steps = 75, 5  # two chunks, the second one not whole
    tokens = torch.randint(0, 300, (2, length + 1))
    rows = None
    if with_features:
        tap = FeatureTap(features)
        cache = target.new_cache(2)
        target.prefill(tokens[:, :length].tolist(), cache=cache, slots=range(2), tap=tap)
        rows = tap.rows().clone()  # made in inference mode
    with torch.no_grad():
        unrolled = trained.unroll(rows, target.embeddings[tokens], steps)
    slots = torch.arange(2, dtype=torch.int32)
    for t in (0, 1, 2, 40, 63, 64, length - steps):
        cache = drafter.new_cache(2)
        true = None if rows is None else rows[:, : t + 1]
        drafter.prefill(
            tokens[:, 1 : t + 1],
            None if true is None else true[:, :t],
            cache=cache,
            slots=range(2),
            lengths=[t, t],
        )
        h, round_ = drafter.forward(
            tokens[:, t + 1, None], features=None if true is None else true[:, t:], cache=cache, slots=slots
        )
        chain = Steps()
        chain.extend(round_)
        logits = drafter.logits(h[:, 0])
        for j in range(steps):
            if j > 0:
                drafted = tokens[:, t + j + 1, None].contiguous()
                logits, h = drafter.step(drafted, h, cache=cache, slots=slots, prefix=chain)
            expected = unrolled[j][:, t] @ target.embeddings.T
            # float32 over 75 tokens, in the order of the ops and in that of the chunks: far above rounding,
            # far below what a wrong window, decay or write makes.
            error = float((logits - expected).abs().max())
            assert error < 1e-3 * float(expected.std()), (t, j)


def test_distillation_is_the_divergence_and_its_gradient() -> None:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    head, targets, weights = normal(11, 6), normal(2, 5, 6), [0.5, 0.3, 0.2]
    outputs = [normal(2, 5, 6).requires_grad_() for _ in weights]
    loss, each = distillation_loss(outputs, targets, head, weights)
    (3 * loss).backward()
    ours = [x.grad for x in outputs]
    plain = [x.detach().double().requires_grad_() for x in outputs]
    p = (targets.double() @ head.double().T).log_softmax(-1)
    terms = []
    for j, x in enumerate(plain, 1):
        q = (x[:, : 5 - j] @ head.double().T).log_softmax(-1)
        terms.append((p[:, j:].exp() * (p[:, j:] - q)).sum(-1).mean())
    total = sum(w * term for w, term in zip(weights, terms, strict=True))
    (3 * total).backward()
    # A logit is a sum of 6 float32 products; the logarithm of a softmax takes 11 exponentials and a logarithm
    # more. Each is off by at most that many roundings of the largest sum of magnitudes, and so is the mean of
    # the differences of two of them.
    magnitude = max(float((x.detach().abs() @ head.abs().T).max()) for x in [targets, *outputs])
    tolerance = 2 * (6 + 11 + 1) * torch.finfo(torch.float32).eps * magnitude
    torch.testing.assert_close(each.double(), torch.stack(terms).detach(), rtol=0, atol=tolerance)
    torch.testing.assert_close(loss.double(), total.detach(), rtol=0, atol=tolerance)
    for a, b in zip(ours, plain, strict=True):
        # 3 (q - p) @ head: q and p are off, relatively, by what their logarithms are, and each sums to 1.
        torch.testing.assert_close(a.double(), b.grad, rtol=0, atol=3 * tolerance * float(head.abs().max()))
    # A chain that is longer than the text has steps without any position.
    _, none = distillation_loss([normal(1, 2, 6)] * 3, normal(1, 2, 6), head, weights)
    assert none[1:].tolist() == [0.0, 0.0]


def test_acceptance_of_known_matches() -> None:
    # Choices of the target at tokens 0..4 are 1, 2, 3, 4, 5 (a head of unit vectors).
    head = torch.eye(6)
    targets = head[torch.tensor([[1, 2, 3, 4, 5]])]
    steps = [head[torch.tensor([[2, 3, 0, 0, 0]])], head[torch.tensor([[3, 0, 5, 0, 0]])]]
    matches = chain_matches(steps, targets, head)
    assert matches.tolist() == [[[True, True], [True, False], [False, True]]]
    found = summarize(matches)
    assert found.match == pytest.approx((2 / 3, 1 / 2))
    assert found.mean_accepted_length == pytest.approx(1 + (2 + 1 + 0) / 3)
    # Without token 3 the drafter says something else where 3 is right.
    few = chain_matches(steps, targets, head, torch.tensor([0, 1, 2, 4, 5]))
    assert few.tolist() == [[[True, False], [False, False], [False, True]]]


def cached(directory: Path, text: Path, target: FrozenTarget, features: tuple[str, ...] = ()) -> FeatureCache:
    directory.mkdir(exist_ok=True)
    write_tokens(text, train_tokenizer(text, 300, seed=0), directory / "tokens.bin", seed=0, most=3000)
    return FeatureCache(directory, target, 32, [Feature.parse(name) for name in features])


def test_cache_holds_what_the_target_computes(text: Path, target: Path, tmp_path: Path) -> None:
    frozen = FrozenTarget(target)
    cache = cached(tmp_path / "cache", text, frozen, ("readout:0", "hidden:1"))
    assert cache.windows == 2999 // 32
    assert cache.missing_bytes == cache.windows * 32 * (64 + 64 + 64) * 2
    seen: list[int] = []
    assert not cache.compute(lambda: len(seen) == 2, seen.append)
    # A new object goes on where that one was stopped; features are in the order that is asked for.
    cache = cached(tmp_path / "cache", text, frozen, ("readout:0", "hidden:1"))
    assert cache.missing_windows == cache.windows - sum(seen)
    assert cache.compute(on_windows=seen.append)
    assert sum(seen) == cache.windows
    chosen = [Feature("hidden", 2), Feature("readout", 0), Feature("hidden", 1)]
    tokens = np.fromfile(tmp_path / "cache" / "tokens.bin", np.uint32)
    for window in (0, 20, cache.windows - 1):
        tap = FeatureTap(chosen)
        frozen.model.prefill(
            [tokens[window * 32 : window * 32 + 32].tolist()],
            cache=frozen.model.new_cache(1),
            slots=[0],
            tap=tap,
        )
        assert torch.equal(cache.rows([window], chosen), tap.rows().bfloat16().float())
    # Another feature is added alone; what is there already is not computed again.
    cache = cached(tmp_path / "cache", text, frozen, ("readout:0", "readout:2"))
    assert cache.missing_bytes == cache.windows * 32 * 64 * 2
    # Of a file that is damaged nothing is kept.
    (tmp_path / "cache" / "readout-0.bin").write_bytes(b"short")
    cache = cached(tmp_path / "cache", text, frozen, ("readout:0", "hidden:1"))
    assert cache.missing_bytes == cache.windows * 32 * 64 * 2
    # Other windows or another text: refused, and nothing is replaced.
    with pytest.raises(ValueError, match=r"features\.json: is of another seq_len \(seq_len 32, want 16\)"):
        FeatureCache(tmp_path / "cache", frozen, 16, [])
    with pytest.raises(ValueError, match=r"other: has no tokens\.bin"):
        FeatureCache(tmp_path / "other", frozen, 32, [])
    index = tmp_path / "cache" / "features.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "done": {"hidden": 3}}))
    with pytest.raises(ValueError, match=r"features\.json: not the index of a feature cache"):
        cached(tmp_path / "cache", text, frozen)


def test_windows_that_are_told_add_up_to_those_that_were_missing(
    text: Path, target: Path, tmp_path: Path
) -> None:
    frozen = FrozenTarget(target)
    assert cached(tmp_path / "cache", text, frozen, ("readout:0",)).compute()
    # One feature is there, one was stopped on its way, one is new: two groups for the target to read.
    seen: list[int] = []
    cache = cached(tmp_path / "cache", text, frozen, ("readout:0", "hidden:1"))
    assert not cache.compute(lambda: len(seen) == 2, seen.append)
    cache = cached(tmp_path / "cache", text, frozen, ("readout:0", "hidden:1", "hidden:0"))
    missing = cache.missing_windows
    assert missing == 2 * cache.windows - sum(seen)
    seen.clear()
    assert cache.compute(on_windows=seen.append)
    assert sum(seen) == missing
    assert cache.missing_windows == 0


def test_a_shared_cache_keeps_its_text(text: Path, target: Path, tmp_path: Path) -> None:
    shared = tmp_path / "cache"
    # A text without features is of no use to any run, as where it was too short for a window: it is replaced.
    with pytest.raises(ValueError, match="text: holds 40 tokens"):
        started(text, target, tmp_path / "short", cache=shared, text_tokens=40)
    first = started(text, target, tmp_path / "first", cache=shared, text_tokens=3000)
    first.train_step()
    first.save()
    # The same text serves another run; another one is refused and leaves the first run as it was.
    assert started(text, target, tmp_path / "second", cache=shared, text_tokens=3000, lr=1e-2).steps == 9
    for changes in ({"text_tokens": 2900}, {"text_tokens": 3000, "seed": 6}):
        with pytest.raises(ValueError, match=r"cache: '.*' holds features of another text"):
            started(text, target, tmp_path / "third", cache=shared, **changes)
    assert DrafterTraining.resume(tmp_path / "first").step == 1
    assert not list(shared.glob("*.new"))
    assert not list(shared.glob("*.partial"))


def test_a_full_disk_is_noticed_before_anything_is_written(
    text: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cached(tmp_path / "cache", text, FrozenTarget(target))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 1 << 40, 1_000_000))
    with pytest.raises(ValueError, match=r"the features take 0\.4 MB and 1\.0 MB are free"):
        cache.compute()
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["tokens.bin"]


def started(text: Path, target: Path, out: Path, **changes: object) -> DrafterTraining:
    values = {"tokens": 9 * 4 * 32, "batch_size": 4, "seq_len": 32, "unroll": 3, "seed": 5, **changes}
    cache, begin = prepare(TrainingRequest(str(target), text, out, **values), lambda line: None)  # type: ignore[arg-type]
    assert cache.compute()
    return begin()


def test_resumed_run_is_bit_equal(text: Path, target: Path, tmp_path: Path) -> None:
    whole = started(text, target, tmp_path / "whole", draft_vocab=200)
    assert whole.steps == 9
    assert whole.run(every=4)
    parts = started(text, target, tmp_path / "parts", draft_vocab=200)
    assert not parts.run(lambda: parts.step == 2, every=4)
    for stop in (6, 99):
        parts = DrafterTraining.resume(tmp_path / "parts")
        assert parts.options == whole.options
        parts.run(lambda: parts.step == stop, every=4)  # noqa: B023 - called at once
    assert parts.history == whole.history
    assert [step for step, _ in whole.history.held_out] == [4, 8, 9]
    for file in ("training.safetensors", "model.safetensors"):
        one, two = (load_file(tmp_path / name / file) for name in ("whole", "parts"))
        assert one.keys() == two.keys()
        assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    # Another seed gives another run: the comparison above can fail.
    other = started(text, target, tmp_path / "other", draft_vocab=200, seed=6)
    other.train_step()
    assert other.history.training[0] != whole.history.training[0]


def test_a_text_that_is_too_short_leaves_nothing(text: Path, target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="text: holds 64 tokens, want at least 65"):
        started(text, target, out, text_tokens=64)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"text: .* holds no readable text"):
        started(tmp_path / "empty", target, out)
    assert not [path for path in out.rglob("*") if path.is_file()]
    assert started(text, target, out).steps == 9


@pytest.mark.parametrize("writes", range(3))
def test_a_save_that_is_cut_short_leaves_no_gap(
    writes: int, text: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(text, target, tmp_path / "out")
    run.run(lambda: run.step == 2)
    done: list[str] = []

    def until(write: Callable[..., None], *arguments: object) -> None:
        if len(done) == writes:
            raise KeyboardInterrupt
        done.append("one more")
        write(*arguments)

    for module, name in ((running, "write_tensors"), (running, "write_json"), (drafter_loop, "save_drafter")):
        monkeypatch.setattr(module, name, partial(until, getattr(module, name)))
    with pytest.raises(KeyboardInterrupt):
        run.run(lambda: run.step == 5)
    monkeypatch.undo()
    again = DrafterTraining.resume(tmp_path / "out")
    assert again.step == (5 if writes == 2 else 2)
    assert [step for step, _ in again.history.training] == list(range(again.step))


@pytest.mark.parametrize("features", ["readout:1,last", "none"])
def test_training_raises_the_match_and_ends_as_a_drafter(
    features: str, text: Path, target: Path, tmp_path: Path
) -> None:
    run = started(
        text, target, tmp_path / "out", features=features, tokens=60 * 8 * 32, batch_size=8, lr=1e-2
    )
    before = run.evaluate()
    assert run.run()
    after = run.history.held_out[-1][1]
    assert after["match"][0] > before.match[0] + 0.2
    assert after["mean_accepted_length"] > before.mean_accepted_length + 0.2
    assert after["kl"][0] < 0.5 * run.history.held_out[0][1]["kl"][0]
    config = load_drafter_config(tmp_path / "out")
    assert config.features == {"readout:1,last": ("readout:1", "hidden:2"), "none": ()}[features]
    model = GatedDeltaNetForCausalLM.from_pretrained(target)
    drafter = RecurrentDrafterModel.from_directory(tmp_path / "out", model)
    assert drafter.config == run.options.config
    weights = load_drafter_weights(tmp_path / "out", config, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16, torch.float32}
    assert not list((tmp_path / "out").rglob("*.partial"))


def test_frequent_tokens(tmp_path: Path) -> None:
    np.asarray([5, 5, 5, 2, 2, 7, 7, 1, 9, 9, 9, 9], np.uint32).tofile(tmp_path / "t")
    assert frequent_tokens(tmp_path / "t", 8, 10, 2).tolist() == [2, 5]  # 2 and 7 occur twice
    assert frequent_tokens(tmp_path / "t", 12, 10, 2).tolist() == [5, 9]


def test_states_that_do_not_fit_are_refused(text: Path, target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"has no training\.safetensors to resume from"):
        DrafterTraining.resume(out)
    run = started(text, target, out)
    run.train_step()
    run.save()
    shutil.copytree(out, tmp_path / "kept")
    (out / "features" / "hidden-2.bin").unlink()
    with pytest.raises(ValueError, match="does not hold the features of the run"):
        DrafterTraining.resume(out)
    (out / "losses.json").write_text("{}")
    with pytest.raises(ValueError, match="not the state of a run"):
        DrafterTraining.resume(out)
    shutil.copy(target / "training.safetensors", out)
    with pytest.raises(ValueError, match="not the state of a run"):
        DrafterTraining.resume(out)
    other = tmp_path / "target"
    shutil.copytree(target, other)
    run = started(text, other, tmp_path / "moved")
    run.save()
    torch.manual_seed(0)
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x11")
    with pytest.raises(ValueError, match="has other weights than those that the run"):
        DrafterTraining.resume(tmp_path / "moved")


def rewritten(out: Path, tensors: dict[str, torch.Tensor] | None = None, **metadata: str | None) -> None:
    """The state file with other tensors and metadata; None leaves an entry out."""
    path = out / "training.safetensors"
    with safe_open(path, "pt") as file:
        kept = {**file.metadata(), **metadata}
    save_file({**load_file(path), **(tensors or {})}, path, {k: v for k, v in kept.items() if v is not None})


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ({}, {"tokens_sha256": None}),
        ({}, {"cache": None}),
        ({}, {"step": "two"}),
        ({}, {"options": "[]"}),
        ({}, {"options": '{"config": 3}'}),
        ({"weights/norm.weight": torch.ones(1)}, {}),  # would be broadcast
        ({"exp_avg/norm.weight": torch.ones(3)}, {}),
        ({"exp_avg_sq/own_proj.weight": torch.ones(64)}, {}),
        ({"step/norm.weight": torch.ones(64)}, {}),
    ],
    ids=lambda changed: ",".join(changed) or "-",
)
def test_a_damaged_state_is_one_error(
    saved_run: Path, tmp_path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str | None]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(saved_run, out)
    rewritten(out, tensors, **metadata)
    with pytest.raises(ValueError, match=r"training\.safetensors: not the state of a run \("):
        DrafterTraining.resume(out)


def test_a_run_whose_files_are_gone_is_one_error(saved_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(saved_run, out)
    rewritten(out, cache=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"nowhere: has no tokens\.bin"):
        DrafterTraining.resume(out)
    rewritten(out, target=str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="gone"):
        DrafterTraining.resume(out)
    (out / "losses.json").unlink()
    with pytest.raises(ValueError, match="not the state of a run"):
        DrafterTraining.resume(out)


@pytest.fixture(scope="module")
def saved_run(text: Path, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of one step."""
    run = started(text, target, tmp_path_factory.mktemp("run") / "out", text_tokens=3000)
    run.train_step()
    run.save()
    return run.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--target is missing"),
        (["--target", "TARGET"], "--text is missing"),
        (["--target", "/nowhere", "--text", "TEXT"], "model '/nowhere': neither a directory"),
        (["--target", "TARGET", "--text", "/nowhere"], "--text: '/nowhere' is not a folder"),
        (["RUN", "--features", "hidden:3"], "--features: "),
        (["RUN", "--features", "many"], "groups are last, fused, readouts, none"),
        (["RUN", "--features", "last,hidden:2"], "--features: got 'last,hidden:2', want each at most once"),
        (["RUN", "--tokens", "0"], "--tokens: got 0, want an integer, at least 1"),
        (["RUN", "--text-tokens", "0"], "--text-tokens: got 0"),
        (["RUN", "--batch-size", "0"], "--batch-size: got 0"),
        (["RUN", "--seq-len", "4"], "--seq-len: got 4"),
        (["RUN", "--seq-len", "100000"], "want at least 200001 (two windows of 100000)"),
        (["RUN", "--unroll", "0"], "--unroll: got 0"),
        (["RUN", "--lr", "1"], "--lr: got 1.0"),
        (["RUN", "--draft-vocab", "301"], "--draft-vocab: got 301, want an integer, from 1 to 300"),
        (["RUN", "--seed", "-1"], "--seed: got -1"),
        (["--resume"], "has no training.safetensors to resume from"),
        (["--resume", "--draft-vocab", "9"], "--draft-vocab: not with --resume"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_2(
    text: Path, target: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    values = {
        "TARGET": [str(target)],
        "TEXT": [str(text)],
        "RUN": ["--target", str(target), "--text", str(text)],
    }
    given = [part for argument in arguments for part in values.get(argument, [argument])]
    result = CliRunner().invoke(app, ["train-drafter", "--out", str(tmp_path / "out"), *given])
    assert result.exit_code == 2, result.output
    error = result.stderr.strip()
    assert error.startswith("specdec: error: ")
    assert "\n" not in error
    assert message in error
    assert not (tmp_path / "out" / "training.safetensors").exists()


def test_command_trains_stops_at_ctrl_c_and_goes_on(text: Path, target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--target", str(target), "--text", str(text), "--batch-size", "1", "--seq-len", "16"]
    # The first save, after 400 steps.
    interrupted(
        ["specdec", "train-drafter", "--out", str(out), *arguments, "--tokens", "100000000", "--unroll", "1"],
        out / "losses.json",
    )
    run = DrafterTraining.resume(out)
    assert run.step >= 400
    again = CliRunner().invoke(app, ["train-drafter", "--out", str(out), *arguments])
    assert again.exit_code == 2
    assert "--out: " in again.stderr
    assert "holds a run already" in again.stderr


def test_command_ends_with_figures_and_curves(text: Path, target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--target", str(target), "--text", str(text), "--tokens", "3000", "--seq-len", "32"]
    result = CliRunner().invoke(
        app, ["train-drafter", "--out", str(out), *arguments, "--cache", str(tmp_path / "c")]
    )
    assert result.exit_code == 0, result.output
    assert "mean accepted length" in result.stdout
    assert (out / "training.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "c" / "features.json").exists()
    assert not (out / "features").exists()
