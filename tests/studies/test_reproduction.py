"""The page of reproductions follows the kept rows, and no other page claims more."""

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest

import reproduction
from concord.errors import InputError
from concord.job_files import job_texts
from concord.options import option_values
from concord.studies.job_tables import comparisons_of
from concord.training import load_job
from documents import with_tables
from kept_results import read_table
from reproduction import HEADER, NOT_KEPT, OUT, PARTLY, SMALLER, TESTED, VERDICTS, Item, Papers

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def papers() -> Papers:
    return reproduction.read_papers(ROOT / "docs" / "results")


@pytest.fixture(scope="module")
def items(papers: Papers) -> list[Item]:
    return [item for each in papers.values() for item in each]


def commands(item: Item) -> list[str]:
    return [*(item.command or ([f"concord compare {item.rows}"] if item.rows else [])), *item.test]


def test_every_item_of_the_papers_is_there_once(papers: Papers) -> None:
    assert [len(each) for each in papers.values()] == [34, 36, 9, 18, 1]
    for paper, each in papers.items():
        assert max(Counter(item.item for item in each).values()) == 1, paper


def test_every_line_has_evidence_and_a_verdict(items: list[Item]) -> None:
    for item in items:
        assert item.judged in VERDICTS, item.item
        assert not (item.holds and item.test), "one kind of evidence"
        assert bool(item.holds) == bool(item.rows) == (item.protocol is not None), item.item
        assert item.holds or item.test or item.verdict, item.item
        assert not item.verdict or item.verdict in VERDICTS[5:], f"{item.item}: no row supports this verdict"
        assert all(len(re.split(r"(?<!\\)\|", cell)) == 1 for cell in item.line()), "a column more"
        assert len(item.line()) == len(HEADER)


def test_every_named_test_exists(items: list[Item]) -> None:
    for item in items:
        for path, name in (each.split("::") for each in item.test):
            assert f"def {name}(" in (ROOT / path).read_text(), name


def test_every_command_names_a_job_and_its_tables(items: list[Item]) -> None:
    for item in items:
        assert commands(item) or item.judged in VERDICTS[6:], item.item
        for words in (each.split() for each in commands(item) if not each.startswith("tests/")):
            assert words[0] == "concord"
            assert words[1] in {"train", "tune", "compare", "report", "data", "analyze"}, words
            job = load_job(words[2])
            if words[1] == "compare":
                tables = [word for word in words[3:4] if not word.startswith("--")]
                assert set(tables) <= set(comparisons_of(job)), words


def test_a_job_names_the_results_that_its_commands_make(items: list[Item]) -> None:
    """And says nothing of how they come out: the page does."""
    for text in job_texts():
        lists = re.findall(r"(Fig\.|Table)s? ([\w., ]+)", text.reproduces)
        named = {f"{kind} {number}" for kind, numbers in lists for number in numbers.split(", ")}
        of_job = {item.item for item in items if any(f" {text.name} " in f"{each} " for each in commands(item))}
        assert named == {each for each in of_job if re.match(r"(Fig\.|Table) ", each)}, text.name
        assert not re.search("reproduc|only| not |but for", text.reproduces), text.reproduces


def papers_of(folder: Path, *rows: tuple[str, float, str], **entry: object) -> Item:
    """An item about the average and the AND-mask, with these rows: name, o.o.d. accuracy and options of the command."""
    folder.mkdir(exist_ok=True)
    lines = [
        {"configuration": row, "seed": seed, "values": {"o.o.d.": value, "training": 1.0}, "seconds": 1.0,
         "command": f"concord compare synthetic baseline{options}", "commit": "0", "machine": "none"}
        for seed, (row, value, options) in enumerate(rows)
    ]  # fmt: skip
    (folder / "synthetic-baseline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    holds = ["[and-mask; o.o.d.] > 0.95", "[average; o.o.d.] < [and-mask; o.o.d.]"]
    protocol = {"seeds": 2, "length": "94 epochs", "settings": "chosen by hand", "fixed": "2026-11-29"}
    written = {"item": "Fig. 6", "shows": "all", "rows": "synthetic baseline", "holds": holds, "seeds": 2}
    written |= {"protocol": protocol, **entry}
    (folder / "papers.yaml").write_text(json.dumps({"paper": [written]}))  # JSON is YAML
    return reproduction.read_papers(folder)["paper"][0]


BOTH = [("and-mask", 1.0, ""), ("and-mask", 0.98, ""), ("average", 0.5, ""), ("average", 0.52, "")]


def test_a_verdict_follows_from_the_rows(tmp_path: Path) -> None:
    assert papers_of(tmp_path, *BOTH).judged == OUT
    assert papers_of(tmp_path, *BOTH, smaller="one of two tasks").judged == SMALLER
    assert papers_of(tmp_path, *BOTH, seeds=50).judged == SMALLER
    shorter = papers_of(tmp_path, *((row, value, " --seeds 2 --first-seed 4 --epochs 3") for row, value, _ in BOTH))
    assert (shorter.judged, shorter.line()[5]) == (SMALLER, "`--epochs 3`")
    assert papers_of(tmp_path).judged == NOT_KEPT
    assert papers_of(tmp_path, verdict="not run").judged == "not run"
    assert papers_of(tmp_path, *BOTH, verdict="not run").judged == OUT, "rows count more than words"
    lost = papers_of(tmp_path, *BOTH[:2])
    assert (lost.judged, lost.line()[6]) == (PARTLY, "partly; no rows for `[average; o.o.d.] < [and-mask; o.o.d.]`")
    assert papers_of(tmp_path, *BOTH[2:]).judged == NOT_KEPT, "no statement has rows of both"
    wide = papers_of(
        tmp_path, ("and-mask", 1.0, ""), ("and-mask", 0.96, ""), ("average", 1.0, ""), ("average", 0.9, "")
    )
    assert wide.line()[6] == "partly; not `[average; o.o.d.] < [and-mask; o.o.d.]`", "within two standard errors"
    assert wide.line()[2] == "o.o.d. · AND-mask: 0.980 ± 0.028; average: 0.950 ± 0.071"
    assert papers_of(tmp_path, *BOTH[2:], holds=["[average; o.o.d.] > 0.9"]).judged == VERDICTS[3]
    assert papers_of(tmp_path, *BOTH[:2], holds=["max [and-mask; o.o.d.] > 0.99"]).judged == OUT
    assert papers_of(tmp_path, *BOTH[:2], holds=["min [and-mask; o.o.d.] < 0.985"]).judged == OUT
    assert papers_of(tmp_path, *BOTH[:2], holds=["[and-mask; o.o.d.] = 0.9 ± 0.1"]).judged == OUT
    assert papers_of(tmp_path, *BOTH[:2], holds=["[and-mask; o.o.d.] = 0.9 ± 0.05"]).judged == VERDICTS[3]


def test_seeds_beyond_the_protocol_decide_nothing(tmp_path: Path) -> None:
    """A verdict is never reached by more seeds of the rows that failed."""
    low = [("and-mask", 0.9, ""), ("and-mask", 0.9, ""), *BOTH[2:]]
    failed = papers_of(tmp_path, *low)
    more = papers_of(tmp_path, *low, *(("and-mask", 1.0, "") for _ in range(20)))
    assert failed.judged == more.judged == PARTLY
    assert failed.line()[:7] == more.line()[:7]


def test_a_row_with_fewer_seeds_than_its_protocol_says_so(tmp_path: Path) -> None:
    line = papers_of(tmp_path, *BOTH[:3]).line()
    assert line[2] == "o.o.d. · AND-mask: 0.990 ± 0.014; average: 0.500 (1 of 2 seeds)"
    assert line[4] == "2 seeds; 94 epochs; settings: chosen by hand; fixed 2026-11-29"


def test_rows_of_a_protocol_train_equally_long(items: list[Item]) -> None:
    """Where the number of examples differs, the epochs or the steps are equal; what else differs is said."""
    for item in (each for each in items if each.protocol is not None):
        lengths: dict[tuple[str, str], dict[object, set[tuple[float, float]]]] = {}
        for cell in {each for text in item.holds for each in re.findall(r"\[([^\]]+)\]", text)}:
            row, _, *other = cell.split("; ")
            job_name, table = (other[0] if other else item.rows).split(" ")
            job = load_job(job_name)
            comparison = comparisons_of(job).get(table)
            for name, changes in {} if comparison is None else comparison.configurations.items():
                if name == row or (row.endswith(" *") and name.startswith(row[:-1])):
                    options = {**option_values(job.job.config), **changes}
                    examples = options.get("examples", 1)
                    length = options["epochs"], options["epochs"] * math.ceil(examples / options["batch_size"])
                    lengths.setdefault((job_name, table), {}).setdefault(examples, set()).add(length)
        for place, by_examples in lengths.items():
            epochs = {epochs for each in by_examples.values() for epochs, _ in each}
            steps = {round(steps, -1) for each in by_examples.values() for _, steps in each}
            assert min(len(epochs), len(steps)) == 1 or item.protocol.unequal, (item.item, place, lengths)


def test_a_statement_may_be_about_all_rows_whose_names_begin_alike(tmp_path: Path) -> None:
    def judged(holds: str, rows: dict[str, list[float]]) -> str:
        protocol = {"seeds": 1, "length": "10 epochs", "settings": "chosen by hand", "fixed": "2026-11-29"}
        item = papers_of(tmp_path, holds=[holds], rows="coinrun-clone table-3", seeds=0, protocol=protocol)
        lines = [
            {
                "configuration": row,
                "seed": seed,
                "values": {"selected": value},
                "seconds": 1.0,
                "command": "",
                "commit": "0",
            }
            for row, values in rows.items()
            for seed, value in enumerate(values)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "coinrun-clone-table-3.jsonl").write_text(text)
        return item.judged

    adams = {f"Adam {place}": [0.1 * place] for place in range(1, 6)}
    assert judged("[Adam *; selected] = 0.3 ± 0.001", adams) == OUT, "each row has one seed"
    assert judged("min [Adam *; selected] = 0.1 ± 0.001", adams) == OUT
    ours = {f"row {place}": [0.1 * place - 0.01] for place in range(1, 6)}
    assert judged("[row *; selected] < [Adam *; selected]", adams | ours) == VERDICTS[3], "within two standard errors"
    assert judged("min [row *; selected] < min [Adam *; selected]", adams | ours) == OUT
    assert judged("[Adam *; selected] > 0", {**adams, "Adam 5": []}) == NOT_KEPT, "a row has no runs"
    with pytest.raises(InputError, match="no such row"):
        judged("[Adam; selected] > 0", adams)


def test_a_test_without_a_part_of_the_item_comes_out_partly(tmp_path: Path) -> None:
    tested = {"rows": "", "holds": [], "protocol": None, "test": ["tests/test_it.py::test_it"]}
    assert papers_of(tmp_path, **tested).judged == TESTED
    assert papers_of(tmp_path, **tested, without="a panel").judged == PARTLY


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("[and-mask; o.o.d.] = 0.9", "must read like"),
        ("[and-mask; o.o.d.] > 0.9 ± 0.1", "must read like"),
        ("and-mask is better", "must read like"),
        ("[mask; o.o.d.] > 0.9", "no such row or column"),
        ("[and-mask; test] > 0.9", "no such row or column"),
        ("[and-mask; o.o.d.; synthetic none] > 0.9", "no such table"),
    ],
)
def test_a_statement_that_cannot_be_decided_is_refused(statement: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        _ = papers_of(tmp_path, *BOTH, holds=[statement]).judged


def test_the_page_follows_the_rows_when_they_arrive(tmp_path: Path) -> None:
    text = "<!-- reproduction: {} -->old<!-- end of reproduction -->"
    papers_of(tmp_path)
    assert "| rows not kept | `concord compare synthetic baseline` |" in with_tables(text.format("items"), tmp_path)
    papers_of(tmp_path, *BOTH)
    assert "| comes out | `concord compare synthetic baseline` |" in with_tables(text.format("items"), tmp_path)
    assert "| paper | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |" in with_tables(text.format("summary"), tmp_path)
    assert "1 items 1 come out at full size, 0 in smaller runs" in with_tables(text.format("sentence"), tmp_path)
    assert read_table("synthetic", "baseline", tmp_path).numbers("average", "o.o.d.") == [0.5, 0.52]
    with pytest.raises(InputError, match="reproduction: all: must be one of items, summary, sentence"):
        with_tables(text.format("all"), tmp_path)
