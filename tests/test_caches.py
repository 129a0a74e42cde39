"""What every cache of Transformers does to a converted model's generation: nothing, or the error that it has itself."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from model_types import DECODER_TYPES, small_model
from reference import Recorder, randomise_position, reference_attention
from test_matrix import POSITIONS, generate
from tiny import random_ids
from transformers import DynamicCache, StaticCache, cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer, QuantizedLayer

from hf_drope import apply_drope
from hf_drope.cache_argument import cache_argument

LENGTH, COUNT = 20, 12
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
# Full attention, a window in all layers, and a window in some.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "gemma3_text": {"sliding_window": 4, "num_hidden_layers": 3, "layer_types": MIXED},
}
PRESETS = ("nope", "simple", "drope", "low_rank", "disentangled", "disentangled_rank")
every_model = pytest.mark.parametrize("model_type", MODELS)
every_preset = pytest.mark.parametrize("preset", PRESETS)


@functools.cache
def build(model_type: str, preset: str, backend: str = "sdpa") -> Any:
    model = small_model(model_type, backend, **MODELS[model_type])
    return randomise_position(apply_drope(model, POSITIONS[preset]))


def prompt(batch: int = 2) -> torch.Tensor:
    # Said twice, so that a prompt lookup finds something.
    return random_ids(batch, LENGTH // 2).repeat(1, 2)


@functools.cache
def uncached(model_type: str, preset: str, batch: int = 2, beams: int = 1) -> torch.Tensor:
    return generate(build(model_type, preset), prompt(batch), COUNT, use_cache=False, num_beams=beams)


def forward(model: Any, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **cache_argument(model, cache)).logits


def full(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


CACHES: dict[str, Any] = {
    "dynamic": lambda config: {},
    "dynamic without a config": lambda config: {"past_key_values": DynamicCache()},
    "static": lambda config: {"cache_implementation": "static"},
    "static and longer": lambda config: {"past_key_values": StaticCache(config=config, max_cache_len=70)},
    "chunked prefill": lambda config: {"prefill_chunk_size": 7},
    "chunked prefill, static": lambda config: {"prefill_chunk_size": 3, "cache_implementation": "static"},
}


@every_preset
@every_model
@pytest.mark.parametrize("kind", CACHES)
def test_generation_is_the_same_with_every_cache(kind, model_type, preset):
    """https://github.com/keras-team/keras-hub/pull/2932 and https://github.com/huggingface/transformers/pull/33754"""
    model = build(model_type, preset)
    kwargs = CACHES[kind](model.config)
    assert torch.equal(generate(model, prompt(), COUNT, **kwargs), uncached(model_type, preset))


class _NoStream:
    """Stands for a CUDA stream: nothing runs beside anything else."""

    def wait_stream(self, stream: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


@pytest.fixture
def far_memory(monkeypatch):
    """A device whose memory holds NaN where a layer's cache was, until the layer is fetched back."""
    monkeypatch.setattr(torch, "Stream", _NoStream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: _NoStream())
    moves = []

    def offload(layer):
        if layer.is_initialized:
            moves.append(layer)
            layer.away = layer.keys, layer.values
            layer.keys, layer.values = (torch.full_like(x, torch.nan) for x in layer.away)

    def prefetch(layer):
        if layer.is_initialized and getattr(layer, "away", None) is not None:
            (layer.keys, layer.values), layer.away = layer.away, None

    monkeypatch.setattr(CacheLayerMixin, "offload", offload)
    monkeypatch.setattr(CacheLayerMixin, "prefetch", prefetch)
    return moves


# Static layers with a window stay where they are, and Transformers raises an error where there are no others.
ELSEWHERE = [("offloaded", name) for name in MODELS] + [("offloaded_static", name) for name in ("llama", "gemma3_text")]


@every_preset
@pytest.mark.parametrize(("kind", "model_type"), ELSEWHERE)
def test_a_cache_may_be_elsewhere_between_the_steps(kind, model_type, preset, far_memory):
    found = generate(build(model_type, preset), prompt(), COUNT, cache_implementation=kind)
    assert torch.equal(found, uncached(model_type, preset))
    assert len(far_memory) >= COUNT


class GroupedLayer(QuantizedLayer):
    """Quantises without loss, but as real ones only whole groups of channels of a head."""

    def __init__(self) -> None:
        super().__init__(q_group_size=8, residual_length=4)

    def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        assert tensor.shape[-1] == self.q_group_size
        return tensor.clone()

    def _dequantize(self, q_tensor: torch.Tensor) -> torch.Tensor:
        return q_tensor.clone()


@every_preset
# Older releases do not reorder what is quantised.
@pytest.mark.parametrize("beams", [1, 3] if "reorder_cache" in vars(QuantizedLayer) else [1])
def test_quantised_layers_hold_keys_alone_and_lose_no_place(beams, preset):
    """Real ones refuse a number of channels that their groups do not divide, such as that of a bias's rotated keys."""
    model = build("llama", preset)
    cache = Cache(layers=[GroupedLayer() for _ in range(2)])
    found = generate(model, prompt(), COUNT, past_key_values=cache, num_beams=beams)
    assert torch.equal(found, uncached("llama", preset, beams=beams))
    assert cache.get_seq_length() == LENGTH + COUNT - 1


class RoundedLayer(GroupedLayer):
    """Keys and values in eight bits."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        return super()._quantize(tensor, axis).to(torch.float8_e4m3fn).to(tensor.dtype)


# Transformers' own needs no other package, in the releases that have it.
Fp8Layer: Any = getattr(cache_utils, "Fp8QuantizedLayer", RoundedLayer)


@every_preset
def test_eight_bit_keys_cost_no_more_than_with_rope(preset):
    """On weights small enough for the rounding."""
    errors = []
    ids = random_ids(1, 21)
    for name in ("rope", preset):
        stock = small_model("llama", scale=4.0)
        model = stock if name == "rope" else randomise_position(apply_drope(stock, POSITIONS[name]))
        cache = Cache(layers=[Fp8Layer() for _ in range(2)])
        parts = [ids[:, :9], *ids[:, 9:].split(1, 1)]
        steps = torch.cat([forward(model, part, cache) for part in parts], 1)[:, 9:]
        expected = full(model, ids)[:, 9:]
        errors.append(((steps - expected).norm() / expected.norm()).item())
    assert 0 < errors[1] < 3 * errors[0]


@every_preset
@every_model
def test_beams_are_the_same_with_and_without_a_cache(model_type, preset):
    """https://github.com/huggingface/transformers/issues/46612"""
    found = generate(build(model_type, preset), prompt(), COUNT, num_beams=3)
    assert torch.equal(found, uncached(model_type, preset, beams=3))


@functools.cache
def assistant_for(model_type: str, preset: str | None) -> Any:
    """A model of one layer with other weights than the assisted one: most of what it says is thrown away."""
    model = small_model("llama", seed=3, num_hidden_layers=1)
    return model if preset is None else randomise_position(apply_drope(model, POSITIONS[preset]), 3)


@every_preset
@every_model
@pytest.mark.parametrize("helper", ["lookup", "converted assistant", "stock assistant"])
def test_tokens_verified_several_at_once_are_the_greedy_ones(helper, model_type, preset):
    """https://github.com/huggingface/transformers/pull/30311"""
    if helper == "lookup":
        kwargs: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
    else:
        kwargs = {"assistant_model": assistant_for(model_type, preset if helper.startswith("converted") else None)}
    found = generate(build(model_type, preset), prompt(1), COUNT, **kwargs)
    assert torch.equal(found, uncached(model_type, preset, batch=1))


@every_preset
@every_model
@pytest.mark.parametrize("static", [False, True])
def test_a_conversation_goes_on_with_its_cache(static, model_type, preset):
    model = build(model_type, preset)
    cache = StaticCache(config=model.config, max_cache_len=70) if static else DynamicCache(config=model.config)
    said = prompt()
    for turn in (1, 2):
        answer = generate(model, said, 5, past_key_values=cache)
        assert torch.equal(answer, generate(model, said, 5, use_cache=False)), f"turn {turn}"
        said = torch.cat([said, answer, random_ids(2, 4, seed=turn)], 1)
    assert cache.get_seq_length() == LENGTH + 5 + 4 + 5 - 1


# Older releases do not crop a window that has moved on.
CROPPABLE = MODELS if hasattr(DynamicSlidingWindowLayer, "activate_past_recording") else ["llama"]


@every_preset
@pytest.mark.parametrize("model_type", CROPPABLE)
def test_a_cropped_cache_goes_on_where_it_was_cropped(model_type, preset):
    model, ids, wrong = build(model_type, preset), random_ids(1, LENGTH), random_ids(1, 4, seed=7)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    found = [forward(model, ids[:, :11], cache)]
    for start in (11, 15):
        forward(model, wrong, cache)
        cache.crop(-4)
        found.append(forward(model, ids[:, start : start + 4], cache))
    assert_close(torch.cat(found, 1), full(model, ids[:, :19]))


@every_preset
@every_model
def test_rows_of_a_cache_may_be_repeated_and_chosen(model_type, preset):
    model, rows, ends = build(model_type, preset), random_ids(2, LENGTH), random_ids(4, 3, seed=7)
    cache = DynamicCache(config=model.config)
    forward(model, rows, cache)
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([5, 0, 1, 4]))
    order = [1, 0, 0, 1]
    found = forward(model, ends, cache)
    assert_close(found, full(model, torch.cat([rows[order], ends], 1))[:, LENGTH:])


@every_preset
@every_model
def test_each_step_has_the_logits_of_the_whole(model_type, preset):
    """https://github.com/keras-team/keras-hub/pull/2977: the fifth step and those before, close to the last bit."""
    model, ids = build(model_type, preset), random_ids(2, LENGTH)
    cache = DynamicCache(config=model.config)
    steps = [forward(model, part, cache) for part in (ids[:, :15], *ids[:, 15:].split(1, 1))]
    assert_close(torch.cat(steps, 1), full(model, ids))


@every_preset
def test_layers_with_and_without_a_window_agree_with_the_reference_in_decoding(preset, monkeypatch):
    """https://github.com/fla-org/flash-linear-attention/issues/766 and https://github.com/unslothai/unsloth-zoo/pull/635"""
    model, ids = build("gemma3_text", preset, "eager"), random_ids(1, LENGTH)
    recorder = Recorder(monkeypatch)
    cache = DynamicCache(config=model.config)
    forward(model, ids[:, :-1], cache)
    for call, kind in zip(recorder.calls, MIXED, strict=True):
        assert call.weights is not None
        i, j = torch.arange(LENGTH - 1)[:, None], torch.arange(LENGTH - 1)
        seen = (j <= i) & (j > i - 4) if kind == "sliding_attention" else j <= i
        assert (call.weights[..., ~seen] == 0).all()
        assert (call.weights[..., seen] > 0).all()
    recorder.calls.clear()
    forward(model, ids[:, -1:], cache)
    for call, kind in zip(recorder.calls, MIXED, strict=True):
        keys = 4 if kind == "sliding_attention" else LENGTH
        assert call.key.shape[2] == keys
        hidden = call.hidden_states if call.hidden_states is not None else torch.zeros(1, 1, 1)
        expected, _ = reference_attention(
            call.query,
            call.key,
            call.value,
            hidden,
            torch.ones(1, keys, dtype=torch.bool),
            call.scaling,
            call.module.position_bias,
            model.config.drope_parameters,
            keys - 1,
        )
        torch.testing.assert_close(call.output.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", DECODER_TYPES)
def test_attention_runs_once_a_layer_and_fills_the_cache(model_type, monkeypatch):
    """https://github.com/adapter-hub/adapters/issues/824: a changed signature must not leave attention or cache behind."""
    recorder = Recorder(monkeypatch)
    model = apply_drope(small_model(model_type), "simple")
    layers = [module for module in model.modules() if hasattr(type(module), "needs_position")]
    ids = random_ids(1, 6)
    with torch.no_grad():
        output = model(ids[:, :5], use_cache=True)
        cache = next(value for value in output.values() if isinstance(value, Cache))
        model(ids[:, 5:], use_cache=True, **cache_argument(model, cache))
    calls = [call.module for call in recorder.calls]
    half = len(calls) // 2
    assert {id(module) for module in calls} == {id(module) for module in layers}
    assert calls[:half] == calls[half:]
    # Some types go through their layers several times.
    assert half % len(layers) == 0
    assert all(call.key.shape[2] == 6 for call in recorder.calls[half:])


class Forgetful(DynamicCache):
    """Gives the last keys alone and does not say so."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        return tuple(states[:, :, -3:] for states in super().update(*args, **kwargs))


@pytest.mark.parametrize("preset", ["simple", "low_rank", "disentangled"])
def test_keys_that_the_cache_did_not_foretell_are_an_error(preset):
    """A bias would be read at wrong distances without a word."""
    model, ids = build("llama", preset), random_ids(1, 8)
    cache = Forgetful(config=model.config)
    with pytest.raises(ValueError, match="got 3 keys where its cache foretold 8, so their distances are not known"):
        forward(model, ids, cache)


@pytest.mark.parametrize(
    "settings",
    [{"window": 4}, {"attention_scale": {"coefficient": 0.5, "original_max_position_embeddings": 4}}],
    ids=str,
)
def test_unforeseen_keys_are_an_error_for_windows_and_scales_as_well(settings):
    model = apply_drope(small_model("llama"), "nope", **settings)
    with pytest.raises(ValueError, match="use a cache class of Transformers, or use_cache=False"):
        forward(model, random_ids(1, 8), Forgetful(config=model.config))
