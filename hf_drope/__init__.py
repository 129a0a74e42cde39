"""Take position encoding out of pretrained language models, or replace it: DroPE and bias RPE for Transformers.

Importing this package tells Transformers' Auto classes about the converted model types. It imports neither torch nor
transformers itself: names are resolved on first use, and the registration waits for Transformers' own registry.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
_TRANSFORMERS_FLOOR = (5, 14)

# Public name -> the module that defines it.
_HOMES = {
    "DroPEParameters": "drope_parameters",
    "drope_config_class": "configuration_drope",
    "apply_drope": "modeling_drope",
    "drope_class": "modeling_drope",
    "plan_conversion": "conversion_plan",
    "convert_checkpoint": "convert",
    "inspect_checkpoint": "convert",
    "verify_checkpoint": "verify",
    "lora_config": "adapters",
    "calibrate": "calibration",
    "calibrate_checkpoint": "folder_calibration",
    "fit_attention_scale": "attention_scale_fit",
    "fit_checkpoint_attention_scale": "folder_attention_scale",
    "Distillation": "distill",
    "DroPESchedule": "schedule",
    "DroPECallback": "training",
    "DroPETrainer": "training",
    "evaluate": "evaluation",
}
__all__ = [*sorted(_HOMES), "__version__"]

if TYPE_CHECKING:
    from .adapters import lora_config as lora_config
    from .attention_scale_fit import fit_attention_scale as fit_attention_scale
    from .calibration import calibrate as calibrate
    from .configuration_drope import drope_config_class as drope_config_class
    from .conversion_plan import plan_conversion as plan_conversion
    from .convert import convert_checkpoint as convert_checkpoint
    from .convert import inspect_checkpoint as inspect_checkpoint
    from .distill import Distillation as Distillation
    from .drope_parameters import DroPEParameters as DroPEParameters
    from .evaluation import evaluate as evaluate
    from .folder_attention_scale import fit_checkpoint_attention_scale as fit_checkpoint_attention_scale
    from .folder_calibration import calibrate_checkpoint as calibrate_checkpoint
    from .modeling_drope import apply_drope as apply_drope
    from .modeling_drope import drope_class as drope_class
    from .schedule import DroPESchedule as DroPESchedule
    from .training import DroPECallback as DroPECallback
    from .training import DroPETrainer as DroPETrainer
    from .verify import verify_checkpoint as verify_checkpoint


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _check_transformers() -> None:
    version = importlib.metadata.version("transformers")
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < _TRANSFORMERS_FLOOR:
        floor = ".".join(map(str, _TRANSFORMERS_FLOOR))
        raise ImportError(f"hf_drope needs transformers {floor} or newer, found {version}; upgrade transformers.")


def _register(_: ModuleType) -> None:
    """Add every converted model type to AutoConfig, and its model classes as soon as such a config is made."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

    from .configuration_drope import auto_map, config_class_listeners, drope_model_type
    from .model_types import SUPPORTED_MODEL_TYPES

    def register_real_classes(config_class: Any) -> None:
        from .modeling_drope import register_model_classes

        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        register_model_classes(config_class)

    if not config_class_listeners:
        config_class_listeners.append(register_real_classes)
    # An older Transformers may lack some.
    for model_type in filter(CONFIG_MAPPING.__contains__, SUPPORTED_MODEL_TYPES):
        name, class_name = drope_model_type(model_type), auto_map(model_type)["AutoConfig"].rpartition(".")[2]
        if name in CONFIG_MAPPING and CONFIG_MAPPING[name].__name__ != class_name:
            raise ImportError(
                f"model type {name!r} is already registered with Transformers by {CONFIG_MAPPING[name].__module__}; "
                "import hf_drope in a process of its own."
            )
        AutoConfig.register(name, _deferred_config(name, class_name), exist_ok=True)


def _deferred_config(model_type: str, class_name: str) -> Any:
    """Stands in for a config class until one is needed: the stock config modules may be half imported now."""
    from transformers.configuration_utils import PreTrainedConfig

    def real() -> Any:
        from . import configuration_drope

        return getattr(configuration_drope, class_name)

    namespace = {
        "__module__": __name__,
        "model_type": model_type,
        "__new__": lambda cls, *args, **kwargs: real()(*args, **kwargs),
        "from_dict": classmethod(lambda cls, *args, **kwargs: real().from_dict(*args, **kwargs)),
        "from_pretrained": classmethod(lambda cls, *args, **kwargs: real().from_pretrained(*args, **kwargs)),
    }
    return type(class_name, (PreTrainedConfig,), namespace)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs `_register` once Transformers has imported its registry, however the user gets there."""

    registry = "transformers.models.auto.configuration_auto"

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.registry:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


_check_transformers()
if _AfterImport.registry in sys.modules:
    _register(sys.modules[_AfterImport.registry])
elif not any(type(finder).__name__ == _AfterImport.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _AfterImport())
