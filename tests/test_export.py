"""Stock exports: the same logits from the plain class, and nothing exported that the plain class would run otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from checkpoints import edit_json, logits, save_byte_tokenizer, write_source
from model_types import class_of, small_model
from safetensors.torch import load_file, save_file
from test_saving import IDS as WITHOUT_IDS
from test_saving import run_without_package
from tiny import random_ids, tiny_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hf_drope import convert_checkpoint, plan_conversion
from hf_drope.cli import main
from hf_drope.conversion_additions import ConversionError
from hf_drope.export import export_checkpoint, plan_export
from hf_drope.gguf_export import export_gguf, plan_gguf
from hf_drope.stock_config import NO_ROTATION

IDS = random_ids(2, 9)
POSITIONS = [torch.arange(9), torch.arange(9) + 40, torch.tensor([0, 1, 2, 3, 5, 7, 9, 30, 50])]
# Quirks that an export has to know, one type of each: learned tables (with an offset, scaled embeddings), rotary pairs by
# layer type, half-rotated heads, complex rotations, reordered channels of compressed keys, longrope alone, layers without
# rotation, linear attention between, sinks of other kinds.
TYPES = (
    "llama",
    "qwen3",
    "gpt2",
    "gpt_bigcode",
    "opt",
    "biogpt",
    "gemma3_text",
    "modernbert-decoder",
    "gpt_neox",
    "phi",
    "phi3",
    "phimoe",
    "persimmon",
    "deepseek_v2",
    "deepseek_v3",
    "minicpm3",
    "smollm3",
    "cohere2",
    "olmo_hybrid",
    "lfm2",
    "minimax",
    "glm4",
)


def converted(source: Path, **overrides: Any) -> Path:
    target = source.with_name(source.name + "-nope")
    convert_checkpoint(plan_conversion(source, "nope", overrides=overrides), target, progress=False)
    return target


def exported(source: Path, **overrides: Any) -> Path:
    folder = converted(source, **overrides)
    return export_checkpoint(plan_export(folder), source.with_name("out"), progress=False)


@torch.no_grad()
def run(model: Any, positions: torch.Tensor) -> torch.Tensor:
    given = {"attention_mask": torch.ones_like(IDS), "use_cache": False}
    try:
        return model(IDS, position_ids=positions.expand(2, -1), **given).logits
    except TypeError:
        return model(IDS, **given).logits


def compare(source: Path, out: Path, tolerance: float = 0.0) -> None:
    """The export in its stock class against the converted folder, at any positions; it must not be the source."""
    ours = AutoModelForCausalLM.from_pretrained(source.with_name(source.name + "-nope")).eval()
    stock, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(stock) is class_of(stock.config.model_type)
    assert not any(info.values()), info
    rotating = AutoModelForCausalLM.from_pretrained(source).eval()
    for positions in POSITIONS:
        expected, found = run(ours, positions), run(stock.eval(), positions)
        assert (found - expected).abs().max() <= tolerance * expected.abs().max()
        assert (run(rotating, positions) - found).abs().max() > 1e-2 * found.abs().max()


@pytest.mark.parametrize("model_type", TYPES)
def test_the_plain_class_gives_the_same_logits_bit_for_bit_at_any_positions(model_type, tmp_path):
    """https://github.com/pytorch/executorch/issues/22043: what is written as a plain model must not be rotated."""
    small_model(model_type).save_pretrained(tmp_path / "src")
    compare(tmp_path / "src", exported(tmp_path / "src"))


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "qwen3",  # a norm behind the projection
        "olmo2",  # over all heads
        "gemma3_text",  # that multiplies by 1 + weight
        "persimmon",  # with a bias, behind rows of a fused projection
        "gpt_neox",  # rows head by head
        "phi3",  # rows in a block
        "gpt2",  # columns
        "gpt_bigcode",  # one key for all heads
        "deepseek_v3",  # a projection of a projection
        "lfm2",
        "modernbert-decoder",
    ],
)
def test_a_constant_attention_scale_goes_into_the_weights_that_make_the_queries(model_type, tmp_path):
    model = small_model(model_type)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "src")
    out = exported(tmp_path / "src", attention_scale={"factor": 1.3})
    compare(tmp_path / "src", out, tolerance=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(out).state_dict()
    changed = {key for key, weight in model.state_dict().items() if not torch.equal(weight, plain[key])}
    assert changed <= set(plan_export(tmp_path / "src-nope").folds) | {
        key for key in changed if key.endswith(("wpe.weight", "embed_positions.weight"))
    }


def test_a_power_of_two_is_folded_without_rounding(tmp_path):
    small_model("qwen2", dtype=torch.bfloat16).to(torch.bfloat16).save_pretrained(tmp_path / "src")
    compare(tmp_path / "src", exported(tmp_path / "src", attention_scale={"factor": 2.0}))


def test_what_a_yarn_source_multiplies_its_scores_by_is_kept(tmp_path):
    """DeepSeek's attention takes a factor from its rope settings, which the export replaces."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
    extra = {"mscale": 1.0, "mscale_all_dim": 1.0}
    small_model("deepseek_v3", rope_parameters={**rope, **extra}).save_pretrained(tmp_path / "src")
    out = exported(tmp_path / "src")
    assert plan_export(tmp_path / "src-nope").scale > 1.4
    compare(tmp_path / "src", out, tolerance=1e-5)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "linear", "rope_theta": 1e6, "factor": 3.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_nothing_of_a_scaled_rope_is_left(rope, tmp_path):
    """https://github.com/NVIDIA-NeMo/Safe-Synthesizer/pull/623: the context length is not multiplied once more."""
    tiny_model("llama", rope_parameters=rope).save_pretrained(tmp_path / "src")
    out = exported(tmp_path / "src")
    compare(tmp_path / "src", out)
    config = json.loads((out / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_theta": rope["rope_theta"], **NO_ROTATION}
    assert config["max_position_embeddings"] == 64


def test_rope_settings_of_older_transformers_are_replaced(tmp_path):
    """https://github.com/vllm-project/vllm/pull/44158: top-level theta and `type` for `rope_type`."""
    tiny_model("llama").save_pretrained(tmp_path / "src")
    config = json.loads((tmp_path / "src/config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (tmp_path / "src/config.json").write_text(json.dumps(config))
    out = exported(tmp_path / "src")
    compare(tmp_path / "src", out)
    assert not {"rope_theta", "rope_scaling"} & json.loads((out / "config.json").read_text()).keys()


@pytest.mark.parametrize("model_type", ["gptj", "codegen"])
def test_families_that_rotate_whatever_their_config_says_are_refused(model_type, tmp_path):
    small_model(model_type).save_pretrained(tmp_path / "src")
    with pytest.raises(ConversionError, match=f"{model_type} has no setting with which it does not rotate"):
        plan_export(converted(tmp_path / "src"))


def test_a_scale_that_no_weight_can_take_is_refused(tmp_path):
    """Llama 4 norms queries and keys without a weight, after their projections."""
    small_model("llama4_text").save_pretrained(tmp_path / "src")
    with pytest.raises(ConversionError, match="no weights that multiply its queries alone"):
        plan_export(converted(tmp_path / "src", attention_scale={"factor": 1.3}))


@pytest.mark.parametrize(
    ("preset", "overrides", "sentence"),
    [
        ("simple", {}, "position_bias is 'table'"),
        ("nope", {"rope_scale": 0.5}, "rope_scale is 0.5"),
        ("nope", {"rope_layers": [0]}, r"rope_layers is \[0\]"),
        ("nope", {"qk_norm": "q"}, "qk_norm is 'q'"),
        ("nope", {"window": 4}, "window is 4"),
        (
            "nope",
            {"attention_scale": {"coefficient": 0.1, "original_max_position_embeddings": 64}},
            "attention_scale is 'by length'",
        ),
    ],
)
def test_what_no_stock_architecture_has_is_refused_by_name(preset, overrides, sentence, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "src")
    plan = plan_conversion(tmp_path / "src", preset, overrides=overrides)
    convert_checkpoint(plan, tmp_path / "dst", progress=False)
    with pytest.raises(ConversionError, match=sentence):
        plan_export(tmp_path / "dst")


def test_a_stock_folder_is_refused(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "src")
    with pytest.raises(ConversionError, match="no converted one"):
        plan_export(tmp_path / "src")


@pytest.mark.parametrize("max_shard_size", ["20KB", "1GB"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_and_other_files_are_the_same_bytes_and_our_files_stay_behind(family, max_shard_size, tmp_path):
    """https://github.com/hiyouga/EasyR1/pull/11007 and https://github.com/huggingface/transformers/pull/43429."""
    write_source(tmp_path / "src", family, max_shard_size=max_shard_size, tie_word_embeddings=True)
    (tmp_path / "src/README.md").write_text("# A card\n")
    out = exported(tmp_path / "src")
    compare(tmp_path / "src", out)
    folder = tmp_path / "src-nope"
    assert not list(out.glob("*.py"))
    assert not (out / "drope_conversion.json").exists()
    config = json.loads((out / "config.json").read_text())
    assert not {"auto_map", "drope_parameters"} & config.keys()
    assert config["architectures"] == [class_of(family).__name__]
    for path in (tmp_path / "src").iterdir():
        if not path.name.startswith(("config.json", "model")):
            name = "SOURCE_README.md" if path.name == "README.md" else path.name
            assert (out / name).read_bytes() == path.read_bytes(), path.name
    held = {path.read_bytes() for path in out.glob("*.safetensors")}
    assert {path.read_bytes() for path in folder.glob("*.safetensors")} <= held
    assert any("lm_head" in key for path in out.glob("*.safetensors") for key in load_file(path)) is False
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id == [2, 5]


def test_half_precision_and_base_models_are_exported_as_they_are(tmp_path):
    tiny_model("gpt2", "Model").to(torch.bfloat16).save_pretrained(tmp_path / "src")
    out = exported(tmp_path / "src")
    stock, info = AutoModel.from_pretrained(out, output_loading_info=True)
    ours = AutoModel.from_pretrained(tmp_path / "src-nope")
    assert type(stock).__name__ == "GPT2Model"
    assert not any(info.values()), info
    assert {weight.dtype for weight in stock.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        assert torch.equal(stock.eval()(IDS).last_hidden_state, ours.eval()(IDS).last_hidden_state)


def test_a_classifier_is_exported_with_its_head(tmp_path):
    tiny_model("llama", "ForSequenceClassification").save_pretrained(tmp_path / "src")
    out = exported(tmp_path / "src")
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert "score.weight" in load_file(out / "model.safetensors")


def test_an_export_loads_where_the_package_is_not(tmp_path):
    small_model("llama").save_pretrained(tmp_path / "src")
    exported(tmp_path / "src")
    code = """
        model = transformers.LlamaForCausalLM.from_pretrained("out")
        assert "hf_drope" not in sys.modules
        torch.save(logits(model), "logits.pt")
    """
    run_without_package(code, tmp_path, tmp_path / "modules")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "src-nope").eval()
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits(ours, WITHOUT_IDS))


def test_a_table_that_is_still_there_is_not_dropped_in_silence(tmp_path):
    tiny_model("gpt2").save_pretrained(tmp_path / "src")
    folder = converted(tmp_path / "src")
    state = load_file(folder / "model.safetensors")
    state["transformer.wpe.weight"] = torch.ones(64, 32)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=r"wpe\.weight is still in the checkpoint"):
        plan_export(folder)


def test_public_checkpoints_are_exported_by_their_own_fields(tmp_path):
    """The fields of https://github.com/SakanaAI/DroPE, whose softmax_scale is the whole factor on the scores."""
    tiny_model("llama").save_pretrained(tmp_path / "src")
    folder = converted(tmp_path / "src", attention_scale={"factor": 2.0})
    config = json.loads((folder / "config.json").read_text())
    del config["drope_parameters"], config["auto_map"]
    config |= {"attention_type": "nope", "softmax_scale": 2.0 / 8**0.5}
    (folder / "config.json").write_text(json.dumps(config))
    out = export_checkpoint(plan_export(folder), tmp_path / "out", progress=False)
    compare(tmp_path / "src", out, tolerance=1e-6)
    assert not {"attention_type", "softmax_scale"} & json.loads((out / "config.json").read_text()).keys()


def test_the_command_line_plans_writes_and_overwrites(tmp_path, capsys):
    write_source(tmp_path / "src")
    folder, out = converted(tmp_path / "src"), tmp_path / "out"
    export = ["export", str(folder), str(out), "--format", "stock"]
    assert main([*export, "--dry-run"]) == 0
    assert "nothing written" in capsys.readouterr().out
    assert not out.exists()
    assert main([*export, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["model_type"], plan["scale"]) == ("llama", 1.0)
    assert AutoConfig.from_pretrained(out).model_type == "llama"
    assert main(export) == 2
    assert "not empty" in capsys.readouterr().err
    (out / "stray.txt").write_text("old")
    assert main([*export, "--overwrite"]) == 0
    assert not (out / "stray.txt").exists()
    assert main(["export", str(folder), str(folder)]) == 2
    assert "overlap" in capsys.readouterr().err


class TestGGUF:
    """A file for llama.cpp, read back; `tests/check_gguf.py` compares logits with llama.cpp itself."""

    @pytest.fixture
    def folder(self, tmp_path):
        model = small_model("qwen2", vocab_size=320, tie_word_embeddings=True)
        model.to(torch.bfloat16).save_pretrained(tmp_path / "src")
        save_byte_tokenizer(tmp_path / "src")
        (tmp_path / "src/chat_template.jinja").write_text("{{ messages }}")
        return converted(tmp_path / "src", attention_scale={"factor": 2.0})

    def test_holds_the_weights_a_rotation_that_turns_nothing_and_the_tokenizer(self, folder, tmp_path):
        assert main(["export", str(folder), str(tmp_path / "model.gguf"), "--format", "gguf"]) == 0
        read = gguf.GGUFReader(tmp_path / "model.gguf")
        tensors = {tensor.name: tensor for tensor in read.tensors}
        assert tensors["rope_freqs.weight"].data.tolist() == pytest.approx([1e30] * 4)
        weights = load_file(folder / "model.safetensors")
        assert len(tensors) == len(weights) + 1
        for name, key, factor in (
            ("token_embd.weight", "model.embed_tokens.weight", 1),
            ("blk.1.attn_q.weight", "model.layers.1.self_attn.q_proj.weight", 2),
            ("blk.1.attn_q.bias", "model.layers.1.self_attn.q_proj.bias", 2),
            ("blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight", 1),
            ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight", 1),
        ):
            tensor = tensors[name]
            held = torch.from_numpy(tensor.data.copy())
            if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
                held = held.view(torch.bfloat16)
            assert torch.equal(held.float(), weights[key].float() * factor), name
        field = {name: field.contents() for name, field in read.fields.items()}
        assert (field["general.architecture"], field["llama.rope.dimension_count"]) == ("llama", 8)
        assert (field["llama.attention.head_count"], field["llama.attention.head_count_kv"]) == (4, 2)
        assert (field["tokenizer.ggml.pre"], field["tokenizer.ggml.bos_token_id"]) == ("gpt-2", 0)
        assert field["tokenizer.chat_template"] == "{{ messages }}"
        assert len(field["tokenizer.ggml.tokens"]) == 320
        assert field["tokenizer.ggml.token_type"][:3] == [3, 3, 1]

    @pytest.mark.parametrize(
        ("model_type", "changes", "sentence"),
        [
            ("gemma", {}, "and not gemma"),
            ("mistral", {"sliding_window": 16}, "sliding_window is 16"),
            ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ],
    )
    def test_other_models_are_refused_by_name(self, model_type, changes, sentence, tmp_path):
        small_model(model_type, vocab_size=320, **changes).save_pretrained(tmp_path / "src")
        save_byte_tokenizer(tmp_path / "src")
        with pytest.raises(ConversionError, match=sentence):
            plan_gguf(converted(tmp_path / "src"))

    def test_a_window_that_config_json_leaves_to_its_default_is_seen(self, tmp_path):
        small_model("mistral", vocab_size=320).save_pretrained(tmp_path / "src")
        save_byte_tokenizer(tmp_path / "src")
        config = json.loads((tmp_path / "src/config.json").read_text())
        config.pop("sliding_window")
        (tmp_path / "src/config.json").write_text(json.dumps(config))
        with pytest.raises(ConversionError, match="sliding_window is 4096"):
            plan_gguf(converted(tmp_path / "src"))

    def test_tokenizers_that_llama_cpp_would_read_otherwise_are_refused(self, folder, tmp_path):
        edit_json(folder / "tokenizer.json", pre_tokenizer={"type": "Metaspace", "replacement": "▁"})
        with pytest.raises(ConversionError, match="split by Metaspace"):
            plan_gguf(folder)
        plain = {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False}}
        edit_json(folder / "tokenizer.json", **plain, normalizer={"type": "Lowercase"})
        with pytest.raises(ConversionError, match="has a Lowercase normalizer"):
            plan_gguf(folder)
        token, text = (
            {kind: {"id": name, "type_id": 0}} for kind, name in (("SpecialToken", "<e>"), ("Sequence", "A"))
        )
        around = {"type": "TemplateProcessing", "single": [text, token]}
        edit_json(folder / "tokenizer.json", **plain, normalizer=None, post_processor=around)
        with pytest.raises(ConversionError, match="puts <e> around a text"):
            plan_gguf(folder)
        (folder / "tokenizer.json").unlink()
        with pytest.raises(ConversionError, match=r"has no tokenizer\.json"):
            plan_gguf(folder)

    def test_a_target_is_a_file_of_its_own(self, folder, tmp_path):
        plan = plan_gguf(folder)
        (tmp_path / "old.gguf").write_text("old")
        for target, sentence in (
            (tmp_path / "model.bin", r"ends in \.gguf"),
            (tmp_path / "old.gguf", "exists"),
            (folder / "model.gguf", "inside the source"),
        ):
            with pytest.raises(ConversionError, match=sentence):
                export_gguf(plan, target, progress=False)
        export_gguf(plan, tmp_path / "old.gguf", overwrite=True, progress=False)
        assert (tmp_path / "old.gguf").read_bytes()[:4] == b"GGUF"
        assert not list(tmp_path.glob(".old*"))

    def test_without_the_package_one_sentence_says_what_to_install(self, folder, monkeypatch, capsys, tmp_path):
        monkeypatch.setitem(__import__("sys").modules, "gguf", None)
        assert main(["export", str(folder), str(tmp_path / "x.gguf"), "--format", "gguf"]) == 2
        assert "pip install 'hf-drope[gguf]'" in capsys.readouterr().err
