"""What a report is told of a model's biases, gates, training and attention scale."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tiny import tiny_model

from hf_drope import apply_drope
from hf_drope.model_facts import bias_by_distance, gate_values, log_spaced, model_facts


def converted(preset, **overrides):
    model = apply_drope(tiny_model("llama"), preset, **overrides)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.position_parameters():
            parameter.uniform_(0.1, 1.0)
    return model


def test_distances_go_from_0_to_the_furthest_evenly_in_their_logarithm():
    for furthest in (0, 1, 5, 63, 1023, 16383):
        distances = log_spaced(furthest)
        assert distances[0] == 0
        assert distances[-1] == furthest
        assert distances == sorted(set(distances))
        assert len(distances) <= 64
    ratios = [b / a for a, b in zip(log_spaced(16383)[-20:], log_spaced(16383)[-19:], strict=False)]
    assert max(ratios) / min(ratios) < 1.02


def test_a_log_bias_is_given_by_its_formula():
    model = converted("drope", gate=None)
    found = bias_by_distance(model, 256)
    assert (found["kind"], found["layers"], found["distances"][-1]) == ("log", [0, 1], 255)
    for layer, module in enumerate(model.position_biases()):
        for head, line in enumerate(found["values"][layer]):
            gamma, a = module.bias.gamma[0, head].item(), module.bias.a[0, head].item()
            for distance, value in zip(found["distances"], line, strict=True):
                assert value == pytest.approx(-gamma * math.log1p(a * distance), rel=1e-3, abs=1e-6)


def test_a_table_goes_to_its_end_and_heads_that_share_are_all_named():
    found = bias_by_distance(converted("simple", max_distance=300, share="layer"), 64)
    assert found["distances"][-1] == 299
    assert [len(layer) for layer in found["values"]] == [4, 4]
    assert found["values"][0][0] == found["values"][0][3]
    assert bias_by_distance(converted("t5"), 64)["kind"] == "buckets"


@pytest.mark.parametrize("overrides", [{}, {"rank": 4}, {"terms_scale": 0.5}, {"position_scaling": {"type": "linear"}}])
def test_a_disentangled_bias_is_its_means_rotated_against_each_other(overrides):
    model = converted("disentangled", **overrides)
    found = bias_by_distance(model, 64)
    for layer, module in enumerate(model.position_biases()):
        bias = module.bias
        query, key = (mean[:, 0].double().tolist() for mean in bias.means())
        speeds = [f / 2 if "position_scaling" in overrides else f for f in bias.source.frequencies]
        for head, line in enumerate(found["values"][layer]):
            q, k = query[head], key[head // 2]
            pairs = range(4) if bias.pairs is None else [int(p) for p in bias.pairs[head // 2].tolist()]
            for distance, value in zip(found["distances"], line, strict=True):
                total = 0.0
                for pair in pairs:
                    a, b = complex(q[pair], q[pair + 4]), complex(k[pair], k[pair + 4])
                    turned = b * complex(math.cos(-distance * speeds[pair]), math.sin(-distance * speeds[pair]))
                    total += (a.conjugate() * (turned - b)).real
                expected = total * overrides.get("terms_scale", 1.0) / 8**0.5
                assert value == pytest.approx(expected, rel=2e-3, abs=2e-5)


def test_gates_tell_what_is_constant():
    model = converted("gated")
    found = gate_values(model)
    assert (found["type"], found["layers"]) == ("head", [0, 1])
    for layer, module in enumerate(model.position_biases()):
        g, t = module.gate.g.tolist(), module.gate.t.tolist()
        expected = [math.exp(b) / (1 + math.exp(-a)) for a, b in zip(g, t, strict=True)]
        assert found["values"][layer] == pytest.approx(expected, rel=1e-3)
    model = converted("simple", gate={"type": "query", "temperature": 0.5})
    found = gate_values(model)
    first = next(model.position_biases()).gate.bias.tolist()
    assert found["temperature"] == 0.5
    assert found["values"][0] == pytest.approx([1 / (1 + math.exp(-b / 0.5)) for b in first], rel=1e-3)
    assert gate_values(converted("drope", temperature=0.3)) == {"type": "score", "temperature": 0.3}
    assert gate_values(converted("simple")) is None


def test_a_course_of_training_is_thinned_and_an_entry_that_lacks_a_number_has_null(tmp_path):
    model = converted("nope")
    assert model_facts(model, tmp_path, 64) == dict.fromkeys(("bias", "gates", "training", "attention_scale"))
    entries = [
        {"step": n, "tokens": 10 * n, "loss": 5 - n / 1000, "drope/rope_scale": 1 - n / 1000} for n in range(1000)
    ]
    entries[0]["drope/temperature"] = 1.0
    lines = [json.dumps(entry) for entry in [*entries, {"step": 999, "train_runtime": 1.0}]]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n{cut")
    course = model_facts(model, tmp_path, 64)["training"]
    assert len(course["step"]) == 300
    assert (course["step"][0], course["step"][-1], course["tokens"][-1]) == (0, 999, 9990)
    assert course["loss"][-1] == pytest.approx(5 - 0.999)
    assert course["temperature"] == [1.0, *[None] * 299]
    assert course["bias_norm"] == [None] * 300
    assert {len(values) for values in course.values()} == {300}
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "learning_rate": 0.1}\n')
    assert model_facts(model, tmp_path, 64)["training"] is None


def test_an_attention_scale_is_the_one_that_the_conversion_record_tells_of(tmp_path):
    model, record = converted("nope"), tmp_path / "drope_conversion.json"
    record.write_text(json.dumps({"calibration": {}}))
    assert model_facts(model, tmp_path, 64)["attention_scale"] is None
    told = {"coefficient": 0.1, "curve": [{"length": 128, "factor": 1.1, "without": 9.0, "with": 8.0}]}
    record.write_text(json.dumps({"attention_scale": told}))
    assert model_facts(model, tmp_path, 64)["attention_scale"] == told
