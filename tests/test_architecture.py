"""What may import what, what is public, and what travelling code must not do."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hf_drope
from hf_drope.configuration_drope import TRAVELLING_FILES

PACKAGE = Path(hf_drope.__file__).parent
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")

# A room imports from rooms below it only; rooms of the same floor do not know each other.
FLOORS = [
    {
        "cache_argument",
        "drope_parameters",
        "fp32_module",
        "hardware",
        "lowest",
        "model_types",
        "packed_documents",
        "position_shapes",
        "rotary_drope",
        "rotary_pairs",
        "whole_file",
    },
    {"configuration_drope", "disentangled_bias", "gates", "stock_attention", "streamed_attention"},
    {"position_bias", "position_modules", "disentangled_decoding"},
    {"attention_call", "attention_masks"},
    {"attention_backends", "block_bias_attention", "flex_attention_drope"},
    {"biased_attention"},
    {"attention_drope"},
    {"installation"},
    {"modeling_drope"},
    {"checkpoint", "schedule", "sharding", "provenance", "retrieval_tasks", "text", "report_numbers", "report_page"}
    | {"card_measures", "hub_upload"},
    {"card_text"},
    {"model_card"},
    {"checkpoint_writing", "conversion_additions", "new_folder", "report_drawing"},
    {"conversion_plan", "record", "position_prediction", "top_k_logits", "descent", "distance_fit"}
    | {"report_figures", "report_inside"},
    {"convert", "distill", "resume", "stock_config", "query_scale", "gguf_tokenizer", "report_tables"},
    {"layer_fit", "output_descent", "report"},
    {"calibration", "perplexity", "retrieval", "training", "export", "verify"},
    {"context_scaling", "gguf_export", "model_facts"},
    {"adapters", "attention_scale_fit", "folder_calibration", "recalibration_plan"},
    {"evaluation_plan", "folder_attention_scale"},
    {"evaluation_results", "evaluation_table"},
    {"evaluation"},
    {"recalibration_teacher"},
    {"recalibrate"},
    {"demo", "bench_variants", "bench_measures"},
    {"bench_report"},
    {"bench"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
# Read by everyone, so that a command line that only reads files need not import torch.
LIGHT = (
    {
        "configuration_drope",
        "drope_parameters",
        "position_shapes",
        "schedule",
        "model_card",
        "text",
        "cli",
        "commands",
    }
    | {
        "checkpoint",
        "checkpoint_writing",
        "new_folder",
        "conversion_additions",
        "conversion_plan",
        "convert",
        "export",
        "gguf_export",
        "gguf_tokenizer",
        "stock_config",
    }
    | {"card_measures", "card_text", "hub_upload"}
    | {"report", "report_drawing", "report_figures", "report_inside", "report_numbers", "report_page", "report_tables"}
)
PUBLIC = [
    "Distillation",
    "DroPECallback",
    "DroPEParameters",
    "DroPESchedule",
    "DroPETrainer",
    "__version__",
    "apply_drope",
    "calibrate",
    "calibrate_checkpoint",
    "convert_checkpoint",
    "drope_class",
    "drope_config_class",
    "evaluate",
    "fit_attention_scale",
    "fit_checkpoint_attention_scale",
    "inspect_checkpoint",
    "lora_config",
    "plan_conversion",
    "verify_checkpoint",
]
# Our classes that travel; a checkpoint has its own copy of each, which `isinstance` would not recognise.
TWO_COPIES = {"DroPEMixin", "DroPEParameters"}


def tree(name: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))


def imports(name: str) -> set[str]:
    """The rooms of the package that a room imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("hf_drope")):
            module = (node.module or "").removeprefix("hf_drope").strip(".")
            found |= {module.partition(".")[0]} if module else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("hf_drope.")}
    return found & set(MODULES)


def test_every_room_has_its_floor():
    assert set(MODULES) <= set().union(*FLOORS)


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_one_way(name):
    floor = next(number for number, rooms in enumerate(FLOORS) if name in rooms)
    for other in imports(name):
        below = set().union(*FLOORS[:floor])
        assert other in below, f"{name} imports {other}"


@pytest.mark.parametrize("name", [name for name in MODULES if name in LIGHT])
def test_heavy_libraries_are_not_imported_at_the_top_of_light_rooms(name):
    top = set()
    for node in tree(name).body:
        if isinstance(node, ast.Import):
            top |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            top.add((node.module or "").partition(".")[0])
    allowed = {"torch"} if name == "text" else set()
    assert not (top & {"torch", "transformers", "datasets", "peft", "matplotlib"}) - allowed


def test_public_names_are_pinned():
    assert sorted(hf_drope.__all__) == PUBLIC
    assert set(PUBLIC) <= set(dir(hf_drope))


def test_every_public_name_whose_room_exists_can_be_had():
    for name in PUBLIC:
        assert getattr(hf_drope, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = hf_drope.no_such_name


@pytest.mark.parametrize("name", [file.removesuffix(".py") for file in TRAVELLING_FILES])
def test_travelling_code_does_not_ask_for_the_class_of_ours_that_exists_twice(name):
    """Under `trust_remote_code` the config comes from one copy of the code and the model may come from another."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "isinstance":
            names = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
            assert not names & TWO_COPIES, ast.unparse(node)
            assert not any(n.startswith("DroPE") for n in names), ast.unparse(node)


@pytest.mark.parametrize("name", MODULES)
def test_no_printing_outside_the_command_line_and_no_asserts(name):
    for node in ast.walk(tree(name)):
        assert not isinstance(node, ast.Assert)
        if name not in ("cli", "commands", "demo") and isinstance(node, ast.Call):
            assert getattr(node.func, "id", None) != "print"
            assert getattr(node.func, "attr", None) != "basicConfig"
