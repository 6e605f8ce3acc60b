"""The command on what runs have learned: is it the same explanation in every environment?"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concord.analysis.consistency.network import PARTS, Part, Settings
from concord.cli.output import format_value, info, table
from concord.cli.parsing import given_options, job_and_words, parse
from concord.defaults import DEFAULT_OUTPUT
from concord.errors import ArgumentError, InputError
from concord.options import as_words, option_values
from concord.redaction import redact
from concord.runs.consistency import DataAsked, Split

# The options of a command that its record leaves out.
_WHERE = {"output", "tracking_uri", "address", "results", "data_dir", "again", "use_gpu"}


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions:
    """How consistent what was learned is across environments: how far a change that one environment does not see (its
    loss stays within ε) may change another's loss. Beside it stands the same on pseudo-environments, dealt out at
    random from the same examples."""

    name: tuple[str, ...] = ()
    """Finished runs; several that differ in the seed alone are one method, others stand side by side."""
    model: str | None = None
    """A registered model in their place: NAME@champion, or NAME/VERSION."""
    epsilon: tuple[float, ...] = Settings.epsilon
    """By how much the loss of the environment that does not see the change may change, ε."""
    radius: float = Settings.radius
    """How far parameters may be moved, ρ, over the norm of all parameters."""
    parts: tuple[Part, ...] = PARTS
    """What is measured: agreement of signs; curvature, to second order; a bound on the true losses; slices."""
    pairs: int = Settings.pairs
    """Ordered pairs of environments to measure, drawn by the seed if there are more."""
    examples: int = DataAsked.examples
    """Examples of each environment."""
    split: Split = DataAsked.split
    """Of the training environments, what was trained on or what was held out."""
    environments: int = 0
    """Deal the pooled examples out at random to so many groups, for jobs without environments; 0 keeps the job's."""
    through: str | None = None
    """Another run of the same network, through whose solution the slices go."""
    seed: int = 0
    """Seed of examples, pairs, directions and pseudo-environments."""
    use_gpu: bool = False
    """Compute on a GPU."""
    results: Path | None = None
    """Folder that is to keep the main numbers, a line a run, too: JOB-analyzed.jsonl."""
    again: bool = False
    """Measure anew what was measured before with the same options."""
    data_dir: Path | None = None
    """Folder of the data, if it is not where the run had it."""
    output: Path = DEFAULT_OUTPUT
    """Folder of the runs, and of MLflow's store without a tracking URI."""
    tracking_uri: str | None = None
    """MLflow tracking URI (or MLFLOW_TRACKING_URI)."""
    address: str | None = None
    """Ray cluster for several runs, or local; without it (or RAY_ADDRESS) Ray is started on this machine."""


def analyze(words: Sequence[str], as_json: bool) -> Mapping[str, Any]:
    """Analyze what runs have learned."""
    job, rest = job_and_words(words, "analyze")
    job.require_platform_loop("analyze")
    options = parse(AnalyzeOptions, rest, f"concord analyze {words[0]}")
    _check(options)
    from concord.runs.analyzing import ModelToAnalyze
    from concord.runs.analyzing import analyze as analyze_models
    from concord.runs.consistency_report import by_method, draw_runs
    from concord.runs.run import resolved_paths
    from concord.training.options import TrainConfig

    computing = ("output", "tracking_uri", "address", "use_gpu", "data_dir")
    where = TrainConfig().with_options(**{option: getattr(options, option) for option in computing})
    where = where.with_options(**resolved_paths(where))
    settings = Settings(
        epsilon=options.epsilon, radius=options.radius, pairs=options.pairs, parts=options.parts, seed=options.seed
    )
    asked = DataAsked(
        examples=options.examples, split=options.split, environments=options.environments, seed=options.seed
    )
    models = [
        ModelToAnalyze(
            path=job.path,
            source=job.source,
            name=name,
            version=None if name else options.model,
            through=options.through,
            asked=asked,
            settings=settings,
            where=where,
            again=options.again,
        )
        for name in options.name or (None,)
    ]
    results = analyze_models(models, info)
    for result in results:
        if "untracked" in result:
            info(f"{result['run']}: could not be kept in MLflow ({result['untracked']})")
    if options.results is not None:
        from concord.studies.tables import write_analyses

        info(f"kept in {write_analyses(results, _command(words[0], rest, options), options.results)}")
    if len(results) == 1:
        if not as_json:
            _print(results[0])
        return results[0]
    methods = by_method(results)
    figures = draw_runs(results, Path(where.run.output) / "reports" / job.name / "consistency")
    if not as_json:
        _print_methods(results, methods)
        for name, path in figures.items():
            print(f"figure    {name}: {path}")
    return {"job": job.name, "runs": results, "methods": methods, "figures": figures}


def _command(job: str, words: Sequence[str], options: AnalyzeOptions) -> str:
    """The command as it is recorded: without the options that say where it ran and where its results went."""
    given = given_options(AnalyzeOptions, words) - _WHERE
    values = {name: value for name, value in option_values(options).items() if name in given}
    return shlex.join(["concord", "analyze", *map(redact, [job, *as_words(values)])])


def _check(options: AnalyzeOptions) -> None:
    if bool(options.name) == bool(options.model):
        raise InputError("analyze: of what? give --name RUN, or several, or --model NAME@champion; concord runs lists")
    if options.through is not None and len(options.name) != 1:
        raise ArgumentError("through", options.through, "leads from one run to another; give one --name")
    if options.through is not None and "slices" not in options.parts:
        raise ArgumentError("through", options.through, "is for slices, which --parts does not name")


def _print(result: Mapping[str, Any]) -> None:
    found, null = result["inconsistency"], result["inconsistency"].get("null", {})
    rows = []
    for place, epsilon in enumerate(result["epsilon"]):
        row = [f"{epsilon:g}"]
        for of in (found, null):
            quadratic, bound = of.get("quadratic"), of.get("bound")
            row.append(" to ".join(format_value(end) for end in quadratic[place]) if quadratic else "")
            row.append(format_value(bound[place]) if bound else "")
        rows.append(row)
    pairs = f"{len(result['pairs'])} of {result['possible_pairs']} pairs"
    if any(any(row[1:]) for row in rows):
        table(["ε", "I^ε, quadratic", "at least, true losses", "null, quadratic", "null, true losses"], rows)
    print(f"run       {result['run']}  (MLflow run {result['run_id']})")
    print(f"measured  {result['environments']} environments, {pairs}, ρ = {result['absolute_radius']:.4g}")
    if not all(pair["converged"] for pair in result["pairs"]):
        print("note      some ratios of curvatures have not converged; they may be larger")
    _print_signs(result)
    norms = sorted(result["gradient_norms"].values())
    print(f"gradients norms {norms[0]:.3g} to {norms[-1]:.3g}; where they are not 0, I^ε does not vanish with ε")
    for name, path in result["figures"].items():
        print(f"figure    {name}: {path}")
    print(f"seconds   {result['seconds']:.1f}")


def _print_signs(result: Mapping[str, Any]) -> None:
    if "signs" in result:
        signs = result["signs"]
        by = ", ".join(
            f"{of} {signs[key]['agreement']:.3f}"
            for key, of in (("environments", "here"), ("null", "null"), ("chance", "fair coins"))
            if key in signs
        )
        print(f"signs     agreement: {by}")
    if "log_ratio" in result:
        ratio = result["log_ratio"]
        print(f"curvature log of arithmetic over geometric mean: {ratio['environments']:.3f}, null {ratio['null']:.3f}")


def _print_methods(results: Sequence[Mapping[str, Any]], methods: Sequence[Mapping[str, Any]]) -> None:
    shown = [name for name in methods[0] if name not in ("method", "seeds", "ilc")]
    rows = [[name.replace("_", " "), *(_cell(row.get(name)) for row in methods)] for name in shown]
    table(["", *(f"{row['method']} ({row['seeds']})" for row in methods)], rows)
    for row in methods:
        for each in row["ilc"]:
            parts = [f"{name} {_cell(each[name])}" for name in ("bound", "quadratic") if name in each]
            print(f"ILC       {row['method']}, ε {each['epsilon']:g}: at most {', '.join(parts)}")
    print(f"runs      {', '.join(str(result['run']) for result in results)}")


def _cell(spread: Mapping[str, Any] | None) -> str:
    if spread is None:
        return ""
    more = "" if spread["std"] is None else f" ± {format_value(spread['std'])}"
    return f"{format_value(spread['mean'])}{more}"
