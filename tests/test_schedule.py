"""The staged schedule as pure mathematics."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest

from hf_drope.schedule import DroPESchedule, learning_rate_warmup_steps


def test_stages_follow_each_other_and_end_where_they_should():
    schedule = DroPESchedule(warmup=0.4, transition=3)
    stages = [schedule.at(step, 10).stage for step in range(11)]
    assert stages == ["warmup"] * 4 + ["transition"] * 3 + ["finetune"] * 4


def test_rope_starts_at_one_and_is_gone_exactly_after_the_warmup():
    scales = [DroPESchedule(warmup=0.5).at(step, 8).rope_scale for step in range(9)]
    assert scales == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert DroPESchedule(warmup=0).at(0, 8).rope_scale == 0.0


def test_temperature_is_the_linear_formula_of_the_transition():
    schedule = DroPESchedule(warmup=2, transition=4)
    assert [schedule.at(step, 8).temperature for step in range(9)] == [1, 1, 1, 0.75, 0.5, 0.25, 0.1, 0.1, 0.1]


@pytest.mark.parametrize("curve", ["linear", "cosine", "exponential", lambda p: 1 - p * p])
def test_every_curve_falls_all_the_way(curve):
    schedule = DroPESchedule(warmup=50, transition=50, rope_curve=curve, temperature_curve=curve)
    scales = [schedule.at(step, 100).rope_scale for step in range(50)]
    temperatures = [schedule.at(step, 100).temperature for step in range(50, 100)]
    for values in (scales, temperatures):
        assert values[0] == 1.0
        assert all(a >= b for a, b in pairwise(values))
    assert scales[-1] < 0.05
    assert temperatures[-1] == 0.1


@pytest.mark.parametrize("total", [1, 2, 3, 7, 10, 30, 1001])
@pytest.mark.parametrize("shares", [(0.3, 0.3), (0.5, 0.5), (0.1, 0.9), (1.0, 0.0), (0.0, 1.0), (0.001, 0.999)])
def test_shares_fit_any_run_start_at_one_and_end_final(shares, total):
    schedule = DroPESchedule(*shares)
    states = [schedule.at(step, total) for step in range(total + 1)]
    assert states[0].rope_scale == (1.0 if shares[0] else 0.0)
    assert states[-1] == schedule.final() == ("finetune", 0.0, 0.1, None)
    assert all(a.rope_scale >= b.rope_scale and a.temperature >= b.temperature for a, b in pairwise(states))
    assert all((state.rope_scale > 0) == (state.stage == "warmup") for state in states)


def test_a_transition_over_the_whole_run_is_the_published_formula():
    schedule = DroPESchedule(warmup=0, transition=1.0)
    for step in range(41):
        assert schedule.at(step, 40).temperature == pytest.approx(max(0.1, 1 - step / 40))


def test_a_curve_that_leaves_its_range_is_refused():
    with pytest.raises(ValueError, match=r"rope_curve gives 1\.5 at progress 0\.5"):
        DroPESchedule(warmup=2, rope_curve=lambda p: 1 + p).at(1, 10)
    with pytest.raises(ValueError, match="temperature_curve gives inf"):
        DroPESchedule(temperature_curve=lambda p: float("inf")).at(10, 10)


def test_constant_temperature_never_moves():
    schedule = DroPESchedule(temperature_curve="constant", initial_temperature=0.5)
    assert {schedule.at(step, 30).temperature for step in range(31)} == {0.5}


def test_a_run_of_no_steps_is_in_the_final_state():
    assert DroPESchedule().at(0, 0) == ("finetune", 0.0, 0.1, None)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"warmup": -1}, "warmup is -1"),
        ({"transition": 1.5}, "transition is 1.5"),
        ({"warmup": True}, "warmup is True"),
        ({"warmup": 0.7, "transition": 0.6}, r"take 1\.3 of the run"),
        ({"rope_curve": "linaer"}, "Did you mean 'linear'"),
        ({"rope_curve": "constant"}, "rope_curve is 'constant'"),
        ({"initial_temperature": "hot"}, "initial_temperature is 'hot'"),
        ({"temperature_floor": 0.0}, r"temperature_floor is 0\.0"),
        ({"temperature_floor": 2.0}, r"temperature_floor is 2\.0"),
    ],
)
def test_wrong_schedules_are_refused_in_a_sentence(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        DroPESchedule(**settings)


def test_stages_longer_than_the_run_are_refused():
    with pytest.raises(ValueError, match="ask for 12 steps, but the whole run has 10"):
        DroPESchedule(warmup=7, transition=5).at(0, 10)
    with pytest.raises(ValueError, match=r"warmup=8 and transition=0\.3 ask for 11 steps"):
        DroPESchedule(warmup=8, transition=0.3).describe(10)
    with pytest.raises(ValueError, match="step is -1"):
        DroPESchedule().at(-1, 10)


def test_round_trip_and_plan():
    schedule = DroPESchedule(warmup=5, transition=0.25, rope_curve="cosine")
    assert DroPESchedule.from_dict(schedule.to_dict()) == schedule
    assert schedule.describe(20)[0] == "warmup: steps 0 to 5, rope_scale 1 → 0 (cosine)"
    with pytest.raises(ValueError, match="Did you mean 'warmup'"):
        DroPESchedule.from_dict({"warmpu": 3})
    with pytest.raises(ValueError, match="cannot be stored"):
        DroPESchedule(rope_curve=lambda p: 1 - p).to_dict()


def test_the_plan_of_a_model_without_a_temperature_speaks_of_none():
    assert DroPESchedule().describe(10, gated=False) == [
        "warmup: steps 0 to 3, rope_scale 1 → 0 (linear)",
        "transition: steps 3 to 6, nothing moves",
        "finetune: steps 6 to 10, nothing moves",
    ]
    assert "temperature 1 → 0.1 (linear)" in DroPESchedule().describe(10)[1]
    fading = DroPESchedule(warmup=0, transition=1.0, fade_terms=True).describe(10, gated=False)
    assert fading == ["transition: steps 0 to 10, position terms 1 → 0 (linear)"]


def test_learning_rate_warmup_is_capped_in_short_runs():
    assert learning_rate_warmup_steps(200_000) == 5000
    assert learning_rate_warmup_steps(100) == 10
    assert learning_rate_warmup_steps(0) == 0


def test_the_schedule_needs_no_torch():
    code = "import sys, hf_drope.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
