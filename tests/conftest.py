import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from tiny import NOT_THERE


@pytest.fixture(autouse=True)
def _one_thread_and_own_module_cache(tmp_path_factory, monkeypatch):
    """Two threads per process on two cores fight each other; remote code goes to a folder of the test's own."""
    torch.set_num_threads(1)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))


def pytest_collection_modifyitems(config, items):
    """An older Transformers lacks families that are rows of many tests."""
    absent = [item for item in items if any(name in item.name for name in NOT_THERE)]
    config.hook.pytest_deselected(items=absent)
    items[:] = [item for item in items if item not in absent]
