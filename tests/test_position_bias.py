"""The biases and gates alone, on plain scores."""

from __future__ import annotations

import math

import pytest
import torch
from reference import SMALLEST_SLOPE, reference_bias, reference_gate, sigmoid
from transformers.models.t5.modeling_t5 import T5Attention

from hf_drope.drope_parameters import BIAS_SETTINGS, DroPEParameters
from hf_drope.gates import HeadGate, QueryGate, ScoreGate
from hf_drope.position_bias import (
    LinearBias,
    LogBias,
    LowRankBias,
    PositionBias,
    TableBias,
    alibi_slopes,
    build_position_bias,
    toeplitz,
)

SETTINGS = {
    "table": {"type": "table", "max_distance": 5},
    "buckets": {"type": "table", "num_buckets": 8, "max_distance": 20},
    "buckets_both": {"type": "table", "num_buckets": 8, "max_distance": 20, "bidirectional": True},
    "log": {"type": "log"},
    "log_far": {"type": "log", "sign": 1, "bidirectional": True},
    "kerple": {"type": "log", "init": "kerple"},
    "linear": {"type": "linear"},
    "linear_both": {"type": "linear", "learned": True, "bidirectional": True},
    "low_rank": {"type": "low_rank", "rank": 6, "max_distance": 64},
}
GATES = {"none": None, "head": {"type": "head"}, "query": {"type": "query"}, "score": {"type": "score"}}


def build(settings, gate=None, share="head"):
    parameters = DroPEParameters(position_bias={**settings, "share": share}, gate=gate)
    bias = build_position_bias(parameters, num_heads=4, num_key_value_heads=2, hidden_size=6)
    return bias, parameters


@torch.no_grad()
def randomise(module, seed=0):
    torch.manual_seed(seed)
    for name, parameter in module.named_parameters():
        if name.endswith(("gamma", ".a", "slopes")):
            parameter.uniform_(0.3, 1.5)
        else:
            parameter.normal_()
    return module


@pytest.mark.parametrize("share", ["head", "kv_group", "layer"])
@pytest.mark.parametrize("name", SETTINGS)
def test_values_follow_the_formula_for_each_head_and_distance(name, share):
    bias, parameters = build(SETTINGS[name], share=share)
    randomise(bias)
    offset = torch.arange(-30, 31)
    values = bias.bias.values(offset)
    assert values.shape == (4, 61)
    assert values.dtype == torch.float32
    for head in range(4):
        expected = [reference_bias(bias.bias, parameters.position_bias, head, delta) for delta in offset.tolist()]
        torch.testing.assert_close(values[head].double(), torch.tensor(expected).double(), atol=1e-5, rtol=1e-5)
    assert bias.bias.num_groups == {"head": 4, "kv_group": 2, "layer": 1}[share]
    if name != "linear":
        assert torch.equal(values[0], values[1]) == (share != "head")
        assert torch.equal(values[1], values[2]) == (share == "layer")


@pytest.mark.parametrize("name", SETTINGS)
def test_bias_is_added_to_plain_scores_at_any_offset(name):
    bias = randomise(build(SETTINGS[name])[0].bias)
    scores = torch.randn(2, 4, 9, 9)
    whole = bias(scores)
    for i in range(9):
        row = bias(scores[:, :, i : i + 1, : i + 1], query_offset=i)
        torch.testing.assert_close(row, whole[:, :, i : i + 1, : i + 1])
    tensor_offset = bias(scores[:, :, 4:6], query_offset=torch.tensor(4))
    torch.testing.assert_close(tensor_offset, whole[:, :, 4:6])
    added = whole[1, 2, 7, 3] - scores[1, 2, 7, 3]
    torch.testing.assert_close(added, bias.values(torch.tensor([-4]))[2, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("name", SETTINGS)
def test_gated_bias_equals_gate_times_bias(name, gate):
    position, parameters = build(SETTINGS[name], GATES[gate])
    randomise(position)
    scores, hidden = torch.randn(1, 4, 3, 5), torch.randn(1, 3, 6)
    result = position(scores, query_offset=2, hidden_states=hidden)
    for h in range(4):
        for i in range(3):
            for j in range(5):
                score = scores[0, h, i, j].item()
                factor = reference_gate(position.gate, parameters.gate, h, score, hidden[0, i].tolist())
                expected = score + factor * reference_bias(position.bias, parameters.position_bias, h, j - i - 2)
                assert result[0, h, i, j].item() == pytest.approx(expected, abs=1e-5)


def test_table_is_centred_on_max_distance_at_every_length():
    """The centre is `max_distance`: with the running length in its place a distance would read another row at each length."""
    bias = randomise(TableBias(2, max_distance=8))
    short, long = (toeplitz(bias, n, n, 0) for n in (4, 7))
    assert torch.equal(short, long[:, :4, :4])
    assert torch.equal(long[:, 0, 0], bias.weight[7])
    assert torch.equal(long[:, 6, 0], bias.weight[1])
    assert bias.weight.shape == (15, 2)


def test_offsets_past_the_table_use_the_last_row_of_their_side():
    bias = randomise(TableBias(2, max_distance=4))
    values = bias.values(torch.tensor([-1000, -4, -3, 3, 4, 1000]))
    assert torch.equal(values[:, :3], bias.weight[0][:, None].expand(-1, 3))
    assert torch.equal(values[:, 3:], bias.weight[6][:, None].expand(-1, 3))
    assert bias(torch.zeros(1, 2, 50, 50)).isfinite().all()


def test_a_term_constant_along_the_keys_is_cancelled_by_the_softmax():
    """The control of the next test: added to whole rows, a parameter changes nothing and learns nothing."""
    term = torch.randn(2, 6, 1, requires_grad=True)
    scores, target = torch.randn(2, 6, 6), torch.randn(2, 6, 6)
    (torch.softmax(scores + term, -1) * target).sum().backward()
    assert term.grad.abs().max() < 1e-6


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_parameter_changes_the_softmax_and_gets_a_gradient(name, gate):
    position, _ = build(SETTINGS[name], GATES[gate])
    randomise(position)
    scores, hidden = torch.randn(1, 4, 30, 30, requires_grad=True), torch.randn(1, 30, 6)
    plain = scores.softmax(-1)
    attention = position(scores, hidden_states=hidden).softmax(-1)
    assert (attention - plain).abs().max() > 0.01
    if not list(position.parameters()):
        return  # Fixed slopes, without a gate or with one that has no parameters.
    (attention * torch.randn_like(attention)).sum().backward()
    for key, parameter in position.named_parameters():
        assert parameter.grad is not None, key
        # Every head, and every row that these distances reach: causal buckets do not tell forward offsets apart.
        assert (parameter.grad.abs().sum(0) > 0).all(), key


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (16, 128), (8, 20), (6, 9)])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_buckets_are_those_of_t5(bidirectional, buckets, max_distance):
    bias = TableBias(2, max_distance=max_distance, num_buckets=buckets, bidirectional=bidirectional)
    offset = torch.arange(-600, 601)
    expected = T5Attention._relative_position_bucket(offset, bidirectional, buckets, max_distance)
    assert torch.equal(bias.rows(offset), expected)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 12, 14, 40])
def test_alibi_slopes_for_any_number_of_heads(heads):
    """https://github.com/ml-explore/mlx/issues/343, https://github.com/baichuan-inc/Baichuan2/issues/225 and
    https://github.com/paiml/aprender/pull/2143"""
    slopes = alibi_slopes(heads)
    power = 2 ** int(math.log2(heads))
    assert len(slopes) == len(set(slopes)) == heads
    assert all(0 < slope < 1 for slope in slopes)
    assert slopes[:power] == pytest.approx([2 ** (-8 * k / power) for k in range(1, power + 1)])
    # The others are every second slope of twice the power.
    doubled = [2 ** (-8 * k / (2 * power)) for k in range(1, 2 * power + 1)]
    assert slopes[power:] == pytest.approx(doubled[0::2][: heads - power])
    assert LinearBias(heads).values(torch.tensor([-2]))[:, 0].tolist() == pytest.approx([-2 * s for s in slopes])


def test_linear_slopes_are_a_buffer_unless_learned():
    assert not list(LinearBias(4).parameters())
    assert [p.shape for p in LinearBias(4, learned=True, bidirectional=True).parameters()] == [(2, 4)]


def test_kerple_is_held_away_from_zero():
    bias = LogBias(3, init="kerple")
    assert (bias.gamma >= 0).all()
    assert (bias.gamma <= 2).all()
    assert (bias.a <= 1).all()
    with torch.no_grad():
        bias.gamma.fill_(-5)
        bias.a.fill_(-5)
    expected = -SMALLEST_SLOPE * math.log(1 + SMALLEST_SLOPE * 10)
    assert bias.values(torch.tensor([-10]))[0, 0].item() == pytest.approx(expected)


def test_log_bias_starts_at_its_published_values_and_favours_near_keys():
    near, far = LogBias(2).values(torch.tensor([-1, -50]))[0].tolist()
    assert near == pytest.approx(-0.1 * math.log(2))
    assert far == pytest.approx(-0.1 * math.log(51))
    assert LogBias(2, sign=1).values(torch.tensor([-50]))[0, 0].item() == pytest.approx(0.1 * math.log(51))


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_low_rank_bias_is_a_dot_product_of_query_and_key_factors(groups):
    bias = randomise(LowRankBias(4, rank=8, max_distance=64, num_groups=groups))
    i, j = torch.arange(100, 110), torch.arange(0, 110)
    products = bias.query_factors(i) @ bias.key_factors(j).T
    expected = bias.values((j[None] - i[:, None]).flatten()).view(4, 10, 110)
    torch.testing.assert_close(products, expected, atol=1e-4, rtol=0)
    assert bias.key_factors(j).shape == (110, 8)


def test_low_rank_frequencies_run_from_one_to_the_longest_distance():
    bias = LowRankBias(2, rank=8, max_distance=512)
    assert bias.frequencies[0].item() == 1
    assert bias.frequencies[-1].item() == pytest.approx(1 / 512)
    ratios = bias.frequencies[1:] / bias.frequencies[:-1]
    torch.testing.assert_close(ratios, ratios[:1].expand(3))
    assert (bias.values(torch.arange(-9, 1)) == 0).all(), "it starts as no bias at all"


@pytest.mark.parametrize("name", ["table", "buckets_both", "log_far", "linear_both", "low_rank"])
def test_forward_and_backward_offsets_have_their_own_parameters(name):
    bias = randomise(build(SETTINGS[name])[0].bias)
    back, forth = bias.values(torch.tensor([-3, 3])).T
    back.sum().backward()
    assert not torch.allclose(back, forth)
    if name != "low_rank":
        touched = {key: p.grad.clone() for key, p in bias.named_parameters()}
        bias.zero_grad()
        bias.values(torch.tensor([3])).sum().backward()
        for key, parameter in bias.named_parameters():
            assert not ((parameter.grad != 0) & (touched[key] != 0)).any(), key


@pytest.mark.parametrize("distance", [0, 1])
def test_distance_zero_is_the_token_itself_and_one_the_token_before(distance):
    """https://github.com/meta-pytorch/attention-gym/pull/86"""
    bias = TableBias(1, max_distance=16, init_range=0.0)
    with torch.no_grad():
        bias.weight[15 - distance] = 200.0
    causal = torch.full((6, 6), float("-inf")).triu(1)
    weights = (bias(torch.randn(1, 1, 6, 6)) + causal).softmax(-1)[0, 0]
    for i in range(distance, 6):
        assert weights[i, i - distance].item() == 1.0


@pytest.mark.parametrize("name", ["table", "log", "linear", "low_rank"])
def test_half_precision_scores_keep_600_distances_apart(name):
    """https://github.com/Dao-AILab/flash-attention/pull/846: in bf16, 600 positions are 407 values."""
    settings = dict(SETTINGS[name])
    if "max_distance" in settings:
        settings["max_distance"] = 1024
    bias = randomise(build(settings)[0].bias).to(torch.bfloat16)
    values = bias.values(torch.arange(-599, 1))
    assert values.dtype == torch.float32
    assert values[0].unique().numel() == 600
    assert values[0, 599 - 257] != values[0, 599 - 258]
    assert bias(torch.zeros(1, 4, 8, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("name", SETTINGS)
def test_parameters_stay_in_full_precision_bit_for_bit(name, gate):
    position, _ = build(SETTINGS[name], GATES[gate])
    randomise(position)
    before = {key: value.clone() for key, value in position.state_dict().items()}
    for cast in (position.half, position.bfloat16, lambda: position.to(torch.bfloat16)):
        cast()
        for key, value in position.state_dict().items():
            assert value.dtype == torch.float32, key
            assert torch.equal(value, before[key]), key
    assert all(buffer.dtype == torch.float32 for buffer in position.buffers())
    assert position.double().state_dict().keys() == before.keys()


def test_head_gate_is_sigmoid_times_exponential():
    gate = HeadGate(3)
    assert gate().flatten().tolist() == pytest.approx([sigmoid(1.0)] * 3)
    with torch.no_grad():
        gate.g.copy_(torch.tensor([-1.0, 0.0, 2.0]))
        gate.t.copy_(torch.tensor([0.5, -0.5, 0.0]))
    expected = [sigmoid(g) * math.exp(t) for g, t in ((-1.0, 0.5), (0.0, -0.5), (2.0, 0.0))]
    assert gate().flatten().tolist() == pytest.approx(expected)
    assert gate().shape == (1, 3, 1, 1)
    assert HeadGate(3, exponential=False).t is None


def test_query_gate_reads_the_layers_input():
    gate = QueryGate(5, 2, temperature=0.5)
    assert gate(hidden_states=torch.randn(1, 3, 5)).flatten().tolist() == pytest.approx([sigmoid(2.0)] * 6)
    randomise(gate)
    x = torch.randn(2, 3, 5)
    factor = gate(hidden_states=x)
    assert factor.shape == (2, 2, 3, 1)
    expected = sigmoid((gate.weight[1] @ x[1, 2] + gate.bias[1]).item() / 0.5)
    assert factor[1, 1, 2, 0].item() == pytest.approx(expected)
    with pytest.raises(ValueError, match="hidden_states"):
        gate()


def test_score_gate_reads_the_scores():
    gate = ScoreGate(temperature=0.25)
    scores = torch.tensor([[[[-1.0, 0.0, 3.0]]]])
    assert gate(scores).flatten().tolist() == pytest.approx([sigmoid(-4.0), 0.5, sigmoid(12.0)])
    gate.set_temperature(2.0)
    assert gate(scores)[0, 0, 0, 0].item() == pytest.approx(sigmoid(-0.5))
    with pytest.raises(ValueError, match="scores"):
        gate()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("make", [lambda t: ScoreGate(t), lambda t: QueryGate(4, 2, t)])
def test_temperature_has_to_be_above_zero(make, temperature):
    with pytest.raises(ValueError, match=r"temperature is .*; it has to be above 0"):
        make(temperature)
    with pytest.raises(ValueError, match="above 0"):
        make(1.0).set_temperature(temperature)


@pytest.mark.parametrize("temperature", [1e-4, 1e4])
def test_extreme_temperatures_stay_finite_and_reach_their_limits(temperature):
    scores = torch.tensor([[[[-30.0, 30.0]]]], requires_grad=True)
    factor = ScoreGate(temperature)(scores)
    factor.sum().backward()
    assert scores.grad.isfinite().all()
    limits = [0.0, 1.0] if temperature < 1 else [0.5, 0.5]
    assert factor.flatten().tolist() == pytest.approx(limits, abs=1e-2)


def test_stand_alone_bias_and_gate_with_cached_keys():
    scores = torch.randn(1, 8, 1, 20)
    position = PositionBias(LogBias(8), ScoreGate())
    expected = scores + scores.sigmoid() * LogBias(8).values(torch.arange(-19, 1))[None, :, None]
    torch.testing.assert_close(position(scores, query_offset=19), expected)


def test_impossible_arguments_are_refused():
    with pytest.raises(ValueError, match="max_distance is 0"):
        TableBias(2, max_distance=0)
    with pytest.raises(ValueError, match="rank is 3"):
        LowRankBias(2, rank=3)
    with pytest.raises(ValueError, match="4 heads cannot be shared by 3"):
        LogBias(4, num_groups=3)


def test_every_type_of_bias_in_the_settings_is_covered_here():
    # A disentangled bias works on queries and keys, not on scores: test_disentangled.py.
    assert {settings["type"] for settings in SETTINGS.values()} == set(BIAS_SETTINGS) - {"disentangled"}
