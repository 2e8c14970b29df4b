"""The draft budget: what rounds cost, and what is drafted for it."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from specdec.budget import DraftBudget, Rates, SequenceBudget
from specdec.costs import RoundCost, prior_cost
from specdec.drafters import combined
from specdec.drafters.worth import EXPLORE_EVERY, Exploration, SecondsOfLate, Worth
from specdec.learned import PerModel, forget
from specdec.tree import TokenTree


def jumping(rows: int, nodes: int) -> float:
    """A machine that is no line: two milliseconds more from eight products on."""
    return 0.002 + 0.0001 * rows * nodes + (0.002 if rows * nodes > 8 else 0.0)


def taught(rows: int = 1, rounds: int = 400, noise: float = 0.0) -> RoundCost:
    cost, draw = RoundCost(), random.Random(0)
    for _ in range(rounds):
        nodes = draw.randrange(1, 17)
        cost.observe(rows, nodes, jumping(rows, nodes) * (1.0 + noise * draw.uniform(-1.0, 1.0)))
    return cost


# --- costs ---


def test_the_prior_grows_with_rows_and_nodes_and_jumps_where_registers_are_full() -> None:
    assert prior_cost(1, 1) == 1.0
    for rows in (1, 2, 5, 16, 64):
        times = [prior_cost(rows, nodes) for nodes in range(1, 65)]
        assert all(a < b for a, b in pairwise(times))
    assert prior_cost(1, 9) - prior_cost(1, 8) > 3 * (prior_cost(1, 8) - prior_cost(1, 7))


@pytest.mark.parametrize("rows", [1, 4])
def test_measured_rounds_give_the_true_curve(rows: int) -> None:
    # A running mean of times within 5% of the truth is within 5%. Of the guess that a size began with, from
    # its neighbours and a fifth off at most, 1/20 is left after the 25 rounds that a size gets: 1% more.
    cost = taught(rows, noise=0.05)
    for nodes in range(1, 17):
        assert cost(rows, nodes) == pytest.approx(jumping(rows, nodes), rel=0.06)


def test_what_was_not_seen_is_interpolated_and_never_falls() -> None:
    cost = RoundCost()
    for _ in range(10):
        cost.observe(1, 1, 0.002)
        cost.observe(1, 9, 0.006)
        cost.observe(1, 12, 0.003)  # an accident: more nodes in less time
    times = [cost(1, nodes) for nodes in range(1, 17)]
    assert all(a <= b for a, b in pairwise(times))
    # Of a first guess, up to a half off, 0.7 stay, and of that 1/9 after eight more rounds: 4%.
    assert times[0] == pytest.approx(0.002, rel=0.05)
    assert times[8] == pytest.approx(0.006, rel=0.05)
    # Another batch size begins with what is known of the nearest.
    assert cost(2, 1) == pytest.approx(times[0] * prior_cost(2, 1))


def test_an_interruption_counts_for_little_and_a_cold_start_for_nothing() -> None:
    cost = RoundCost()
    cost.observe(1, 1, 0.1)
    cost.observe(1, 1, 0.002)
    assert cost(1, 1) == pytest.approx(0.002)
    other = RoundCost()
    other.observe(1, 4, 0.1)  # of a size that may not come again
    other.observe(1, 1, 0.002)
    assert other(1, 4) == pytest.approx(0.002 * prior_cost(1, 4))
    for _ in range(20):
        cost.observe(1, 1, 0.002)
    cost.observe(1, 1, 2.0)
    assert cost(1, 1) < 0.0022


def test_what_was_not_seen_for_long_is_forgotten() -> None:
    cost = RoundCost()
    for _ in range(3):
        cost.observe(1, 1, 0.001)
        cost.observe(1, 4, 0.05)  # once it took long
    for _ in range(600):
        cost.observe(1, 1, 0.001)
    assert cost(1, 4) == pytest.approx(0.001 * prior_cost(1, 4))


# --- the choice ---


def budget_with(cost: RoundCost, rows: int, rate: float) -> DraftBudget:
    """A budget whose loop made `rate` tokens a second of late."""
    budget = DraftBudget(16, costs=cost)
    for _ in range(200):
        budget.observe_round(rows, 5, cost(rows, 5), 1.0, round(rate))
        known = budget._rates.by_size[rows]
        known.tokens = rate * known.seconds
    return budget


@pytest.mark.parametrize("rows", [1, 4])
def test_the_choice_has_the_most_tokens_above_the_price_of_its_time(rows: int) -> None:
    cost, draw = taught(rows), random.Random(1)
    for _ in range(50):
        chances = []
        for _ in range(rows):
            row, chance = [], 1.0
            for _ in range(draw.randrange(0, 17)):
                chance *= draw.uniform(0.5, 1.0)
                row.append(chance)
            chances.append(row)
        budget = DraftBudget(16, costs=cost)
        n = budget.choose(chances)
        rate = budget.rate(rows)
        assert rate == pytest.approx(rows / cost(rows, 1))  # at least plain decoding's

        def gain(n: int, chances: list[list[float]] = chances, rate: float = rate) -> float:
            # The margin of 3% is on the time that is added.
            return sum(sum(row[:n]) for row in chances) - 1.03 * rate * (cost(rows, 1 + n) - cost(rows, 1))

        assert gain(n) == pytest.approx(max(map(gain, range(17))))


def test_nothing_is_verified_where_it_does_not_pay() -> None:
    budget = DraftBudget(16, costs=taught())
    assert budget.choose([[0.01] * 16]) == 0
    assert budget.choose([[]]) == 0
    assert budget.choose([]) == 0
    assert budget.choose([[0.99**i for i in range(16)]]) == 16
    assert DraftBudget(4, costs=taught()).choose([[0.99] * 16]) == 4
    assert DraftBudget(16, adaptive=False).choose([[0.01] * 9]) == 9


def test_tokens_of_the_sequence_that_ends_last_are_worth_more() -> None:
    cost = RoundCost()
    for rows in (1, 2, 4):
        for _ in range(10):
            cost.observe(rows, 1, 0.004 + 0.001 * rows)  # half of a round of four is shared
    budget = DraftBudget(16, costs=cost)
    assert budget.weights([7]) == [1.0]
    assert budget.weights([30] * 4) == pytest.approx([1.0] * 4)
    assert budget.weights([40, 10, 10, 10]) == pytest.approx([2.5, 0.5, 0.5, 0.5])
    for _ in range(10):
        cost.observe(8, 1, 0.012)
    sure, none = [0.95] * 16, [0.0]
    alone = budget.choose([sure, *[none] * 7], 8, budget.weights([10] + [40] * 7))
    assert alone < budget.choose([sure, *[none] * 7], 8, budget.weights([40] + [10] * 7))


def test_the_faster_decoding_is_the_dearer_is_a_node() -> None:
    cost = taught()
    slow, fast = (budget_with(cost, 1, rate) for rate in (600.0, 1500.0))
    assert 0.0 < slow.prices(1).node < fast.prices(1).node
    assert slow.prices(1).second < fast.prices(1).second
    assert DraftBudget(16, adaptive=False).prices(1) == (0.0, 0.0)


def test_drafts_without_chances_get_those_of_late() -> None:
    budget, tree = DraftBudget(16, costs=taught()), TokenTree([5, 6, 7])
    for _ in range(100):
        budget.observe_drafts(tree, [5, 6, 9])  # two of three, verified or not
    first, second, third = budget.guess(tree)
    # What is remembered of 100 rounds is some 130 tokens. The prior's three, of 0.7, weigh 3/133, and add
    # 3/133 x (0.7 - 2/3) = 8e-4.
    assert first == pytest.approx(2 / 3, abs=1e-3)
    assert (second, third) == pytest.approx((first**2, first**3))


# --- sequences without a clock ---

CHAIN = range(1, 17)


def test_a_sequence_drafts_deeper_the_more_is_accepted_and_the_cheaper_it_is() -> None:
    depths = {}
    for name, accepted, cost in (("often", 4, 0.1), ("seldom", 0, 0.1), ("costly", 4, 0.6)):
        budget = SequenceBudget(CHAIN, cost)
        for _ in range(50):
            budget.observe(5, accepted)
        depths[name] = budget.depth()
    assert depths["seldom"] == 0
    assert 0 < depths["costly"] < depths["often"] <= 16
    # The nodes of a tree cost more than those of a chain of the same depth.
    chain, tree = SequenceBudget(CHAIN, 0.1), SequenceBudget([4 * n for n in CHAIN], 0.1)
    assert 0 < tree.depth() < chain.depth()
    assert (tree.nodes(0), tree.nodes(3)) == (0, 12)


def test_a_sequence_that_stopped_drafting_tries_again_ever_more_rarely() -> None:
    budget = SequenceBudget(CHAIN, 0.5, explore_every=4)
    for _ in range(20):
        budget.observe(3, 0)
    depths = [budget.depth() for _ in range(28)]
    assert [i for i, depth in enumerate(depths, 1) if depth] == [4, 12, 28]
    assert max(depths) == 2


def test_equal_histories_give_equal_depths_whatever_the_clock_says() -> None:
    shared = DraftBudget(16)
    first = shared.for_sequence(CHAIN, 0.2)
    for _ in range(10):
        shared.observe_round(1, 17, 1e3, 1e4, 1)
        shared.observe_drafts(TokenTree([1, 2]), [9])
    second = shared.for_sequence(CHAIN, 0.2)
    assert first.depth() == second.depth() > 0
    assert DraftBudget(16, adaptive=False).for_sequence([2, 4, 6], 0.2).depth() == 3
    assert DraftBudget(0).for_sequence([], 0.2).depth() == 0


# --- whether a drafter's work pays ---


def test_slow_calls_count_for_less_and_cold_ones_for_nothing() -> None:
    seconds = SecondsOfLate()
    assert seconds() == 0.0
    for took in (0.5, 0.3, 0.2, 0.004):
        assert seconds.cold
        seconds.observe(took)
    assert (seconds(), seconds.cold) == (0.004, False)
    seconds.observe(5.0)  # counts as three times what was thought, for a twentieth
    assert seconds() == pytest.approx(0.0044)
    seconds.observe(0.0004)
    assert seconds() == pytest.approx(0.0034)


def test_exploring_becomes_rarer_and_starts_anew() -> None:
    exploration = Exploration(4)
    assert [i for i in range(1, 29) if exploration.due(False)] == [4, 12, 28]
    assert not exploration.due(True)
    assert [i for i in range(1, 13) if exploration.due(False)] == [4, 12]


def test_a_drafter_that_brings_less_than_its_time_is_asked_rarely() -> None:
    worth = Worth()
    asked = []
    for i in range(2000):
        (good,) = worth.choose([0], [1000.0])
        if good:
            asked.append(i)
            worth.observe([(0, 0.3)], 0.001)  # it had to bring one token
    first = next(i for i in range(2000) if i not in asked)
    assert 0 < first < 10
    assert len(asked) <= first + 7  # after 16, 32, ... rounds
    while worth.choose([0], [1000.0]) == [False]:
        pass
    worth.observe([(0, 4.0)], 0.001)  # a try that brought much is followed by more
    assert worth.choose([0], [1000.0]) == [True]


def test_classes_are_told_apart() -> None:
    worth = Worth((1.0, 0.5))
    for _ in range(20):
        worth.observe([(0, 2.0), (1, 0.01)], 0.001)
    assert worth.choose([0, 1, 0], [1000.0] * 3) == [True, False, True]
    assert worth.choose([1], [1000.0]) == [False]
    tried = [worth.choose([1], [1000.0])[0] for _ in range(EXPLORE_EVERY)]
    assert sum(tried) == 1


def test_what_is_not_known_of_a_class_follows_from_the_others() -> None:
    worth = Worth((1.0, 0.5))
    for _ in range(30):
        worth.observe([(0, 1.2)], 0.001)
    assert worth.choose([0], [1000.0]) == [True]
    assert worth.choose([1], [1000.0]) == [False]  # half of that is less than the token that it costs
    for _ in range(30):
        worth.observe([(1, 1.2)], 0.001)
    assert worth.choose([1], [1000.0]) == [True]


def test_sequences_share_the_time_of_a_call() -> None:
    worth = Worth()
    for _ in range(20):
        worth.observe([(0, 0.4)] * 4, 0.001)
    assert worth.choose([0], [1000.0]) == [False]
    assert worth.choose([0] * 4, [1000.0] * 4) == [True] * 4


def test_a_second_is_worth_what_each_sequence_says() -> None:
    worth = Worth()
    for _ in range(20):
        worth.observe([(0, 1.0)], 0.001)
    assert worth.choose([0], [900.0]) == [True]
    assert worth.choose([0], [1200.0]) == [False]
    # Half of the time of a call for two is too dear for the one, and the other alone does not pay for a call.
    assert worth.choose([0, 0], [900.0, 4800.0]) == [True, False]


def test_tokens_are_worth_more_where_slow_rounds_follow() -> None:
    following = combined._Following()
    assert following(0, 500.0) == pytest.approx(500.0)
    for _ in range(200):
        following.observe(0, 1, 0.002)
        following.observe(5, 4, 0.002)
    assert following(0, 1000.0) == pytest.approx(500.0, rel=0.1)
    assert following(5, 1000.0) == pytest.approx(2000.0, rel=0.1)


def test_learned_things_are_kept_by_model_and_key_and_forgotten() -> None:
    class Model:
        pass

    class Slotted:
        __slots__ = ()

    kept: PerModel[list[int]] = PerModel(list)
    one, other = Model(), Model()
    kept(one, "a").append(1)
    assert (kept(one, "a"), kept(one, "b"), kept(other, "a")) == ([1], [], [])
    assert kept(Slotted(), "a") is not kept(Slotted(), "a")
    forget()
    assert kept(one, "a") == []


def test_loops_in_threads_share_costs_and_rates() -> None:
    interval = sys.getswitchinterval()

    def work(seed: int, budget: DraftBudget) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            rows = rng.randrange(1, 40)
            assert budget.prices(rows).second > 0.0
            budget.choose([[0.9] * 7] * rows)
            budget.observe_round(rows, rng.randrange(1, 9), 1e-3, 2e-3, rows)

    try:
        sys.setswitchinterval(1e-6)
        for _ in range(10):
            costs = RoundCost()
            rates = Rates()
            with ThreadPoolExecutor(4) as pool:
                budgets = [DraftBudget(8).for_loop(costs, rates) for _ in range(4)]
                list(pool.map(work, range(4), budgets))
    finally:
        sys.setswitchinterval(interval)


def test_whole_drafts_are_verified_as_they_are() -> None:
    """No price is asked then: the clock alone says whether to draft (`rests`)."""
    costs = taught()
    cut, whole = DraftBudget(16, costs=costs), DraftBudget(16, costs=costs, whole=True)
    chances = [[0.6**n for n in range(1, 17)]]
    assert 0 < cut.choose(chances) < 16
    assert (whole.choose(chances), whole.for_loop(RoundCost()).choose(chances)) == (16, 16)
    assert cut.prices(1).second > 0.0 == whole.prices(1).second
    kept, rejected = (whole.for_sequence(range(1, 9), 0.3) for _ in range(2))
    for _ in range(200):
        kept.observe(8, 5)
        rejected.observe(8, 0)
    assert (kept.depth(), rejected.depth()) == (8, 0)
    assert 0 < cut.for_sequence(range(1, 9), 0.3).depth() < 8


def test_rounds_of_a_fixed_length_do_not_teach_those_that_draft_what_pays() -> None:
    rates = Rates()
    fixed = DraftBudget(12, adaptive=False).for_loop(RoundCost(), rates)
    for _ in range(400):
        fixed.observe_round(1, 13, 1.0, 9.0, 1)
    assert not rates.by_size
    assert not rates.rests
    adaptive = DraftBudget(12).for_loop(RoundCost(), rates)
    adaptive.observe_round(1, 1, 1.0, 1.0, 1)
    assert rates.by_size.keys() == {1}
