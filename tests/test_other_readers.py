"""What other readers of a checkpoint and `torch.export` make of a converted model: they run it right or refuse it."""

from __future__ import annotations

import pytest
import torch
import transformers
from checkpoints import logits, write_source
from model_types import TYPES, small_model
from reference import randomise_position
from tiny import random_ids, tiny_model
from transformers import AutoConfig
from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

from hf_drope import DroPEParameters, apply_drope, convert_checkpoint, plan_conversion

every_type = pytest.mark.parametrize("model_type", TYPES)
ADDED = {
    "table": {"position_bias": {"type": "table"}},
    "log, score gate": {"position_bias": {"type": "log"}, "gate": {"type": "score"}},
    "low rank": {"position_bias": {"type": "low_rank"}},
    "disentangled": {"position_bias": {"type": "disentangled"}},
    "window": {"window": 4},
    "growing scale": {"attention_scale": {"coefficient": 0.5, "original_max_position_embeddings": 4}},
}


@every_type
def test_readers_of_the_source_architecture_find_no_name_they_know(model_type, tmp_path):
    """https://github.com/airockchip/rknn-llm/issues/501, https://github.com/pytorch/executorch/issues/22043 and
    https://github.com/timtoole02/Camelid/pull/535: they would rotate every layer."""
    small_model(model_type).save_pretrained(tmp_path / "src")
    config = plan_conversion(tmp_path / "src").config
    assert config["model_type"] not in CONFIG_MAPPING_NAMES
    assert len(config["architectures"]) == 1
    for name in (*config["architectures"], *(entry.rpartition(".")[2] for entry in config["auto_map"].values())):
        assert name.startswith("DroPE")
        assert not hasattr(transformers, name)
    assert config["drope_parameters"]["rope_scale"] == 0.0


class Program(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


EXPORTED = {
    "no bias": ("llama", "sdpa", {}),
    "fading": ("gpt_neox", "sdpa", {"rope_scale": 0.5}),
    "table": ("gpt2", "eager", ADDED["table"]),
    "log, score gate": ("gpt_neox", "sdpa", ADDED["log, score gate"]),
    "low rank": ("qwen3", "sdpa", ADDED["low rank"]),
    "disentangled": ("llama", "sdpa", ADDED["disentangled"]),
    "window and scale": ("llama", "sdpa", {**ADDED["window"], **ADDED["growing scale"]}),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_exported_programs_take_any_batch_and_length(name):
    """https://github.com/huggingface/optimum/issues/473 and https://github.com/keras-team/keras-hub/issues/2861"""
    family, backend, settings = EXPORTED[name]
    one = {"n_layer": 1} if family in ("gpt2", "gptj") else {"num_hidden_layers": 1}
    stock = tiny_model(family, attn_implementation=backend, **one)
    model = randomise_position(apply_drope(stock, DroPEParameters.from_dict(settings)))
    shape = {0: torch.export.Dim("batch", max=8), 1: torch.export.Dim("length", min=2, max=60)}
    program = torch.export.export(Program(model), (random_ids(2, 9),), dynamic_shapes={"ids": shape}).module()
    for batch, length in ((1, 5), (2, 9), (3, 33)):
        ids = random_ids(batch, length, seed=length)
        with torch.no_grad():
            torch.testing.assert_close(program(ids), logits(model, ids), atol=1e-4, rtol=1e-4)


def test_a_stretched_context_is_no_longer_in_the_settings_a_stock_engine_reads(tmp_path):
    """https://github.com/NVIDIA-NeMo/Safe-Synthesizer/pull/623: engines multiply the context by the factor of most types."""
    from hf_drope.export import export_checkpoint, plan_export

    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    write_source(tmp_path / "src", rope_parameters=yarn, max_position_embeddings=128)
    convert_checkpoint(plan_conversion(tmp_path / "src"), tmp_path / "dst", progress=False)
    export_checkpoint(plan_export(tmp_path / "dst"), tmp_path / "out", progress=False)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.max_position_embeddings == 128
    # The one scaled type whose maximum is taken as it stands.
    assert config.rope_parameters["rope_type"] == "llama3"
