"""The recurrent drafter: its arithmetic against plain float64 PyTorch, and its state after any rounds."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loop.models import random_model
from loop.recurrent import random_drafter, random_files
from specdec import ops
from specdec.acceptance import SamplingParams
from specdec.cache import Steps
from specdec.drafters import DraftRequest, Proposal, ProposalKind, stepping
from specdec.drafters.calibration import Calibration
from specdec.drafters.recurrent import RecurrentDrafter
from specdec.drafters.shape import TreeShape
from specdec.models.checkpoint import weights_sha256
from specdec.models.drafter_checkpoint import save_drafter
from specdec.models.drafter_config import RecurrentDrafterConfig
from specdec.models.features import FeatureTap, NodeFeatures
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM
from specdec.models.recurrent_drafter import RecurrentDrafterModel

# --- the arithmetic, in float64 ---


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@dataclass
class Memory:
    """State [HV, DV, DK] and the last rows of the convolution, oldest first [W-1, C]."""

    state: Tensor
    window: Tensor


class Plain:
    """One token at a time, as models/recurrent_drafter.py writes it down."""

    def __init__(
        self, config: RecurrentDrafterConfig, tensors: dict[str, Tensor], target: GatedDeltaNetForCausalLM
    ) -> None:
        self.c = config.layer
        self.t = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
        self.embeddings, self.head = target.embeddings.double(), target.head.unpack().double()

    def start(self) -> Memory:
        c = self.c
        rows = c.conv_size - 1 if c.use_short_conv else 0
        return Memory(
            torch.zeros(c.num_v_heads, c.head_v_dim, c.head_k_dim).double(),
            torch.zeros(rows, c.conv_dim).double(),
        )

    def step(
        self, token: int, memory: Memory, feature: Tensor | None = None, own: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Memory]:
        """Logits over the target's vocabulary, output h, and the memory after the token."""
        t, c = self.t, self.c
        eps = c.norm_eps
        x = t["embed_proj.weight"] @ rms_norm(self.embeddings[token], t["embed_norm.weight"], eps)
        if feature is not None:
            x = x + t["fuse_proj.weight"] @ rms_norm(feature.double(), t["fuse_norm.weight"], eps)
        if own is not None:
            x = x + t["own_proj.weight"] @ rms_norm(own, t["own_norm.weight"], eps)
        h, after = self._block(x, memory)
        logits = self.head @ rms_norm(h, t["norm.weight"], eps)
        if "draft_vocab" in t:
            kept = t["draft_vocab"].long()
            logits = torch.full_like(logits, -torch.inf).index_copy(0, kept, logits[kept])
        return logits, h, after

    def _block(self, x: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        c, t = self.c, {n.removeprefix("layer."): v for n, v in self.t.items() if n.startswith("layer.")}
        y = rms_norm(x, t["attn_norm.weight"], c.norm_eps)
        qkv = torch.cat([t[f"attn.{n}_proj.weight"] @ y for n in "qkv"])
        window = memory.window
        if c.use_short_conv:
            rows = torch.cat([window, qkv[None]])  # [W, C]
            window = rows[1:]
            qkv = (rows * torch.cat([t[f"attn.{n}_conv1d.weight"][:, 0] for n in "qkv"]).T).sum(0)
            if c.conv_bias:
                qkv = qkv + torch.cat([t[f"attn.{n}_conv1d.bias"] for n in "qkv"])
        q, k, v = F.silu(qkv).split([c.key_dim, c.key_dim, c.value_dim])
        group = c.num_v_heads // c.num_heads
        q, k = (z.view(c.num_heads, -1).repeat_interleave(group, 0) for z in (q, k))  # [HV, DK]
        q, k = (z * torch.rsqrt(z.square().sum(-1, keepdim=True) + 1e-6) for z in (q, k))
        v = v.view(c.num_v_heads, -1)
        decay = torch.exp(
            -t["attn.A_log"].exp() * F.softplus(t["attn.a_proj.weight"] @ y + t["attn.dt_bias"])
        )
        beta = torch.sigmoid(t["attn.b_proj.weight"] @ y) * (2 if c.allow_neg_eigval else 1)
        state = memory.state * decay[:, None, None]
        write = beta[:, None] * (v - torch.einsum("hvk,hk->hv", state, k))
        state = state + write[:, :, None] * k[:, None, :]
        o = rms_norm(
            torch.einsum("hvk,hk->hv", state, q) * c.head_k_dim**-0.5, t["attn.o_norm.weight"], c.norm_eps
        )
        if c.use_gate:
            o = o * F.silu(t["attn.g_proj.weight"] @ y).view_as(o)
        x = x + t["attn.o_proj.weight"] @ o.flatten()
        y = rms_norm(x, t["mlp_norm.weight"], c.norm_eps)
        y = F.silu(t["mlp.gate_proj.weight"] @ y) * (t["mlp.up_proj.weight"] @ y)
        return x + t["mlp.down_proj.weight"] @ y, Memory(state, window)


# Sums of up to 192 products in float32, eight in a row down to a logit: errors of about 8 x 2^-24 x sqrt(192)
# = 7e-6 of numbers of size 1 to 4; a state holds some dozen of such writes.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}

VARIANTS = {
    "fused": {},
    "one feature": {"features": ("hidden:0",)},
    "independent": {"features": ()},
    "draft vocabulary": {"draft_vocab_size": 17},
    "plain layer": {"use_gate": False, "use_short_conv": False, "allow_neg_eigval": True},
    "other layer": {"num_heads": 1, "num_v_heads": 3, "conv_size": 2, "conv_bias": True},
}


@pytest.fixture(scope="module")
def target() -> GatedDeltaNetForCausalLM:
    return random_model(3)


@torch.inference_mode()
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_chain_and_tree_are_the_arithmetic(variant, target):
    config, tensors = random_files(target, 1, **VARIANTS[variant])
    model, plain = RecurrentDrafterModel(config, tensors, target), Plain(config, tensors, target)
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(0, 61, (9,), generator=generator)
    seen = torch.randn(9, config.feature_size, generator=generator) if config.features else None

    def pair(i: int) -> dict[str, Tensor]:
        return {} if seen is None else {"feature": seen[i]}

    # Rows of the batch: an empty one, and another text that must not matter.
    cache = model.new_cache(3)
    features = (
        None if seen is None else torch.stack([seen[:5], torch.full_like(seen[:5], torch.nan), -seen[:5]])
    )
    model.prefill(text[None, :5].repeat(3, 1), features, cache=cache, slots=[1, 0, 2], lengths=[5, 0, 4])
    memory = plain.start()
    for i in range(5):
        _, h, memory = plain.step(int(text[i]), memory, **pair(i))
    torch.testing.assert_close(cache.state[0][1].double(), memory.state, **TOLERANCE)
    assert not cache.state[0][0].any()

    slots = torch.tensor([1], dtype=torch.int32)
    steps = Steps()
    h, round = model.forward(
        text[None, 5:], features=None if seen is None else seen[None, 5:], cache=cache, slots=slots
    )
    steps.extend(round)
    for i in range(4):
        logits, want, memory = plain.step(int(text[5 + i]), memory, **pair(5 + i))
        torch.testing.assert_close(h[0, i].double(), want, **TOLERANCE)
    assert_logits(model, h[0, 3], logits)

    # A tree below the last token: 7 -> (8 -> 9, 10), and 11 beside it, on the drafter's own outputs.
    drafted, parents = [7, 8, 10, 9, 11], [-1, 0, 0, 1, -1]
    outputs, memories = [want], [memory]
    place = {-1: 3}
    for node, (token, parent) in enumerate(zip(drafted, parents, strict=True)):
        place[node] = len(steps)
        rows, h = model.step(
            torch.tensor([[token]]),
            h,
            cache=cache,
            slots=slots,
            parents=torch.tensor([[place[parent]]], dtype=torch.int32),
            prefix=steps,
        )
        assert len(steps) == h.shape[1] == place[node] + 1
        carried = {"own": outputs[parent + 1]} if config.features else {}
        logits, want, after = plain.step(token, memories[parent + 1], **carried)
        outputs.append(want)
        memories.append(after)
        torch.testing.assert_close(h[0, -1].double(), want, **TOLERANCE)
        assert_logits(model, h[0, -1], logits)
        assert torch.equal(rows, model.logits(h[:, -1]))


@torch.inference_mode()
@pytest.mark.parametrize("variant", ["fused", "draft vocabulary"])
def test_matrices_in_int8_are_those_of_rounded_weights(variant, target):
    """All but the table's: what a drafter computes is what one of the rounded weights does."""
    config, tensors = random_files(target, 1, **VARIANTS[variant])
    rounded = {
        name: ops.pack_weight(t, torch.int8).unpack() if t.dim() == 2 and "conv" not in name else t
        for name, t in tensors.items()
    }
    rounded["embed_proj.weight"] = tensors["embed_proj.weight"]
    model = RecurrentDrafterModel(config, tensors, target, weight_dtype=torch.int8)
    plain = RecurrentDrafterModel(config, rounded, target)
    generator = torch.Generator().manual_seed(4)
    text, drafted = (torch.randint(0, 61, (1, n), generator=generator) for n in (6, 3))
    seen, slots = torch.randn(1, 6, config.feature_size, generator=generator), torch.zeros(1).int()
    outputs, logits = [], []
    for drafter in (model, plain):
        cache, steps = drafter.new_cache(1), Steps()
        h, round = drafter.forward(text, features=seen, cache=cache, slots=slots)
        steps.extend(round)
        parents = torch.tensor([[5, 5, 2]], dtype=torch.int32)
        rows, h = drafter.step(drafted, h, cache=cache, slots=slots, parents=parents, prefix=steps)
        outputs.append(h)
        logits.append(rows)
    torch.testing.assert_close(*outputs, **TOLERANCE)
    assert not torch.equal(*outputs)  # the scale is multiplied later
    head = ops.pack_weight(plain._head.unpack(), torch.int8)
    want = ops.rms_norm_linear(outputs[0][0, 6:], tensors["norm.weight"], config.layer.norm_eps, head)
    assert torch.equal(logits[0], want)


def assert_logits(model: RecurrentDrafterModel, h: Tensor, want: Tensor) -> None:
    columns = torch.arange(61) if model.vocabulary is None else model.vocabulary
    torch.testing.assert_close(model.logits(h).double(), want[columns], **TOLERANCE)
    assert len(columns) == (want > -torch.inf).sum()


def test_what_a_model_is_built_of_is_checked(tmp_path, target):
    config, tensors = random_files(target)
    with pytest.raises(ValueError, match=r"target\.vocab_size: got 61, want the target's 62"):
        RecurrentDrafterModel(config, tensors, random_model(vocab_size=62))
    with pytest.raises(ValueError, match=r"feature_size: got 192, want the target's 320"):
        RecurrentDrafterModel(config, tensors, random_model(expand_v=2.0))
    with pytest.raises(ValueError, match=r"feature: got hidden:1, want a layer from 0 to 0"):
        RecurrentDrafterModel(config, tensors, random_model(num_hidden_layers=1))
    model = RecurrentDrafterModel(config, tensors, target)
    for tokens in ([[3, 61]], [[-1, 3]]):
        with pytest.raises(ValueError, match="prompts: got token ids"):
            model.prefill(
                torch.tensor(tokens), torch.zeros(1, 2, 192), cache=model.new_cache(1), slots=[0], lengths=[2]
            )


@pytest.mark.parametrize("variant", ["fused", "independent", "draft vocabulary"])
def test_what_a_drafted_token_reads_is_counted(variant, target):
    config, tensors = random_files(target, 1, **VARIANTS[variant])
    model = RecurrentDrafterModel(config, tensors, target)
    read = [t.numel() for n, t in tensors.items() if n.startswith(("own_", "layer.", "norm."))]
    assert model.num_parameters == sum(read) + 64 * (17 if variant == "draft vocabulary" else 61)


def test_inputs_that_a_drafter_does_not_have_are_refused(target):
    for variant, features, message in (
        ("one feature", None, r"^features: got None, want a tensor: the drafter reads \['hidden:0'\]$"),
        (
            "independent",
            torch.zeros(1, 1, 64),
            r"^features: got a tensor, want None: the drafter reads \[\]$",
        ),
    ):
        model = random_drafter(target, **VARIANTS[variant])
        cache, token = model.new_cache(1), torch.tensor([[3]])
        with pytest.raises(ValueError, match=message):
            model.forward(token, features=features, cache=cache, slots=torch.zeros(1, dtype=torch.int32))
        with pytest.raises(ValueError, match=message):
            model.prefill(token, features, cache=cache, slots=[0], lengths=[1])


def test_a_drafter_of_other_weights_is_refused(tmp_path):
    from specdec.models import load_model

    target = load_model("gdn-code")
    assert target.source is not None
    right = weights_sha256(target.source)
    for sha256 in (right, "ab" * 32):
        config, tensors = random_files(target, features=("hidden:9",), sha256=sha256)
        save_drafter(tmp_path, config, tensors)
        if sha256 == right:
            model = RecurrentDrafterModel.from_directory(tmp_path, target)
            assert model.num_parameters > config.num_parameters
            continue
        with pytest.raises(
            ValueError, match=f"trained for random .* SHA-256 abab.* have {right[:16]}.*train-drafter"
        ):
            RecurrentDrafterModel.from_directory(tmp_path, target)


# --- the state ---


class Texts:
    """Drives a drafter as the loop does, with texts that are known beforehand."""

    def __init__(self, target: GatedDeltaNetForCausalLM, drafter: RecurrentDrafter, seed: int) -> None:
        self.target, self.drafter = target, drafter
        self.random = random.Random(seed)
        self.texts: dict[int, list[int]] = {}
        self.features: dict[int, Tensor | None] = {}
        self.at: dict[int, int] = {}
        self.prompts: dict[int, int] = {}

    def begin(self, slot: int, prompt: int, length: int) -> None:
        text = [self.random.randrange(1, 61) for _ in range(length)]
        seen = target_features(self.target, text, self.drafter)
        self.texts[slot], self.features[slot], self.prompts[slot] = text, seen, prompt
        self.at[slot] = prompt + 1
        self.drafter.begin(slot, text[:prompt], None if seen is None else seen[:prompt])
        self.drafter.observe(slot, (), text[prompt : prompt + 1], shown(seen, prompt - 1, prompt))

    def round(self, slot: int, proposal: Proposal, emitted: int) -> None:
        """The text goes on by `emitted` tokens; what of the proposal is on it was accepted."""
        at, text, seen = self.at[slot], self.texts[slot], self.features[slot]
        tokens = text[at : at + emitted]
        path: list[int] = []
        for token in tokens[:-1]:
            on = [
                c
                for c in proposal.tree.children(path[-1] if path else -1)
                if proposal.tree.tokens[c] == token
            ]
            if not on:
                break
            path.append(on[0])
        tokens = tokens[: len(path) + 1]
        self.drafter.observe(slot, path, tokens, shown(seen, at - 1, at - 1 + len(tokens)))
        self.at[slot] = at + len(tokens)


def shown(features: Tensor | None, first: int, last: int) -> NodeFeatures | None:
    return None if features is None else NodeFeatures.of(features[first:last].clone())


def target_features(
    target: GatedDeltaNetForCausalLM, text: list[int], drafter: RecurrentDrafter
) -> Tensor | None:
    """[T, F]"""
    if not drafter.features:
        return None
    tap = FeatureTap(drafter.features)
    target.prefill([text], cache=target.new_cache(1), slots=[0], tap=tap)
    return tap.rows()[0]


def assert_state_is_the_texts(run: Texts, slot: int) -> None:
    """Bit for bit the state of a fresh drafter that prefilled the prompt and stepped token by token: what the
    drafter holds is the text up to some token, and its unseen tokens are all that follow.
    """
    model, drafter = run.drafter.model, run.drafter
    drafter._settle()
    unseen = len(drafter._slots[slot].unseen)
    text, seen, prompt = run.texts[slot], run.features[slot], run.prompts[slot]
    assert text[run.at[slot] - unseen : run.at[slot]] == drafter._slots[slot].unseen
    cache = model.new_cache(1)
    model.prefill(
        torch.tensor([text[1:prompt]], dtype=torch.int64),
        None if seen is None else seen[None, : prompt - 1],
        cache=cache,
        slots=[0],
        lengths=[prompt - 1],
    )
    row = torch.tensor([0], dtype=torch.int32)
    for i in range(prompt, run.at[slot] - unseen):
        feature = None if seen is None else seen[None, i - 1 : i]
        _, round = model.forward(torch.tensor([[text[i]]]), features=feature, cache=cache, slots=row)
        cache.commit(round, None, torch.tensor([1], dtype=torch.int32))
    for got, want in zip(drafter._cache.snapshot(slot), cache.snapshot(0), strict=True):
        assert got.keys() == want.keys() == {"state", "convolution window"}
        assert all(torch.equal(got[name], want[name]) for name in want)


SAMPLED = SamplingParams(temperature=1.0)


SHAPES = {"chain": TreeShape((1,)), "fixed": TreeShape((2, 2, 1)), "pruned": TreeShape.pruned(3)}


@pytest.mark.parametrize(
    ("variant", "shape", "slots"),
    [
        *(("fused", shape, slots) for shape in SHAPES for slots in (1, 4)),
        ("independent", "pruned", 4),
        ("draft vocabulary", "fixed", 4),
        ("plain layer", "chain", 4),
    ],
)
def test_the_state_is_a_function_of_the_text(variant, shape, slots, target):
    """Rounds with and without drafts, long gaps, sequences that leave and others that take their slots;
    drafts that are right, wrong and right in part.
    """
    model = random_drafter(target, 5, **VARIANTS[variant])
    drafter = RecurrentDrafter(model, slots=slots, branching=SHAPES[shape])
    run = Texts(target, drafter, seed=slots)
    r = random.Random(17)
    for slot in range(slots):
        run.begin(slot, r.choice([1, 2, 7]), 200)
    accepted = 0
    for _ in range(40):
        slot = r.randrange(slots)
        event = r.random()
        if event < 0.1:
            drafter.end(slot)
            run.begin(slot, r.choice([1, 3]), 200)
        elif event < 0.2:  # a long time without drafts
            count = min(r.randint(1, 70), len(run.texts[slot]) - run.at[slot])
            for _ in range(count):
                run.round(slot, Proposal.empty(), 1)
        active = [s for s in range(slots) if len(run.texts[s]) - run.at[s] > 8 and r.random() < 0.9]
        requests = [
            DraftRequest(
                s, r.randint(0, 9), r.randint(1, 4), r.choice([SAMPLED, SamplingParams()]), s, run.at[s]
            )
            for s in active
        ]
        proposals = drafter.propose(requests)
        for request, proposal in zip(requests, proposals, strict=True):
            # The text follows a random path of the draft, so that drafts are accepted as well.
            path: list[int] = []
            while r.random() < 0.7 and (below := proposal.tree.children(path[-1] if path else -1)):
                path.append(r.choice(list(below)))
            follow(run, request.slot, [proposal.tree.tokens[n] for n in path])
            accepted += len(path)
            run.round(request.slot, proposal, len(path) + 1)
        if r.random() < 0.3:
            assert_state_is_the_texts(run, r.randrange(slots))
    assert accepted > 10
    for slot in range(slots):
        assert_state_is_the_texts(run, slot)


def test_what_waits_for_a_draft_is_bounded(target, monkeypatch):
    """A drafter that is asked for nothing runs the text anyway before its features fill the memory; what was
    accepted in its last drafted round comes first, and a neighbour's open round stays as it is.
    """
    monkeypatch.setattr(stepping, "KEPT", 50)
    drafter = RecurrentDrafter(random_drafter(target, 5), slots=2, branching=(2, 1), draw=False)
    run = Texts(target, drafter, seed=1)
    for slot in (0, 1):
        run.begin(slot, 3, 300)
    both = [DraftRequest(slot, 4, 3) for slot in (0, 1)]
    for request, proposal in zip(both, drafter.propose(both), strict=True):
        run.round(request.slot, proposal, 1)
    for step in range(120):
        (proposal,) = drafter.propose(both[1:]) if step % 3 else [Proposal.empty()]
        run.round(0, Proposal.empty(), 1)  # first, while the other's round is open
        follow(run, 1, list(proposal.tree.tokens[:1]))
        run.round(1, proposal, 2 if len(proposal.tree) else 1)
        assert len(drafter._slots[0].unseen) <= 50
        waiting = drafter._slots[0].features
        assert sum(map(len, waiting)) == len(drafter._slots[0].unseen)
        # And nothing that was read is kept alive by what was not.
        assert all(part.rows().untyped_storage().nbytes() == part.rows().nbytes for part in waiting)
    for slot in (0, 1):
        assert_state_is_the_texts(run, slot)


def test_what_waits_is_bounded_without_features_too(target, monkeypatch):
    monkeypatch.setattr(stepping, "KEPT", 50)
    drafter = RecurrentDrafter(random_drafter(target, 5, features=()), branching=(2, 1), draw=False)
    run = Texts(target, drafter, seed=1)
    run.begin(0, 3, 300)
    for _ in range(120):
        run.round(0, Proposal.empty(), 1)
        assert len(drafter._slots[0].unseen) <= 50
    assert_state_is_the_texts(run, 0)


def follow(run: Texts, slot: int, tokens: list[int]) -> None:
    """Writes these tokens into what is still to come of a text."""
    at, text = run.at[slot], run.texts[slot]
    if tokens and text[at : at + len(tokens)] != tokens:
        text[at : at + len(tokens)] = tokens
        new = target_features(run.target, text, run.drafter)
        old = run.features[slot]
        if new is not None and old is not None:
            # What has been shown stays as it was, also where a longer prefill rounds otherwise.
            run.features[slot] = torch.cat([old[:at], new[at:]])


# --- what it drafts ---


@pytest.mark.parametrize("variant", ["fused", "independent", "draft vocabulary"])
@pytest.mark.parametrize("draw", [True, False])
def test_a_ragged_batch_drafts_what_single_sequences_draft(variant, draw, target):
    model = random_drafter(target, 8, **VARIANTS[variant])
    r = random.Random(3)
    texts = [[r.randrange(1, 61) for _ in range(n)] for n in (4, 9, 2, 30)]
    limits = [(9, 4), (5, 2), (0, 3), (14, 3)]

    def proposals(rows: list[int], branching: tuple[int, ...]) -> list[Proposal]:
        drafter = RecurrentDrafter(model, slots=len(rows), branching=branching, draw=draw)
        requests = []
        for slot, row in enumerate(rows):
            text = texts[row]
            seen = target_features(target, text, drafter)
            drafter.begin(slot, text[:1], None if seen is None else seen[:1])
            drafter.observe(slot, (), text[1:], shown(seen, 0, len(text) - 1))
            requests.append(DraftRequest(slot, *limits[row], SAMPLED, seed=row, position=len(text)))
        return drafter.propose(requests)

    for branching in ((1,), (2, 1), (2, 2, 1)):
        together = proposals([0, 1, 2, 3], branching)
        assert sum(len(p.tree) for p in together) > 5
        for row, proposal in enumerate(together):
            (alone,) = proposals([row], branching)
            assert alone.tree == proposal.tree
            assert alone.chances == proposal.chances
            if not len(proposal.tree):
                continue
            if not draw:
                assert proposal.kind is ProposalKind.DETERMINISTIC
                continue
            assert proposal.kind is ProposalKind.WITHOUT_REPLACEMENT
            assert proposal.draft_probs is not None
            assert proposal.draft_probs.shape[1] == 61
            for mine, theirs in zip(alone.rows, proposal.rows, strict=True):
                assert torch.equal(alone.draft_probs[mine], proposal.draft_probs[theirs])
            if model.vocabulary is not None:
                outside = torch.ones(61, dtype=torch.bool)
                outside[model.vocabulary] = False
                assert not proposal.draft_probs[:, outside].any()
                assert set(proposal.tree.tokens) <= set(model.vocabulary.tolist())


def test_first_drafts_are_the_likeliest_after_the_text(target):
    """The root's children follow from the plain arithmetic over the whole text."""
    config, tensors = random_files(target, 11)
    plain, model = Plain(config, tensors, target), RecurrentDrafterModel(config, tensors, target)
    drafter = RecurrentDrafter(model, branching=(3, 1))
    text = [5, 9, 33, 2, 7]
    seen = target_features(target, text, drafter)
    drafter.begin(0, text[:3], seen[:3])
    drafter.observe(0, (), text[3:4], shown(seen, 2, 3))
    drafter.observe(0, (), text[4:5], shown(seen, 3, 4))
    (proposal,) = drafter.propose([DraftRequest(0, 3, 1, position=5)])
    memory = plain.start()
    for i in range(1, 5):
        logits, _, memory = plain.step(text[i], memory, feature=seen[i - 1])
    assert list(proposal.tree.tokens) == logits.topk(3).indices.tolist()
    said = logits.softmax(0)[list(proposal.tree.tokens)]
    # By twice the error of logits of size 4, TOLERANCE: 2 x (1e-4 + 1e-4 x 4).
    calibration = Calibration(greedy=True)
    want = [calibration(probability, rank) for rank, probability in enumerate(said.tolist())]
    assert proposal.chances == pytest.approx(want, rel=1e-3)
