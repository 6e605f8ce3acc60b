"""The command ``analyze``: measures whether trained models are consistent across environments."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from concord.analysis.columns.report import broken_lines, relation_cells, use_cells
from concord.analysis.consistency.measurement import Measurement, method_as_json, over_runs, read_measurements
from concord.analysis.consistency.network import PARTS
from concord.cli.output import table
from concord.cli.parsing import given_options, job_and_words, parse
from concord.execution.analyzing import AnalyzeOptions
from concord.logs import info
from concord.options import science_values
from concord.storage import resolve
from concord.table import Table, format_value
from concord.training.job import command_line


def analyze(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """Analyze trained models."""
    job, rest = job_and_words(words, "analyze")
    job.require_platform_loop("analyze")
    options = parse(AnalyzeOptions, rest, f"concord analyze {words[0]}")
    options.check()
    from concord.analysis.consistency.figures import runs_figure
    from concord.analysis.figures import save
    from concord.execution.analyzing import analyze as analyze_models

    reports = analyze_models(job, options, info)
    for report in reports:
        if "untracked" in report:
            info(f"{report['run']}: could not be kept in MLflow ({report['untracked']})")
    if options.results is not None:
        from concord.studies.results import write_analyses

        info(f"kept in {write_analyses(reports, _command(words[0], rest, options), options.results)}")
    if len(reports) == 1:
        if not as_json:
            _print_report(reports[0])
        return reports[0]
    runs = [(report["method"], read_measurements(report)) for report in reports]
    methods = {name: [found for method, found in runs if method == name] for name, _ in runs}
    over_seeds = {name: over_runs(found) for name, found in methods.items()}
    rows = [
        {"method": name, "seeds": len(methods[name]), **method_as_json(found)} for name, found in over_seeds.items()
    ]
    figures = {}
    if (figure := runs_figure(runs)) is not None:
        folder = resolve(options.output) / "reports" / job.name / "consistency"
        figures["runs"] = str(save(figure, folder / "runs.png"))
    if not as_json:
        _print_measurements({f"{name} ({len(methods[name])})": found for name, found in over_seeds.items()})
        for row in rows:
            for each in row["ilc"]:
                parts = [f"{name} {_with_spread(**each[name])}" for name in ("bound", "quadratic") if name in each]
                print(f"ILC       {row['method']}, ε {each['epsilon']:g}: at most {', '.join(parts)}")
        for report in (each for each in reports if "table" in each):
            for line in broken_lines(report["table"]["columns"], report["table"]["purposes"]):
                print(f"{report['run']}: {line}")
        print(f"runs      {', '.join(report['run'] for report in reports)}")
        _print_figures(figures)
    return {"job": job.name, "runs": reports, "methods": rows, "figures": figures}


def _command(job: str, words: Sequence[str], options: AnalyzeOptions) -> str:
    """The recorded command: without the options of folders and cluster."""
    given = given_options(AnalyzeOptions, words)
    values = {name: value for name, value in science_values(options).items() if name in given}
    return command_line("analyze", job, options=values)


def _print_report(report: Mapping[str, Any]) -> None:
    measured = report["asked"]["parts"] != ["columns"]
    if measured:
        _print_measurements({"environments": read_measurements(report)})
    print(f"run       {report['run']}  (MLflow run {report['run_id']})")
    if measured:
        pairs = f"{len(report['pairs'])} of {report['possible_pairs']} pairs"
        print(f"measured  {report['environments']} environments, {pairs}, ρ = {report['absolute_radius']:.4g}")
        if not all(pair["converged"] for pair in report["pairs"]):
            print("note      some ratios of curvatures have not converged; the true values may be larger")
        norms = sorted(report["gradient_norms"].values())
        print(f"gradients norms {norms[0]:.3g} to {norms[-1]:.3g}; where they are not 0, I^ε does not vanish with ε")
    if "table" in report:
        columns = report["table"]["columns"]
        for cells in (relation_cells, use_cells):
            Table.plain(cells(columns[0]), [list(cells(each).values()) for each in columns]).print()
        for line in broken_lines(columns, report["table"]["purposes"]):
            print(line)
    if not measured:
        print(f"network   its consistency is measured with --parts {' '.join(PARTS)}")
    _print_figures(report["figures"])
    print(f"seconds   {report['seconds']:.1f}")


def _print_measurements(columns: Mapping[str, Sequence[Measurement]]) -> None:
    """A table of the whole network's measurements, with a column and its null for each method, or for one run."""
    found = [{each.heading: each for each in column if each.whole} for column in columns.values()]
    rows = []
    for heading in dict.fromkeys(itertools.chain.from_iterable(found)):
        row = [heading]
        for each in (column.get(heading) for column in found):
            row += [""] * 2 if each is None else [
                _with_spread(each.value, each.spread), _with_spread(each.null, each.null_spread)
            ]  # fmt: skip
        rows.append(row)
    table(["", *(heading for name in columns for heading in (name, "null"))], rows)


def _with_spread(mean: float | None, std: float | None) -> str:
    if mean is None:
        return ""
    return format_value(mean) + ("" if std is None else f" ± {format_value(std)}")


def _print_figures(figures: Mapping[str, str]) -> None:
    for name, path in figures.items():
        print(f"figure    {name}: {path}")
