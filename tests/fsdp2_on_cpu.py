"""The command line under FSDP2 on the CPU: accelerate shards on accelerators only and would train with plain DDP here.

accelerate launch --config_file examples/accelerate_fsdp2.yaml tests/fsdp2_on_cpu.py recalibrate DST OUT --text book.txt
"""

from __future__ import annotations

import sys
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType

from hf_drope.cli import main

_initialise = PartialState.__init__


def _initialise_as_an_accelerator(self: Any, *args: Any, **kwargs: Any) -> None:
    _initialise(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


if __name__ == "__main__":
    PartialState.__init__ = _initialise_as_an_accelerator
    sys.exit(main(sys.argv[1:]))
