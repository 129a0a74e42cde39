"""The README's table of support: which model type takes which positions on which backends, as the tests find it.

    python tests/support_table.py            run every type, mode and backend, and write the table into the README
    python tests/support_table.py --check    the same, and exit 1 where the README says otherwise

Types with the same row share one. `tests/test_types.py` holds single cells of it against what it runs.
"""

from __future__ import annotations

import argparse
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from tqdm import tqdm
from type_matrix import MODES, Refused, backends_of, check, check_strengths

from hf_drope.model_types import DECODERS, ENCODERS, SUPPORTED_MODEL_TYPES

README = Path(__file__).parents[1] / "README.md"
_TABLE = re.compile(r"(?<=<!-- support -->\n).*?(?=<!-- /support -->)", re.DOTALL)
_NAMES = {"flex_attention": "flex"}


def row_of(model_type: str) -> tuple[str, ...]:
    """The backends of a type and its cells, one a mode.

    Raises:
        AssertionError: a wrong answer, which no table can hold.
    """
    torch.set_num_threads(1)
    check_strengths(model_type)
    backends = backends_of(model_type)
    cells = [", ".join(_NAMES.get(name, name) for name in backends)]
    for mode in MODES:
        able = []
        for backend in backends:
            try:
                check(model_type, mode, backend)
            except Refused:
                continue
            able.append(_NAMES.get(backend, backend))
        cells.append("–" if not able else "yes" if len(able) == len(backends) else ", ".join(able))
    return tuple(cells)


def table_of(rows: dict[str, tuple[str, ...]]) -> str:
    """The table in Markdown: decoders before encoders, the row of most types first."""
    lines = [f"| model types | backends | {' | '.join(MODES)} |", "|---" * (len(MODES) + 2) + "|"]
    for family in (DECODERS, ENCODERS):
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in family:
            groups.setdefault(rows[name], []).append(name)
        for cells, names in sorted(groups.items(), key=lambda group: (-len(group[1]), group[1])):
            lines.append(f"| {' '.join(f'`{name}`' for name in sorted(names))} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def read_table(text: str) -> dict[str, tuple[str, ...]]:
    """The rows by model type of the table in the README's text."""
    found = _TABLE.search(text)
    lines = found[0].splitlines()[2:] if found else []
    rows = {}
    for line in lines:
        names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows.update(dict.fromkeys(re.findall(r"`([^`]+)`", names), tuple(cells)))
    return rows


def says(rows: dict[str, tuple[str, ...]], model_type: str, mode: str, backend: str) -> bool:
    """Whether the table says that a type takes a mode on a backend."""
    backends, cell = rows[model_type][0], rows[model_type][1 + list(MODES).index(mode)]
    able = backends if cell == "yes" else cell
    return _NAMES.get(backend, backend) in able.split(", ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where the README says otherwise")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.processes) as pool:
        done = tqdm(
            pool.map(row_of, SUPPORTED_MODEL_TYPES), total=len(SUPPORTED_MODEL_TYPES), unit="type", disable=None
        )
        rows = dict(zip(SUPPORTED_MODEL_TYPES, done, strict=True))
    text = README.read_text(encoding="utf-8")
    new = _TABLE.sub(lambda _: table_of(rows), text)
    if arguments.check and new != text:
        was = read_table(text)
        print("The README says otherwise of", ", ".join(name for name in rows if rows[name] != was.get(name)))
        return 1
    README.write_text(new, encoding="utf-8")
    print("no difference" if new == text else "written", f"({len(rows)} model types)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
