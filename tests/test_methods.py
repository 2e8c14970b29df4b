"""Methods and drafters by name: what is built, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.loop.models import random_model
from tests.loop.recurrent import random_files

from specdec.acceptance import SamplingParams
from specdec.drafters.draft_exit import AdaptiveExit, StaticThreshold
from specdec.drafters.hierarchical import HierarchicalDrafter
from specdec.drafters.layer_skip import LayerSkipDrafter
from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.online_skips import OnlineSkipDrafter
from specdec.drafters.recurrent import RecurrentDrafter
from specdec.generation import Request
from specdec.methods import (
    METHODS,
    DrafterSpec,
    MethodOptions,
    build_drafter,
    default_drafter,
    get_method,
    hispec,
    load_drafter_model,
    load_skip_file,
)
from specdec.methods.autoregressive import autoregressive
from specdec.methods.specla import specla
from specdec.models import load_model
from specdec.models.base import CausalLM
from specdec.models.checkpoint import resolve_model, weights_sha256
from specdec.models.drafter_checkpoint import save_drafter
from specdec.models.exit_adapter import ExitAdapters, ExitAdaptersConfig, save_exit_adapters
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM
from specdec.models.skip_file import SkipFile
from specdec.models.skipping import SkipSet

PROMPTS = [[0, 5, 9, 5, 9, 5], [0, 7, 7, 3], [0, 11]]


def _requests(count: int) -> list[Request]:
    return [Request(p, count, SamplingParams(), ignore_eos=True) for p in PROMPTS]


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return random_model(3)


@pytest.fixture(scope="module")
def greedy(model: CausalLM) -> list[list[int]]:
    return [r.tokens for r in autoregressive(model, slots=2).run(_requests(24))]


@pytest.mark.parametrize("text", ["ngram", "oracle", "exit:1"])
@pytest.mark.parametrize("commit", ["deferred", "eager"])
def test_specla_writes_the_autoregressive_tokens(
    model: CausalLM, greedy: list[list[int]], text: str, commit: str
) -> None:
    options = MethodOptions(slots=2, commit=commit, max_draft=5, adaptive=False)  # type: ignore[arg-type]
    drafter = build_drafter(
        DrafterSpec.parse(text, p=0.7),
        model,
        options,
        dtype=torch.float32,
        continuations=list(zip(PROMPTS, greedy, strict=True)),
    )
    loop = get_method("specla").build(model, drafter, options)
    assert [r.tokens for r in loop.run(_requests(24))] == greedy
    assert loop.statistics.drafted > 0


def test_fixed_drafts_are_as_long_as_asked(model: CausalLM, greedy: list[list[int]]) -> None:
    drafter = build_drafter(
        DrafterSpec.parse("oracle"),
        model,
        MethodOptions(),
        dtype=torch.float32,
        continuations=list(zip(PROMPTS, greedy, strict=True)),
    )
    loop = specla(model, drafter, max_draft=3, adaptive=False)
    result = loop.run(_requests(24)[:1])[0]
    # 23 tokens after the first: five rounds of 3 drafts and a bonus token, then 2 drafts and the bonus token.
    assert (result.rounds, result.drafted, result.accepted) == (6, 17, 17)


def test_model_drafter_of_the_target_itself_is_always_right(model: CausalLM, greedy: list[list[int]]) -> None:
    spec = DrafterSpec("model", "itself")
    drafter = build_drafter(spec, model, MethodOptions(slots=2), dtype=torch.float32, model=model)
    loop = specla(model, drafter, slots=2, max_draft=4, adaptive=False)
    assert [r.tokens for r in loop.run(_requests(24))] == greedy
    assert loop.statistics.acceptance_rate == 1.0


def test_unknown_names_list_what_there_is() -> None:
    with pytest.raises(ValueError, match=rf"'magic', want one of {', '.join(METHODS)}"):
        get_method("magic")
    for text in ("magic", "model", "model:", "ngram:3", "oracle:1", ""):
        with pytest.raises(ValueError, match=r"want one of ngram, adapted, .*model:DIR, exit:N, oracle"):
            DrafterSpec.parse(text)
    for tree in ("", "2,", "0", "2;2", "300"):
        with pytest.raises(ValueError, match="draft_tree: got"):
            DrafterSpec.parse("exit:2", tree=tree)
    with pytest.raises(ValueError, match=r"oracle_p: got 1\.5"):
        DrafterSpec.parse("oracle", p=1.5)
    for text in ("exit", "exit:", "exit:0", "exit:x"):
        with pytest.raises(ValueError, match=rf"got '{text}', want exit:N, N from 1"):
            DrafterSpec.parse(text)


def test_adapted_drafters_by_name() -> None:
    spec = DrafterSpec.parse("adapted")
    assert (spec.name, spec.label, spec.tree, spec.model) == ("adapted", "adapted", "auto", "")
    assert DrafterSpec.parse("adapted:some/dir") == DrafterSpec("adapted", "some/dir", tree="auto")
    combined = DrafterSpec.parse("adapted:some/dir+ngram")
    assert combined == DrafterSpec("adapted", "some/dir", tree="auto", combined=True)
    assert (combined.name, combined.label) == ("adapted:some/dir+ngram",) * 2
    assert DrafterSpec.parse("adapted+ngram").combined
    assert DrafterSpec.parse("model:some+ngram").model == "some+ngram"
    assert combined.decided_by("speculative") == "follow"
    assert DrafterSpec.parse("adapted:some/dir", tree="2,1").label == "adapted:some/dir tree 2,1"
    assert DrafterSpec.parse("exit:2", tree="auto").label == "exit:2 tree auto"
    for text in ("adapted:", "adapted:+ngram", "adapted+", "adapted+oracle", "ngram+ngram"):
        with pytest.raises(ValueError, match=f"got {re.escape(repr(text))}, want one of"):
            DrafterSpec.parse(text)
    # It draws; together with n-grams it proposes the likeliest tokens, which are followed.
    assert [spec.decided_by(rule) for rule in ("auto", "speculative", "typical")] == [
        "traversal",
        "speculative",
        "typical",
    ]
    with pytest.raises(ValueError, match=r"^acceptance: .*block"):
        spec.check_acceptance("block")
    DrafterSpec.parse("adapted", tree="1").check_acceptance("block")


def test_a_target_without_a_drafter_says_how_to_get_one(tmp_path: Path, model: CausalLM) -> None:
    with pytest.raises(ValueError, match="no drafter comes with this target; train one with `specdec train"):
        build_drafter(DrafterSpec.parse("adapted"), model, MethodOptions(), dtype=torch.float32)
    directory = resolve_model("gdn-code")
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    assert default_drafter(str(tmp_path)) == "ngram"
    (tmp_path / "link").symlink_to(directory)
    assert default_drafter(str(tmp_path / "link")) == default_drafter("gdn-code") == "adapted+ngram"
    copy = load_model(tmp_path)
    with pytest.raises(ValueError, match=f"no drafter comes with {re.escape(str(tmp_path))}; train one"):
        build_drafter(DrafterSpec.parse("adapted"), copy, MethodOptions(), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^drafter: nowhere/config\.json: cannot be read"):
        build_drafter(DrafterSpec.parse("adapted:nowhere"), copy, MethodOptions(), dtype=torch.float32)


def test_an_adapted_drafter_from_its_directory(
    tmp_path: Path, model: GatedDeltaNetForCausalLM, greedy: list[list[int]]
) -> None:
    save_drafter(tmp_path, *random_files(model, 2))
    spec = DrafterSpec.parse(f"adapted:{tmp_path}", tree="2,1")
    for options in (MethodOptions(slots=2, max_draft=5, adaptive=False), MethodOptions(acceptance="k-seq")):
        drafter = build_drafter(spec, model, options, dtype=torch.float32)
        assert isinstance(drafter, RecurrentDrafter)
        assert drafter.draws
        assert drafter.replacement == (options.acceptance == "k-seq")
        loop = get_method("specla").build(model, drafter, options)
        assert [r.tokens for r in loop.run(_requests(24))] == greedy


def test_an_oracle_is_named_with_its_p() -> None:
    assert DrafterSpec.parse("oracle", p=0.8).label == "oracle p=0.8"
    assert DrafterSpec.parse("ngram", p=0.8).label == "ngram"
    assert DrafterSpec.parse("model:some/dir").label == "model:some/dir"


def test_a_tree_is_named_with_its_shape() -> None:
    assert DrafterSpec.parse("exit:2").label == "exit:2"
    assert DrafterSpec.parse("exit:2", tree="2, 2,1").label == "exit:2 tree 2,2,1"
    assert DrafterSpec.parse("ngram", tree="2,2,1").label == "ngram"


def test_a_drafter_of_another_vocabulary_is_refused(model: CausalLM) -> None:
    other = random_model(3, vocab_size=62)
    with pytest.raises(ValueError, match="has a vocabulary of 62, want the target's 61"):
        build_drafter(DrafterSpec("model", "other"), model, MethodOptions(), dtype=torch.float32, model=other)


def test_an_exit_needs_fewer_layers_than_the_target(model: CausalLM) -> None:
    with pytest.raises(ValueError, match="got exit:2, want at most 1, as the target has 2 layers"):
        build_drafter(DrafterSpec.parse("exit:2"), model, MethodOptions(), dtype=torch.float32)


def test_an_exit_is_the_model_of_its_layers() -> None:
    whole = random_model(3, num_hidden_layers=3)
    part = whole.first_layers(2)
    assert (part.num_parameters < whole.num_parameters, whole.config.num_hidden_layers) == (True, 3)
    cache, other = part.new_cache(1), random_model(3, num_hidden_layers=2).new_cache(1)
    assert len(cache.state) == len(other.state) == 2
    logits = part.prefill([[1, 2, 3]], cache=cache, slots=[0])
    assert not torch.equal(logits, whole.prefill([[1, 2, 3]], cache=whole.new_cache(1), slots=[0]))
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"count: got {count}, want"):
            whole.first_layers(count)


@pytest.mark.parametrize(
    ("text", "tree", "rule"),
    [
        ("exit:1", "2,1", "block"),
        ("model:x", "2", "block"),
        ("exit:1", "1", "magic"),
        ("ngram", "1", "magic"),
    ],
)
def test_a_rule_that_is_not_exact_for_the_drafter_is_refused(text: str, tree: str, rule: str) -> None:
    with pytest.raises(ValueError, match=f"^acceptance: .*{rule}"):
        DrafterSpec.parse(text, tree=tree).check_acceptance(rule)


def test_rules_that_are_exact_for_a_drafter_are_taken() -> None:
    for rule in ("auto", "speculative", "k-seq", "block", "traversal", "typical"):
        DrafterSpec.parse("exit:1").check_acceptance(rule)
        DrafterSpec.parse("ngram").check_acceptance(rule)
        if rule != "block":
            DrafterSpec.parse("exit:1", tree="3,2").check_acceptance(rule)


def test_specla_needs_a_drafter_and_ngram_needs_nothing(model: CausalLM) -> None:
    with pytest.raises(ValueError, match="drafter"):
        get_method("specla").build(model, None, MethodOptions())
    spec = DrafterSpec.parse("ngram")
    assert isinstance(build_drafter(spec, model, MethodOptions(), dtype=torch.float32), NGramDrafter)


def test_self_speculative_by_its_parts(model: CausalLM, greedy: list[list[int]], tmp_path: Path) -> None:
    """From a file, as the commands build it; of a model from no file any set of its size is taken."""
    path = tmp_path / "skip.json"
    file = SkipFile(SkipSet.of([1], [0]), "random", "0" * 64, 2, "any", "float32", tuple(range(1, 61)))
    file.write(path)
    spec = DrafterSpec.skipping(str(path), exit="static:0.2", tree="2,1")
    options = MethodOptions(slots=2, max_draft=6, adaptive=False)
    drafter = build_drafter(spec, model, options, dtype=torch.float32)
    assert isinstance(drafter, LayerSkipDrafter)
    assert (drafter.exit, drafter.shape.branching) == (StaticThreshold(0.2), (2, 1))
    loop = get_method("self-speculative").build(model, drafter, options)
    assert [r.tokens for r in loop.run(_requests(24))] == greedy
    assert 0 < loop.statistics.accepted < loop.statistics.drafted
    assert (spec.label, spec.decided_by("auto")) == (f"skip:{path} tree 2,1 exit static:0.2", "traversal")
    for method in ("specla", "autoregressive"):
        assert not METHODS[method].skips
    with pytest.raises(ValueError, match="drafter: got ngram, want the target itself"):
        get_method("self-speculative").build(model, NGramDrafter(), options)


def test_sets_that_change_by_their_name(model: CausalLM, tmp_path: Path) -> None:
    path = tmp_path / "skip.json"
    SkipFile(SkipSet.of([1], [0]), "random", "0" * 64, 2, "any", "float32").write(path)
    for name, skips in (("online", SkipSet()), (f"online:{path}", SkipSet.of([1], [0]))):
        spec = DrafterSpec.skipping(name, exit="fixed")
        drafter = build_drafter(spec, model, MethodOptions(), dtype=torch.float32)
        assert isinstance(drafter, OnlineSkipDrafter)
        assert (drafter.skips, drafter.draws) == (skips, False)
        assert spec.label == f"skip:{name} exit fixed"
        assert spec.decided_by("auto") == "follow"
        spec.check_acceptance("k-seq")
        assert load_drafter_model(spec, model, dtype=torch.float32) is not None
    assert not DrafterSpec.skipping("./online", exit="fixed").online
    spec = DrafterSpec.skipping("none", exit="fixed")
    drafter = build_drafter(spec, model, MethodOptions(), dtype=torch.float32)
    assert isinstance(drafter, LayerSkipDrafter)
    assert drafter.stepped.num_parameters < model.num_parameters
    with pytest.raises(ValueError, match="skip: got 'none', which drafts as dearly as it decodes"):
        DrafterSpec.skipping("none", exit="fixed", int8=False)
    replace(SkipFile.read(path), int8=True).write(path)
    whole = model.skipping(SkipSet.of([1], [0])).num_parameters
    for int8, label in ((None, ""), (True, " int8"), (False, " own weights")):
        spec = DrafterSpec.skipping(str(path), exit="fixed", int8=int8)
        assert spec.label == f"skip:{path}{label} exit fixed"
        view = load_drafter_model(spec, model, dtype=torch.float32)
        assert (view.num_parameters < whole) == (int8 is not False)
    with pytest.raises(ValueError, match="skip: got 'online:', want a file, online, online:FILE or none"):
        DrafterSpec.skipping("online:", exit="fixed")


def test_widened_chains_are_trees(model: CausalLM, tmp_path: Path) -> None:
    path = tmp_path / "skip.json"
    SkipFile(SkipSet.of([1], [0]), "random", "0" * 64, 2, "any", "float32").write(path)
    spec = DrafterSpec.skipping(str(path), exit="adaptive:alpha=0.9,widen=3")
    drafter = build_drafter(spec, model, MethodOptions(), dtype=torch.float32)
    assert isinstance(drafter, LayerSkipDrafter)
    assert (drafter.exit, list(drafter.levels(6))) == (AdaptiveExit(target=0.9), [3, 4, 5, 6, 6, 6])
    assert spec.decided_by("auto") == "traversal"
    with pytest.raises(ValueError, match="acceptance: block is not exact for a tree"):
        spec.check_acceptance("block")
    assert DrafterSpec.skipping(str(path), exit="adaptive").decided_by("auto") == "block"
    with pytest.raises(ValueError, match="draft_exit: got 'static:widen=2', but only chains are widened"):
        DrafterSpec.skipping(None, exit="static:widen=2", tree="2,1")


def test_tiers_by_their_exit_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that come with the model, those of a directory, or none."""
    model = load_model("gdn-code")
    assert model.source is not None
    config = ExitAdaptersConfig(
        {2: 8, 4: 8}, "gdn-code", weights_sha256(model.source), 10, model.embeddings.shape[1], 1e-6
    )
    shipped, other = tmp_path / "shipped", tmp_path / "other"
    for directory in (shipped, other):
        save_exit_adapters(directory, config, {n: torch.ones(shape) for n, shape in config.tensors().items()})
    monkeypatch.setattr(hispec, "shipped_exit_adapters", lambda model: shipped)
    for given, label, adapted in (
        (None, "tiers:2x3", True),
        (str(other), f"tiers:2x3 adapters {other}", True),
        ("none", "tiers:2x3 adapters none", False),
    ):
        spec = DrafterSpec.tiered("2x3", adapters=given)
        assert spec.label == label
        adapters = load_drafter_model(spec, model, dtype=torch.float32)
        assert isinstance(adapters, ExitAdapters)
        assert list(adapters) == ([2, 4] if adapted else [])
        drafter = build_drafter(spec, model, MethodOptions(), dtype=torch.float32)
        assert isinstance(drafter, HierarchicalDrafter)
        hidden = torch.ones(1, 1, model.embeddings.shape[1])
        assert torch.equal(drafter._read(2, hidden), model.readout(hidden)) != adapted
    with pytest.raises(ValueError, match="exit_adapters: got '', want a directory or none"):
        DrafterSpec.tiered("2x3", adapters="")
    (other / "config.json").write_text(json.dumps(replace(config, sha256="0" * 64).to_dict()))
    with pytest.raises(ValueError, match=r"exit_adapters: .*other: trained for gdn-code with 10 layers"):
        load_drafter_model(DrafterSpec.tiered("2x3", adapters=str(other)), model, dtype=torch.float32)


def test_sets_of_other_models_are_refused(model: CausalLM, tmp_path: Path) -> None:
    spec = DrafterSpec.skipping(None, exit="fixed")
    with pytest.raises(ValueError, match="skip: no set comes with this model"):
        load_drafter_model(spec, model, dtype=torch.float32)
    path = tmp_path / "skip.json"
    SkipFile(SkipSet.of([1], [0]), "other", "0" * 64, 10, "any", "float32").write(path)
    spec = DrafterSpec.skipping(str(path), exit="fixed")
    for target in (model, load_model("gdn-code")):
        with pytest.raises(ValueError, match="skip: chosen for other with 10 layers"):
            load_drafter_model(spec, target, dtype=torch.float32)
    shipped = load_skip_file(DrafterSpec.skipping(None, exit="fixed"), load_model("gdn-code"))
    assert len(shipped.skips) > 0
