"""The report of an evaluation: one page that stands alone, with the numbers of `results.json` and nothing else."""

from __future__ import annotations

import builtins
import copy
import itertools
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_sample import MODELS, SOURCE, TASKS, sample_bench, sample_results

from hf_drope.report import write_report
from hf_drope.report_numbers import Interval, Results, by_octave, change, curve, findings, number, verdict

FEW = (SOURCE, f"{SOURCE} + ntk", f"{SOURCE} + yarn", "drope-log-score", "nope")
VOID = {"meta", "link", "br", "hr", "img", "input", "wbr"}
SECTIONS = {"summary", "perplexity", "retrieval", "bias", "training", "scale", "cost", "provenance"}


class Page(HTMLParser):
    """The tags, attributes and tables of a page; complains of tags that do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.tables: list[dict[str, Any]] = []
        self.labels: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append({"caption": "", "rows": []})
        elif tag == "tr":
            self.tables[-1]["rows"].append([])
        elif tag in ("th", "td"):
            self.tables[-1]["rows"][-1].append([])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["text"]:
            self.labels.append(data)
        if "caption" in self._open:
            self.tables[-1]["caption"] += data
        elif {"th", "td"} & set(self._open):
            self.tables[-1]["rows"][-1][-1].append(data)

    def sections(self) -> set[str]:
        return {attributes["id"] for tag, attributes in self.tags if tag == "section"}

    def table(self, caption: str) -> list[list[list[str]]]:
        (found,) = [table["rows"] for table in self.tables if table["caption"].startswith(caption)]
        return found


def written(folder: Path, results: dict[str, Any], bench: dict[str, Any] | None = None) -> tuple[str, list[Path]]:
    folder.mkdir(exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results))
    if bench is not None:
        (folder / "bench.json").write_text(json.dumps(bench))
    files = write_report(folder, None if bench is None else folder / "bench.json")
    return files[0].read_text(encoding="utf-8"), files


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return sample_results(lengths=(512, 2048, 8192), tasks=TASKS[:2], names=FEW, layers=3)


@pytest.fixture(scope="module")
def made(results, tmp_path_factory) -> tuple[str, list[Path]]:
    return written(tmp_path_factory.mktemp("report"), results, sample_bench())


@pytest.fixture
def without_matplotlib(monkeypatch) -> None:
    real: Callable[..., Any] = builtins.__import__

    def refuse(name: str, *arguments: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_the_page_has_every_section_and_asks_for_nothing(made):
    text, _ = made
    page = Page(text)
    assert page.sections() == SECTIONS
    for tag, attributes in page.tags:
        assert tag not in ("script", "iframe", "object", "embed", "base")
        for name in ("src", "href", "xlink:href", "data", "action", "poster", "srcset"):
            assert attributes.get(name, "#").startswith(("#", "data:")), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "Content-Security-Policy" in text


def test_links_and_references_lead_to_exactly_one_place(made):
    text, _ = made
    identities = [attributes["id"] for _, attributes in Page(text).tags if "id" in attributes]
    assert len(identities) == len(set(identities))
    assert set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text)) != set()
    for pair in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text):
        assert "".join(pair) in identities


def test_figures_and_tables_can_be_read_without_eyes(made):
    page = Page(made[0])
    headings = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(headings))
    figures = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(figures) == 11
    assert all(figure["role"] == "img" and len(figure["aria-label"]) > 20 for figure in figures)
    assert all(table["caption"] for table in page.tables)
    assert all("scope" in attributes for tag, attributes in page.tags if tag == "th")


def test_each_figure_is_a_png_as_well(made):
    _, files = made
    names = {file.name for file in files[1:]}
    assert names == {
        "perplexity-by-position.png",
        "perplexity-by-length.png",
        "retrieval-by-length.png",
        "retrieval-by-length-passkey.png",
        "retrieval-by-length-multikey.png",
        "retrieval-map-passkey.png",
        "retrieval-map-multikey.png",
        "bias-curves-drope-log-score.png",
        "bias-map-drope-log-score.png",
        "training-drope-log-score.png",
        "attention-scale-drope-log-score.png",
    }
    for file in files[1:]:
        content = file.read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 8000


def test_the_heat_map_and_its_table_say_what_the_results_say(made, results):
    text, _ = made
    page = Page(text)
    rows = iter(page.table("passkey: retrieved"))
    assert [cell[0] for cell in next(rows)] == ["Length", "0–20 %", "20–40 %", "40–60 %", "60–80 %", "80–100 %"]
    titles = re.findall(r"<title>([^<]+, needle at [^<]+)</title>", text)
    for model in FEW:
        next(rows)
        for length in (512, 2048, 8192):
            (row,) = [
                row
                for row in results["retrieval"]
                if (row["model"], row["task"], row["length"]) == (model, "passkey", length)
            ]
            cells = next(rows)
            assert cells[0] == [f"{length:,}"]
            for (rate, interval), part in zip(cells[1:], row["by_depth"], strict=True):
                assert int(rate) == pytest.approx(100 * part["rate"], abs=0.5001)
                low, high = map(int, interval.split("–"))
                assert (low, high) == pytest.approx((100 * part["low"], 100 * part["high"]), abs=0.5001)
                depth = f"{round(100 * part['from'])}–{round(100 * part['to'])} %"
                assert f"{model}, {length:,} tokens, needle at {depth}: {rate} % ({interval}) of 16 values" in titles


def test_the_cells_of_the_heat_map_hold_the_rates(results):
    pytest.importorskip("matplotlib")
    from hf_drope.report_drawing import house_style
    from hf_drope.report_figures import retrieval_map

    read = Results(results)
    with house_style():
        picture = retrieval_map(read, "multikey")
    panels = [axes for axes in picture.figure.axes if axes.get_title(loc="left")]
    assert len(panels) == len(FEW)
    for axes, name in zip(panels, read.names, strict=True):
        shown = {(text.get_position()[0] - 0.5, text.get_position()[1] - 0.5): text.get_text() for text in axes.texts}
        for column, length in enumerate((512, 2048, 8192)):
            for depth, part in enumerate(read.retrieval[name, "multikey", length]["by_depth"]):
                assert int(shown[column, depth]) == pytest.approx(100 * part["rate"], abs=0.5001)


def test_the_lines_of_figures_hold_the_numbers(results):
    pytest.importorskip("matplotlib")
    from hf_drope.report_drawing import colours, house_style
    from hf_drope.report_figures import perplexity_by_length, retrieval_by_length
    from hf_drope.report_inside import bias_curves

    read = Results(results)
    with house_style():
        lines = perplexity_by_length(read).figure.axes[0].lines[: len(FEW)]
        rates = retrieval_by_length(read, "passkey").figure.axes[0].lines[: len(FEW)]
        panels = bias_curves(read, "drope-log-score", "x").figure.axes
    for name, line, rate in zip(read.names, lines, rates, strict=True):
        assert list(line.get_ydata()) == [read.perplexity[name, length]["perplexity"] for length in read.lengths]
        expected = [100 * read.retrieval[name, "passkey", length]["rate"] for length in read.lengths]
        assert list(rate.get_ydata()) == pytest.approx(expected)
        assert line.get_color() == rate.get_color() == colours(read)[name]
    (values,) = [model["bias"]["values"] for model in results["models"] if model["name"] == "drope-log-score"]
    assert [[list(line.get_ydata()) for line in panel.lines[:4]] for panel in panels] == values


def test_the_summary_holds_perplexity_and_mean_retrieval(made, results):
    rows = Page(made[0]).table("By length in tokens")
    assert rows[0] == [["Model"], ["512", "in window"], ["2,048", "in window"], ["8,192", "4× window"]]
    read = Results(results)
    by_name = {}
    for row in rows:
        by_name.setdefault(row[0][0], []).append(row[1:])
    for name in FEW:
        perplexities, rates = by_name[read.label(name)]
        for length, perplexity, rate in zip(read.lengths, perplexities, rates, strict=True):
            shown = perplexity[0].lstrip("▲▼ ").replace(",", "")
            assert float(shown) == pytest.approx(read.perplexity[name, length]["perplexity"], rel=0.006)
            mean = sum(read.retrieval[name, task, length]["rate"] for task in TASKS[:2]) / 2
            assert int(rate[0].lstrip("▲▼ ").rstrip("%\u00a0")) == pytest.approx(100 * mean, abs=0.51)
    assert by_name["drope-log-score"][0][2][0].startswith("▲ ")


def test_bench_rows_are_in_the_table_of_costs(made):
    rows = Page(made[0]).table("Tokens in the column heads")
    assert rows[0] == [["Variant"], ["1,024"], ["4,096"], ["16,384"]]
    assert rows[2] == [["stock, RoPE"], ["820 ms"], ["820 ms"], ["820 ms"]]
    first = sample_bench()["rows"][0]
    assert rows[3][:2] == [["NoPE"], [f"{first['ratio']:.2f}", f"{first['low']:.2f}–{first['high']:.2f}"]]


def test_what_has_no_data_has_no_section(tmp_path, results):
    few = copy.deepcopy(results)
    few["retrieval"] = []
    few["settings"]["tasks"] = ["perplexity"]
    for model in few["models"]:
        model |= {"bias": None, "gates": None, "training": None, "attention_scale": None}
    text, files = written(tmp_path, few)
    assert Page(text).sections() == {"summary", "perplexity", "provenance"}
    assert [file.name for file in files] == ["report.html", "perplexity-by-position.png", "perplexity-by-length.png"]


def test_an_evaluation_that_has_just_begun_makes_a_page(tmp_path, results):
    begun = {**copy.deepcopy(results), "perplexity": [], "retrieval": []}
    begun["provenance"]["finished"] = None
    for model in begun["models"]:
        model |= {"bias": None, "gates": None, "training": None, "attention_scale": None}
    text, files = written(tmp_path, begun)
    assert Page(text).sections() == {"provenance"}
    assert "not finished: 0 of 45 results" in text
    assert len(files) == 1


def test_an_unfinished_evaluation_shows_what_is_there(tmp_path, results):
    part = copy.deepcopy(results)
    part["provenance"]["finished"] = None
    part["perplexity"] = part["perplexity"][:2]
    part["retrieval"] = [
        row
        for row in part["retrieval"]
        if row["model"] == SOURCE and (row["task"], row["length"]) != ("multikey", 8192)
    ]
    part["retrieval"][0]["by_depth"][3] |= {"values": 0, "rate": None, "low": None, "high": None}
    part["perplexity"][1]["perplexity"] = None
    part["perplexity"][1]["by_position"] = [None] * 32
    for row in part["retrieval"]:
        row["task"] = row["task"].replace("multikey", "multi/../key")
    part["settings"]["tasks"] = ["perplexity", "passkey", "multi/../key"]
    text, files = written(tmp_path, part)
    page = Page(text)
    assert tmp_path / "retrieval-map-multi-key.png" in files
    assert "not finished: 7 of 45 results" in text
    rows = page.table("By length in tokens")
    assert [cell[0] for cell in rows[2]] == [SOURCE, number(part["perplexity"][0]["perplexity"]), "–", "–"]
    (mean,) = [row for row in rows if row[0] == [SOURCE] and "1 of 2 tasks" in "".join(row[3])]
    assert mean[3][0].endswith("%")
    assert page.table("passkey: retrieved")[2][4] == ["–"]


def test_names_and_answers_are_escaped_everywhere(tmp_path, results):
    evil = '<b on="x">&$x^2$\'</b>'
    few = copy.deepcopy(results)
    few["models"] = [model for model in few["models"] if model["name"] in (SOURCE, "drope-log-score")]
    for rows in (few["perplexity"], few["retrieval"]):
        rows[:] = [row for row in rows if row["model"] in (SOURCE, "drope-log-score")]
        for row in rows:
            row["model"] = evil if row["model"] == SOURCE else "_" + evil
    for model in few["models"]:
        model["name"] = evil if model["name"] == SOURCE else "_" + evil
        model["path"] = f"../{evil}"
        model["drope_parameters"] = {"note": evil}
    for row in few["retrieval"]:
        row["examples"][0] = {"question": evil, "expected": [evil], "answer": evil}
    few["provenance"] |= {"cpu": evil, "command": ["hf-drope", evil]}
    few["text"]["files"] = [evil]
    bench = sample_bench()
    bench["rows"] = [{**row, "variant": evil, "measure": evil} for row in bench["rows"][:2]]
    bench["skipped"] = {evil: evil}
    text, files = written(tmp_path, few, bench)
    page = Page(text)
    assert not [tag for tag, attributes in page.tags if tag == "b" or "on" in attributes]
    assert {evil, f" _{evil}"} <= set(page.labels)
    assert f"_{evil}" in [cell[0] for cell in page.table("By length in tokens")[3]]
    assert all(file.parent == tmp_path and re.fullmatch(r"[a-z0-9-]+\.(png|html)", file.name) for file in files)


def test_the_same_results_make_the_same_files(tmp_path, results):
    few = {**results, "retrieval": [row for row in results["retrieval"] if row["task"] == "passkey"]}
    first, files = written(tmp_path / "one", few)
    second, others = written(tmp_path / "two", few)
    assert first == second
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in others]


def test_without_matplotlib_the_tables_remain(tmp_path, results, without_matplotlib):
    text, files = written(tmp_path, results, sample_bench())
    page = Page(text)
    assert [file.name for file in files] == ["report.html"]
    assert page.sections() == SECTIONS
    assert "pip install hf-drope[plot]" in text
    assert "svg" not in {tag for tag, _ in page.tags}
    assert len(page.table("passkey: retrieved")) == 1 + len(FEW) * 4


def test_many_layers_lengths_and_models_still_fit(tmp_path):
    pytest.importorskip("matplotlib")
    from hf_drope.report_drawing import WIDTH, house_style
    from hf_drope.report_figures import retrieval_map
    from hf_drope.report_inside import bias_curves, bias_map, chosen_layers

    read = Results(
        sample_results(lengths=tuple(2**power for power in range(8, 15)), tasks=("passkey",), layers=30, heads=9)
    )
    assert len(read.names) == len(MODELS)
    assert chosen_layers(list(range(30)))[::11] == [0, 29]
    with house_style():
        for picture in (
            retrieval_map(read, "passkey"),
            bias_curves(read, "drope-log-score", "x"),
            bias_map(read, "drope-log-score", "x"),
        ):
            width, height = picture.figure.get_size_inches()
            assert width == WIDTH
            assert height < 14


def test_a_marked_cell_is_one_whose_interval_is_apart_from_the_source():
    source, other = Interval(0.5, 0.4, 0.6), Interval(0.7, 0.61, 0.8)
    assert verdict(other, source, higher_is_better=True) == "better"
    assert verdict(other, source, higher_is_better=False) == "worse"
    assert verdict(Interval(0.7, 0.6, 0.8), source, higher_is_better=True) == ""
    assert verdict(other, None, higher_is_better=True) == ""
    # Of one window there is no interval, and a point lies apart from everything.
    assert verdict(Interval(0.7, 0.7, 0.7), source, higher_is_better=True) == ""
    assert verdict(other, Interval(0.5, 0.5, 0.5), higher_is_better=True) == ""
    assert verdict(other, source._replace(note="1 of 2 tasks"), higher_is_better=True) == ""


def test_the_interval_of_a_mean_adds_distances_in_squares(results):
    read = Results(copy.deepcopy(results))
    for task, (rate, low, high) in zip(TASKS[:2], [(0.9, 0.8, 0.95), (0.5, 0.4, 0.62)], strict=True):
        read.retrieval["nope", task, 512] |= {"rate": rate, "low": low, "high": high}
    found = read.mean_rate_at("nope", 512)
    below, above = (0.1**2 + 0.1**2) ** 0.5 / 2, (0.05**2 + 0.12**2) ** 0.5 / 2
    assert found == pytest.approx((0.7, 0.7 - below, 0.7 + above, ""))


def test_spans_of_positions_weigh_each_token_alike():
    row = {"edges": [0, 64, 128, 192, 256], "by_position": [3.0, 2.0, 1.0, 2.0]}
    octaves = by_octave(row)
    assert [span[:2] for span in octaves] == [(0, 64), (64, 128), (128, 256)]
    assert octaves[2][2] == pytest.approx(2.718281828**1.5)
    assert [span[:2] for span in curve({"edges": list(range(0, 1025, 64)), "by_position": [1.0] * 16})[-2:]] == [
        (832, 960),
        (960, 1024),
    ]


def test_findings_compare_with_the_source_and_beyond_the_window_with_its_best_scaling(results):
    read = Results(results)
    found = findings(read)
    assert list(found) == ["drope-log-score", "nope"]
    assert [(row.what, row.length) for row in found["nope"]] == [
        ("perplexity", 2048),
        ("perplexity", 8192),
        ("retrieval", 2048),
        ("retrieval", 8192),
    ]
    inside, outside = found["nope"][2:]
    assert inside.best is None
    assert inside.source == read.mean_rate_at(SOURCE, 2048)
    best = max(read.mean_rate_at(f"{SOURCE} + {scaling}", 8192) for scaling in ("ntk", "yarn"))
    assert outside.best is not None
    assert outside.best[0] == best


def test_findings_do_not_leave_out_the_source_after_the_same_training():
    stock = f"{SOURCE}-same-tokens"
    made = sample_results(lengths=(2048, 8192), tasks=TASKS[:1], names=(*FEW, stock), layers=1)
    read = Results(made)
    read.retrieval[stock, TASKS[0], 8192] |= {"rate": 0.99, "low": 0.9, "high": 1.0}
    *_, inside, outside = findings(read)["nope"]
    assert [row.best and row.best[1] for row in (inside, outside)] == [stock, stock]
    read.retrieval[stock, TASKS[0], 8192] |= {"rate": 0.0, "low": 0.0, "high": 0.1}
    assert findings(read)["nope"][-1].best[1].startswith(f"{SOURCE} + ")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(18.44, "18.4"), (1.0, "1.00"), (999.7, "1,000"), (12345, "12,300"), (2.5e7, "2.5e7"), (None, "–")],
)
def test_numbers_have_three_digits(value, shown):
    assert number(value) == shown


def test_changes_are_per_cent_or_factors():
    assert [change(value, 20).replace("\u00a0", " ") for value in (20, 20.4, 17, 60, 5, 900)] == [
        "±0.0 %",
        "+2.0 %",
        "−15 %",
        "× 3.0",
        "÷ 4.0",
        "× 45",
    ]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "results.json does not exist; hf-drope evaluate --out"),
        ("{", "results.json is not JSON"),
        ("[]", "results.json has no list 'models'"),
        ('{"models": [], "format": 7}', "has format 7, and this version of hf_drope reads 1"),
    ],
)
def test_a_file_that_is_no_result_is_refused(tmp_path, content, sentence):
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_file_that_is_no_bench_is_refused(tmp_path, results):
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(ValueError, match="has no list 'rows'; hf-drope bench --json writes one"):
        write_report(tmp_path, tmp_path / "results.json")
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]
