"""A pytest plugin for `run_common_model_tests.py`: runs a test module of Transformers on converted classes.

Loaded into a process that runs one `tests/models/<family>/test_modeling_<family>.py`. With `--drope-preset` it puts hf_drope's
class in place of each stock class of the family, wherever the module or one of its test classes holds one, and gives
every config the preset. `--drope-outcomes` names the JSON file for the outcomes by test.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import transformers.testing_utils
from transformers import PreTrainedConfig, PreTrainedModel

# Sizes of the tiny models, for sources of a release that looks for them in Transformers itself.
_SIZES = {
    "batch_size": 13,
    "seq_length": 7,
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "is_training": True,
    "use_input_mask": True,
    "use_labels": True,
    "hidden_act": "gelu",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# In no table of Transformers: tests make exceptions for it, and its inputs, by its name.
_KNOWN_BY_NAME = {"GPT2DoubleHeadsModel"}
_outcomes: dict[str, str] = {}
_reasons: dict[str, str] = {}


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--drope-preset", default=None)
    parser.addoption("--drope-outcomes", default=None)


def pytest_configure(config: Any) -> None:
    if not hasattr(transformers.testing_utils, "_TEXT_MODEL_TESTER_DEFAULTS"):
        transformers.testing_utils._TEXT_MODEL_TESTER_DEFAULTS = _SIZES
    if not Path("tests/distributed_testing_utils.py").is_file():
        # Imported at the top of files whose distributed tests are switched off here.
        sys.modules["tests.distributed_testing_utils"] = _Anything("tests.distributed_testing_utils")


class _Anything(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def pytest_collection_finish(session: Any) -> None:
    preset = session.config.getoption("--drope-preset")
    if preset is not None:
        for module in {item.module for item in session.items}:
            _convert(module, preset)


def _convert(module: ModuleType, preset: str) -> None:
    import hf_drope

    folder = os.environ["HF_DROPE_UNDER_TEST"]
    if not Path(hf_drope.__file__ or "").is_relative_to(folder):
        raise RuntimeError(f"hf_drope comes from {hf_drope.__file__}, not from {folder}.")
    family = module.__name__.rpartition("test_modeling_")[2]
    settings = hf_drope.DroPEParameters.preset(preset).to_dict()
    here = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    for tester in here:
        if hasattr(tester, "_verify_and_infer_model_attributes"):
            # Finds the other classes by the name and place of the stock one.
            tester._verify_and_infer_model_attributes()
        if hasattr(tester, "get_config"):
            tester.get_config = _with_settings(tester.get_config, settings)
        # Asked for, or not, of a model by the year in the file of its config class; GPT-2 is too old.
        tester.test_can_init_all_missing_weights_before_2023 = family != "gpt2"
    for owner in [module, *(value for value in here if isinstance(value, type))]:
        for name, value in list(vars(owner).items()):
            ours = _ours(value, family)
            if ours is not value:
                setattr(owner, name, ours)
    common: Any = sys.modules["tests.test_modeling_common"]
    common.get_values = _with_our_names(common.get_values)


def _ours(value: Any, family: str) -> Any:
    """`value` with each stock class of the family, at any depth, exchanged; the same object where there is none."""
    if isinstance(value, type) and issubclass(value, PreTrainedModel | PreTrainedConfig):
        import hf_drope

        is_config = issubclass(value, PreTrainedConfig)
        if (value if is_config else value.config_class or PreTrainedConfig).model_type != family:
            return value
        ours = hf_drope.drope_config_class(value) if is_config else hf_drope.drope_class(value)
        if value.__name__ in _KNOWN_BY_NAME:
            ours.__name__ = value.__name__
        return ours
    if isinstance(value, tuple | list):
        parts = type(value)(_ours(part, family) for part in value)
        return value if all(new is old for new, old in zip(parts, value, strict=True)) else parts
    if type(value) is dict:
        entries = {key: _ours(part, family) for key, part in value.items()}
        return value if all(entries[key] is value[key] for key in value) else entries
    return value


def _with_settings(get_config: Any, settings: dict[str, Any]) -> Any:
    @functools.wraps(get_config)
    def with_settings(*args: Any, **kwargs: Any) -> Any:
        config = get_config(*args, **kwargs)
        config.drope_parameters = dict(settings)
        return config

    return with_settings


def _with_our_names(get_values: Any) -> Any:
    """Many tests ask by name what kind a class is of."""

    def with_our_names(mapping: Any) -> Any:
        values = list(get_values(mapping))
        return values + [f"DroPE{value}" for value in values if isinstance(value, str)]

    return with_our_names


def pytest_runtest_logreport(report: Any) -> None:
    name = report.nodeid.rpartition("::")[2]
    if report.failed:
        if _outcomes.get(name) != "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            _reasons[name] = str(crash.message if crash else report.longrepr)[-2000:]
        _outcomes[name] = "failed"
    elif not hasattr(report, "context") and (report.when == "call" or report.skipped):
        # A report with a context is a subtest's.
        _outcomes.setdefault(name, report.outcome)
        if report.skipped and isinstance(report.longrepr, tuple):
            _reasons.setdefault(name, report.longrepr[2])


def pytest_sessionfinish(session: Any) -> None:
    target = session.config.getoption("--drope-outcomes")
    if target is not None:
        Path(target).write_text(json.dumps({"outcomes": _outcomes, "reasons": _reasons}), encoding="utf-8")
