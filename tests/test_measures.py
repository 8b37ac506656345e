"""Figures of a benchmark from counts that can be checked by hand, from the golden traces, and by their laws."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from infer import statistics
from infer.measures import Counts, Duration, affordable_seconds, per_prompt_mean, speed_up, total
from tests import golden_data

LENGTHS = st.lists(st.integers(0, 8), max_size=30)


def test_g17_tokens_per_round_counts_the_bonus_and_pools_rounds():
    """Accepted drafts A [4,4,4,4], B [0]: (4 * 5 + 1) / 5, and not the mean of 5 and 1."""
    a, b = Counts.of([4, 4, 4, 4], 21), Counts.of([0], 2)
    assert total([a, b]).tokens_per_round == 21 / 5 == 4.2
    assert per_prompt_mean([a, b]) == 3.0
    assert total([a, b]).emitted_per_round == 21 / 5  # nothing was cut


def test_g17_plain_decoding_is_counted_in_the_same_way():
    assert Counts.of([0] * 9, 10).tokens_per_round == 1.0
    assert Counts.of([0] * 9, 10).emitted_per_round == 1.0


def test_g17_tokens_behind_a_cut_are_in_the_accept_lengths_but_not_emitted():
    """A last round of accept length 5 of which the end of text left two tokens: 1 + 6 + 2 new tokens."""
    counts = Counts.of([5, 5], 9)
    assert counts.tokens_per_round == 6.0
    assert counts.emitted_per_round == 4.0


def test_acceptance_by_position_by_hand():
    """Of 6 rounds 4 accept the first draft, of these 3 the second, of these 1 the third."""
    counts = Counts.of([0, 0, 1, 2, 2, 3], 15)
    assert counts.by_length == (2, 1, 2, 1)
    assert counts.reached(3) == [6, 4, 3]
    assert counts.acceptance(3) == [4 / 6, 3 / 4, 1 / 3]
    assert counts.acceptance(5) == [4 / 6, 3 / 4, 1 / 3, 0.0, None]  # nothing ever reached the fifth


def test_an_answer_without_rounds_has_no_rate():
    assert Counts.of([], 1).tokens_per_round is None
    assert Counts.of([], 1).emitted_per_round is None
    assert per_prompt_mean([Counts.of([], 1), Counts.of([1], 3)]) == 2.0
    assert Counts.of([], 0).emitted == 0


@pytest.mark.parametrize("name", golden_data.DRAFTS)
def test_the_golden_traces_accept_lengths_have_their_recorded_means(name):
    """golden/README.md, section 8, and manifest.json: pooled over the rounds of all prompts of a setting."""
    table = {"eagle": (1.59, 1.22, 1.47), "hass": (1.88, 1.27, 1.67), "poss1": (1.91, 1.35, 1.69)}
    table |= {"poss2": (1.89, 1.32, 1.74), "poss3": (1.98, 1.27, 1.74), "poss2_nobias": (1.73, 1.22, 1.47)}
    for setting, expected in zip("ABC", table[name], strict=True):
        runs = [run for run in golden_data.trace(name)["runs"] if run["setting"] == setting]
        pooled = total(Counts.of(run["accept_lengths"], len(run["new_token_ids"])) for run in runs)
        assert round(pooled.tokens_per_round - 1, 2) == expected
        lengths = [length for run in runs for length in run["accept_lengths"]]
        assert pooled.tokens_per_round == pytest.approx(np.mean(lengths) + 1, abs=1e-12)


@given(st.lists(LENGTHS, max_size=6))
def test_counts_add_up_whatever_the_grouping(answers):
    together = Counts.of([length for answer in answers for length in answer], 1)
    apart = total(Counts.of(answer, 1) for answer in answers)
    assert apart.by_length == together.by_length
    assert apart.committed == sum(len(answer) + sum(answer) for answer in answers)


@given(LENGTHS.filter(bool))
def test_acceptance_by_position_makes_up_the_tokens_per_round(lengths):
    """1 + a1 + a1 a2 + ...: the mean accept length is the sum of the shares of rounds that got so far."""
    counts = Counts.of(lengths, 1)
    shares = [share or 0.0 for share in counts.acceptance(8)]
    assert 1 + np.cumprod(shares).sum() == pytest.approx(counts.tokens_per_round)


def test_speed_up_compares_rounds_and_states_prefill_apart():
    drafted = Duration(tokens=41, answers=1, rounds=20, prefill_seconds=1.0, decode_seconds=2.0)
    plain = Duration(tokens=41, answers=1, rounds=40, prefill_seconds=1.0, decode_seconds=4.0)
    assert drafted.tokens_per_second == 20.0  # 40 tokens in 2 s
    assert plain.tokens_per_second == 10.0
    assert speed_up(drafted, plain) == 2.0
    assert speed_up(drafted, plain, with_prefill=True) == pytest.approx((41 / 3) / (41 / 5))
    assert plain.seconds_per_round == 0.1
    assert speed_up(Duration(1, 1, 0, 1.0, 0.0), plain) is None
    assert (drafted + plain).tokens == 82


def test_break_even():
    """2 tokens in 10 ms are as fast as 2.2 in 11 ms."""
    assert affordable_seconds(0.010, 2.0, 2.2) == pytest.approx(0.001)
    assert affordable_seconds(0.010, 2.0, 1.8) == pytest.approx(-0.001)


def test_spread_by_hand():
    """1, 2, 3, 4: deviation sqrt(5 / 3), t of 3 degrees of freedom 3.182."""
    found = statistics.spread([1.0, 2.0, 3.0, 4.0])
    assert (found.mean, found.count) == (2.5, 4)
    assert found.deviation == pytest.approx((5 / 3) ** 0.5)
    assert found.high - 2.5 == pytest.approx(3.182446 * (5 / 3) ** 0.5 / 2, rel=1e-6)
    assert found.low == pytest.approx(5 - found.high)
    assert statistics.spread([]).mean is None
    assert statistics.spread([3.0]) == statistics.Spread(3.0, None, None, None, 1)


def test_paired_test_by_hand():
    """Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3), t = 3.464 with 2 degrees of freedom, p = 0.0742."""
    found = statistics.paired_test([1.0, 1.0, 1.0], [2.0, 3.0, 4.0])
    assert found.difference == 2.0
    assert found.p == pytest.approx(0.07418, abs=1e-5)
    assert found.low == pytest.approx(2 - 4.302653 / 3**0.5, rel=1e-6)
    assert found.high == pytest.approx(2 + 4.302653 / 3**0.5, rel=1e-6)


def test_paired_tests_that_say_nothing_say_so():
    assert statistics.paired_test([1.0], [2.0]) == statistics.PairedTest(1.0, None, None, None, 1)
    assert statistics.paired_test([1.0, 2.0], [1.0, 2.0]) == statistics.PairedTest(0.0, 0.0, 0.0, 1.0, 2)
    assert statistics.paired_test([1.0, 2.0], [2.0, 3.0]) == statistics.PairedTest(1.0, None, None, None, 2)
    assert statistics.paired_test([], []).difference is None
    with pytest.raises(ValueError, match="2 and 1 values are no pairs"):
        statistics.paired_test([1.0, 2.0], [1.0])


def test_p_values_are_corrected_for_their_number():
    """Benjamini and Hochberg: p times tests over rank, made monotonic from the largest."""
    assert statistics.adjusted([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, None, 0.04, 0.04])
    assert statistics.adjusted([None]) == [None]


def test_intervals_of_ratios_hold_the_truth_as_often_as_they_say():
    """Ratios of sums over 40 questions of different weight, whose true value is 2: 95% of the intervals hold it."""
    random, held = np.random.default_rng(1), 0
    for _ in range(100):
        rounds = random.integers(5, 60, 40)
        low, high = statistics.interval(statistics.ratio, random.poisson(2.0 * rounds), rounds)
        held += low <= 2.0 <= high
    assert stats.binom.cdf(held, 100, 0.95) > 1e-4


def test_intervals_of_nothing_and_of_no_spread():
    assert statistics.interval(statistics.ratio, [3], [2]) is None
    assert statistics.interval(statistics.ratio, [4, 4, 4], [2, 2, 2]) == (2.0, 2.0)
    low, high = statistics.interval(statistics.ratio_of_ratios, [4, 8], [2, 2], [1, 1], [1, 1])
    assert low == 2.0
    assert high == 4.0
    assert json.dumps([low, high])  # plain numbers
