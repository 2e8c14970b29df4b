"""The search: a planted set is found, trials end early, and a search goes on where it was."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("optuna")

from loop.models import llama_config, llama_weights
from specdec.generation import Request
from specdec.methods.autoregressive import autoregressive
from specdec.models.llama import LlamaForCausalLM
from specdec.models.skipping import SkipSet
from specdec.tuning.choices import Choice, DraftViews
from specdec.tuning.evaluation import Evaluation, Evaluator
from specdec.tuning.pace import Policy, RoundTimes
from specdec.tuning.skip_search import SkipSearch, Trial, best_of, try_all
from specdec.tuning.skips import finalists, proposed

LAYERS = 6
PLANTED = SkipSet.of([1, 2, 4], [0, 2, 4])
SIZES = (None, 32, 16, 8)
SETTINGS = {"sha256": "0" * 64, "dtype": "float32"}


def distance(skips: SkipSet) -> int:
    """Sub-layers in which a set differs from the planted one."""
    return len(skips.mixers ^ PLANTED.mixers) + len(skips.mlps ^ PLANTED.mlps)


class Landscape:
    """Evaluates by the distance alone: a set has the pace 1 + distance, and less so on its first part;
    another vocabulary than the planted one costs something.
    """

    def __init__(self, vocabulary: int | None = None) -> None:
        self.seen: list[Choice] = []
        self._vocabulary = vocabulary

    def __call__(self, choice: Choice, hopeless: Callable[[Sequence[float]], bool]) -> Evaluation:
        self.seen.append(choice)
        pace = 1.0 + distance(choice.skips) + 0.5 * (choice.vocabulary != self._vocabulary)
        if hopeless([0.9 * pace]):
            return Evaluation((0.9 * pace,), Policy(0.9 * pace, 1, 0.0, 1.0, 1.0), False)
        return Evaluation((0.9 * pace, pace), Policy(pace, 1, 0.0, 1.0, 1.0), True)


def search(
    path: Path, layers: int = LAYERS, vocabularies: Sequence[int | None] = (None,), **settings: object
) -> SkipSearch:
    return SkipSearch(path, layers, {**SETTINGS, **settings}, vocabularies)


def test_a_planted_set_is_found(tmp_path: Path) -> None:
    found, landscape = search(tmp_path / "a.study"), Landscape()
    found.run(landscape, trials=90, seconds=600)
    assert len(found.trials) == 90
    (best,) = best_of(found.trials, 1)
    assert (best.choice.skips, best.pace) == (PLANTED, 1.0)
    assert {t.source for t in found.trials} == {"sampler", "neighbour"}
    # A set that is clearly worse than the best so far on the first part does not see the second.
    assert {len(t.paces) for t in found.trials if not t.complete} == {1}
    known = {t.choice for t in found.trials}
    assert len(landscape.seen) == len(known)  # no set twice
    assert sum(t.seconds == 0.0 for t in found.trials) == 90 - len(known)


def test_a_planted_vocabulary_is_found_with_the_set(tmp_path: Path) -> None:
    found = search(tmp_path / "a.study", vocabularies=SIZES)
    found.propose([SkipSet.of([1, 2], [0, 2])])
    found.run(Landscape(16), trials=120, seconds=600)
    assert found.trials[0].choice == Choice(SkipSet.of([1, 2], [0, 2]))  # what is proposed has all tokens
    (best,) = best_of(found.trials, 1)
    assert (best.choice, best.pace) == (Choice(PLANTED, 16), 1.0)
    for source in ("sampler", "neighbour"):
        tried = {t.choice.vocabulary for t in found.trials if t.source == source}
        assert tried == set(SIZES), source
    alone = [t for t in found.trials if t.choice.skips == PLANTED]
    assert len(alone) > 1  # the vocabulary changes alone, too


def test_a_search_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.study"
    first = search(path)
    first.propose([PLANTED, SkipSet.of([0])])
    first.note("times", {"plain_seconds": 1.0})
    told: list[Trial] = []
    first.run(Landscape(), trials=9, seconds=600, on_trial=told.append)
    assert told == first.trials
    assert [t.source for t in told[:2]] == ["similarity"] * 2
    assert [t.choice.skips for t in told[:2]] == [PLANTED, SkipSet.of([0])]

    again, landscape = search(path), Landscape()
    assert again.trials == first.trials
    assert again.noted("times") == {"plain_seconds": 1.0}
    assert again.noted("other") is None
    again.propose([PLANTED])  # known
    again.run(landscape, trials=20, seconds=600)
    assert [t.number for t in again.trials] == list(range(20))
    assert Choice(PLANTED) not in landscape.seen
    assert best_of(again.trials, 1)[0].choice.skips == PLANTED


def test_proposals_that_wait_are_not_proposed_again(tmp_path: Path) -> None:
    path = tmp_path / "a.study"
    sets = [SkipSet.of([i]) for i in range(4)]
    first = search(path)
    first.propose(sets)
    first.run(Landscape(), trials=1, seconds=600)
    again = search(path)
    again.propose(sets)
    again.run(Landscape(), trials=6, seconds=600)
    assert [t.choice.skips for t in again.trials[:4]] == sets
    assert all(t.source != "similarity" for t in again.trials[4:])


def test_a_search_ends_by_time_count_and_request(tmp_path: Path) -> None:
    found = search(tmp_path / "a.study")
    found.run(Landscape(), trials=5, seconds=0.0)
    assert len(found.trials) == 1  # one at least
    found.run(Landscape(), trials=5, seconds=600, should_stop=lambda: len(found.trials) == 3)
    assert len(found.trials) == 3
    found.run(Landscape(), trials=5, seconds=600)
    found.run(Landscape(), trials=5, seconds=600)
    assert len(found.trials) == 5


def test_a_trial_that_was_cut_off_is_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "a.study"
    first = search(path)
    first.run(Landscape(), trials=2, seconds=600)

    def interrupted(choice: Choice, hopeless: object) -> Evaluation:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.run(interrupted, trials=3, seconds=600)
    again = search(path)
    assert again.trials == first.trials[:2]
    again.run(Landscape(), trials=4, seconds=600)
    assert len(again.trials) == 4
    assert search(path).trials == again.trials


@pytest.mark.parametrize(
    ("layers", "settings", "message"),
    [
        (LAYERS, {"dtype": "bfloat16"}, "a search with dtype 'float32', want 'bfloat16'"),
        (LAYERS, {"threads": 2}, "a search with threads None, want 2"),
        (LAYERS, {"vocabularies": (None, 8)}, r"a search with vocabularies \[None\], want \[None, 8\]"),
        (LAYERS + 1, {}, f"a search with layers {LAYERS}, want {LAYERS + 1}"),
    ],
)
def test_a_search_of_something_else_is_refused(tmp_path, layers, settings, message) -> None:
    path = tmp_path / "a.study"
    search(path)
    with pytest.raises(ValueError, match=message):
        search(path, layers, **settings)


def test_a_search_of_sub_layers_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.study"
    with monkeypatch.context() as patch:
        patch.setattr("specdec.tuning.skip_search.VERSION", 1)
        search(path)
    with pytest.raises(ValueError, match=r"a search of version 1, want 2, which chooses the vocabulary"):
        search(path)


@pytest.mark.parametrize(
    "text",
    [
        "some text\n",
        "some text",
        "\n",
        json.dumps({"a": 1}) + "\n",
        json.dumps({"a": 1}) + "\nand some",
        "[]\n",
        '{"op_code": 0',
        '{"op_code": 99}\n',
        '{"op_code": 0\n{"op_code": 0}\n{"op_c',
    ],
)
def test_a_file_that_is_no_search_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.study"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="not the journal of a search"):
        search(path)
    assert path.read_text(encoding="utf-8").startswith(text)


@pytest.mark.parametrize(
    "torn", [b'{"op_code":4,"worker_i', b"\0" * 40, b"{}"], ids=["cut", "zeros", "whole"]
)
def test_an_incomplete_last_line_is_dropped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "a.study"
    first = search(path)
    first.run(Landscape(), trials=4, seconds=600)
    assert not first.torn
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    again = search(path)
    assert again.torn
    assert again.trials == first.trials
    again.run(Landscape(), trials=6, seconds=600)
    assert path.read_bytes().startswith(whole)
    last = search(path)
    assert not last.torn
    assert last.trials == again.trials


def test_a_search_goes_on_wherever_its_journal_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.study"
    first = search(path, vocabularies=SIZES)
    first.run(Landscape(), trials=3, seconds=600)
    data = path.read_bytes()
    begun = data.index(b'"settings"')
    begun = data.index(b"\n", begun) + 1  # what is not begun has nothing to go on with
    for end in range(begun, len(data), 149):
        path.write_bytes(data[:end])
        again = search(path, vocabularies=SIZES)
        assert again.torn == (data[end - 1 : end] != b"\n")
        assert again.trials == first.trials[: len(again.trials)]
        again.run(Landscape(), trials=len(again.trials) + 1, seconds=600)
        assert search(path, vocabularies=SIZES).trials == again.trials


def test_without_optuna_the_message_says_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install optuna"):
        search(tmp_path / "a.study")
    assert list(tmp_path.iterdir()) == []


def test_only_what_was_proposed_is_tried_without_a_search() -> None:
    sets = [SkipSet.of([0, 1]), PLANTED, SkipSet.of([5], [1, 3, 5])]
    trials = try_all(sets, Landscape())
    assert [t.choice for t in trials] == [Choice(skips) for skips in sets]
    assert [t.complete for t in trials] == [True, True, False]
    assert try_all(sets, Landscape(), should_stop=lambda: True) == []
    # The best of the similarity is last.
    assert [t.choice.skips for t in finalists(trials)] == [sets[0], PLANTED]
    assert finalists([]) == []


# --- on a model ---


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    """Of a model whose planted sub-layers add nothing: leaving out just these costs no draft."""
    config = llama_config(num_hidden_layers=LAYERS, eos_token_ids=())
    weights = llama_weights(config)
    for i in PLANTED.mixers:
        weights[f"model.layers.{i}.self_attn.o_proj.weight"].zero_()
    for i in PLANTED.mlps:
        weights[f"model.layers.{i}.mlp.down_proj.weight"].zero_()
    model = LlamaForCausalLM(config, weights)
    prompts = [[3, 5, 7], [8, 9, 8, 9, 8], [4], [11, 12, 13]]
    depth = 4
    results = autoregressive(model, slots=4).run([Request(p, 12 * 2 + depth) for p in prompts])
    texts = [(p, r.tokens) for p, r in zip(prompts, results, strict=True)]
    times = RoundTimes(0.01, (1.0, 1.05, 1.1, 1.15, 1.2), (0.0, 0.05, 0.05, 0.05, 0.2))
    used = {token for _, tokens in texts for token in tokens}
    ranked = [*sorted(used), *(token for token in range(config.vocab_size) if token not in used)]
    return Evaluator(DraftViews(model, ranked), texts, times, parts=2)


def test_a_planted_set_of_a_model_is_found(evaluator: Evaluator, tmp_path: Path) -> None:
    found = search(tmp_path / "a.study")
    found.run(evaluator, trials=110, seconds=600)
    (best,) = best_of(found.trials, 1)
    assert best.choice == Choice(PLANTED)
    assert best.policy.tokens == 5.0  # every draft is kept
    each = 0.05 + 0.05 * (2 * LAYERS - len(PLANTED)) + 0.2
    assert best.pace == pytest.approx((4 * each + 1.2) / 5)


def test_a_reduced_vocabulary_costs_drafts_and_saves_time(evaluator: Evaluator) -> None:
    """The 35 tokens that occur are the first of the ranked ones."""
    whole, enough, few = (evaluator(Choice(PLANTED, size)).policy for size in (None, 40, 15))
    assert enough.tokens == whole.tokens == 5.0
    assert whole.pace - enough.pace == pytest.approx(4 * 0.2 * 21 / 61 / 5)
    assert few.tokens < 5.0


def test_similarity_proposes_the_planted_set(evaluator: Evaluator) -> None:
    similar = evaluator.similar()
    (planted,) = [s for s in similar if s.skips == PLANTED]
    assert planted.similarity == pytest.approx(1.0, abs=1e-5)
    some = proposed(similar, LAYERS)
    assert 0 < len(some) <= 16
    assert all(3 <= len(s.skipped) < 2 * LAYERS for s in some)
    assert torch.is_inference_mode_enabled() is False
