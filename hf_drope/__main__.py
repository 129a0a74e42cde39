"""`python -m hf_drope` is the command line: launchers such as `accelerate launch -m hf_drope` want a module."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
