"""The comparisons of Fig. 6, 14 and 15 of the AND-mask paper."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from concord.training import Comparison
from concord_jobs.synthetic.figures import box_figure, curves_figure, environments_of_runs, robustness_figure

columns = {"o.o.d.": "ood_accuracy", "training": "train_accuracy", "held out": "held_out_accuracy"}
AVERAGE = {"aggregator": "mean", "l1": 0.0}
PAPER = {"o.o.d.": "about 1.0"}
CHANCE = {"o.o.d.": "chance"}
# Every method has the job's settings (which include the paper's network, batches and learning rate) and its own
# options, from the middle of the ranges of Tables 1 and 2.
METHODS = {
    "and-mask": {},
    "plain": AVERAGE,
    "dropout": {**AVERAGE, "dropout": 0.5},
    "l1": {**AVERAGE, "l1": 1e-5},
    "l2": {**AVERAGE, "l2": 1e-4},
    "batch-norm": {**AVERAGE, "batch_norm": True},
    "irm": {**AVERAGE, "objective": "irm", "penalty_weight": 100.0, "penalty_warmup": 0.02},
    "dann": {**AVERAGE, "objective": "dann", "representation": "4"},
}
COUNTS = (2, 8, 32, 128, 512, 1024)
ROBUSTNESS = {"o.o.d.": "ood_accuracy", "validation": "validation_accuracy", "held out": "held_out_accuracy"}
DIFFICULTIES = ((0.1, 1.0), (1.0, 2.0, 3.0))  # variances of the shortcuts, and revolutions
ENVIRONMENTS = (4, 7, 10, 20, 32, 50, 100)
Rows = dict[str, dict[str, Any]]
Methods = Mapping[str, Mapping[str, Any]]  # given options; all others have the job's defaults
DEFAULTS: Methods = {"defaults": {}}
AND_MASK: Methods = {"and-mask": {"aggregator": "and-mask"}}
MEAN: Methods = {"mean": {"aggregator": "mean"}}
# Methods that give environments more votes, or require more agreement.
VOTES: Methods = {
    "all agree": {"aggregator": "and-mask", "threshold": 1.0},
    "momentum by environment": {"aggregator": "and-mask", "environment_momentum": 0.9},
    "4 steps an update": {"aggregator": "and-mask", "steps_per_update": 4},
    "geometric-mean": {"aggregator": "geometric-mean"},
    "sand-mask": {"aggregator": "sand-mask"},
    "t-mask": {"aggregator": "t-mask", "environment_momentum": 0.9},
}
# Chosen by validation environments of seeds 211 to 215, which no table has.
CHOSEN: Methods = {**AND_MASK, "t-mask": {**VOTES["t-mask"], "significance": 1e-5, "lr": 5e-3}}
LONGER: Methods = {f"{method}, twice the epochs": {**given, "epochs": 188} for method, given in CHOSEN.items()}
# "L1 or L2 regularization gave the most robust results overall", "often found it helpful to rescale" (3.1, B.3).
REGULARIZED: Methods = {
    f"{penalty}{rescaled}": {"l1": 0.0, **given, **changes}
    for rescaled, changes in (("", {}), (", no rescaling", {"rescale": False}))
    for penalty, given in {
        "none": {},
        **{f"L1, {way}": {"l1": 1e-5, "regularization": way} for way in ("coupled", "decoupled")},
        **{f"L2, {way}": {"l2": 1e-4, "regularization": way} for way in ("coupled", "decoupled")},
    }.items()
}
# τ 1 and the other settings that the paper found best (B.3.1).
PRINTED: dict[str, Any] = {"threshold": 1.0, "l1": 0.0, "l2": 1e-4}
# The example of the authors' code: fewer environments and shortcuts, larger batches, ten times the L2 penalty, and one
# fall of the learning rate, where the paper has two (B.3).
PUBLISHED: dict[str, Any] = {
    "aggregator": "and-mask",
    "threshold": 1.0,
    "l1": 0.0,
    "l2": 1e-3,
    "environments": 16,
    "examples": 1024,
    "shortcut_dimensions": 16,
    "shortcut_scale": 1.0,
    "batch_size": 256,
    "epochs": 150,
    "milestones": (0.75,),
}


def on(methods: Methods, counts: Iterable[int], variance: float, revolutions: float) -> Rows:
    """A row for each method and number of environments, on these data."""
    data = {"shortcut_scale": variance**0.5, "revolutions": revolutions, "evaluations": 1}
    difficulty = f"variance {variance:g}, {revolutions:g} rev."
    rows = {}
    for count, (method, given) in itertools.product(counts, methods.items()):
        rows[f"{method}, {count} environments, {difficulty}"] = {**given, **data, "environments": count}
    return rows


def counted(aggregator: str, environments: int) -> dict[str, Any]:
    """A row of Fig. 15: 4096 examples a step, but at most an environment's 1280.

    With 8 environments or more the paper's 3000 / D epochs are then about 940 steps.
    """
    batch_size = max(1, min(4096 // environments, 1280))
    return {"aggregator": aggregator, "environments": environments, "batch_size": batch_size, "evaluations": 1}


def grouped(aggregator: str, environments: int) -> dict[str, Any]:
    """A row whose step has a group of at most 32 environments, as in the authors' code."""
    per_step = 32 if environments > 32 else 0
    row = counted(aggregator, per_step or environments)
    return {**row, "environments": environments, "environments_per_step": per_step}


def robustness(title: str, rows: Rows, figure: str = "", seeds: int = 5) -> Comparison:
    """A table, and with ``figure`` a figure, of accuracies with seeds that chose no setting."""
    figures = {figure: robustness_figure} if figure else {}
    return Comparison(rows, seeds=seeds, first_seed=101, columns=ROBUSTNESS, figures=figures, title=title)


comparisons = {
    "fig-6": Comparison(
        METHODS,
        seeds=50,
        columns=columns,
        paper={method: PAPER if method == "and-mask" else CHANCE for method in METHODS if method != "irm"},
        figures={"fig-6": box_figure, "fig-14": curves_figure},
        title="Fig. 6 and 14: all methods",
    ),
    "baseline": Comparison(
        {"and-mask": {}, "average": {"aggregator": "mean"}},
        seeds=10,
        columns=columns,
        paper={"and-mask": PAPER, "average": CHANCE},
        title="the AND-mask and the average, all else alike",
    ),
    "papers-best": Comparison(
        {
            "and-mask": PRINTED,
            "and-mask, variance 1": {**PRINTED, "shortcut_scale": 1.0},
            # As many environments agree at a step as in the authors' code.
            "and-mask, 16 a step": {**PRINTED, "environments_per_step": 16},
            "and-mask, code": PUBLISHED,
            "and-mask, code, two falls": {**PUBLISHED, "milestones": (0.5, 0.75)},
            "and-mask, code, one output": {**PUBLISHED, "one_logit": True},
            "and-mask, code, two falls, one output": {**PUBLISHED, "milestones": (0.5, 0.75), "one_logit": True},
        },
        seeds=10,
        columns=columns,
        paper={"and-mask": PAPER},
        title="the paper's own best setting, and that of its authors' code",
    ),
    "regularizers": Comparison(
        REGULARIZED,
        seeds=5,
        columns=columns,
        title="L1 and L2 with the AND-mask, in the gradient or apart from it, with and without rescaling",
    ),
    "thresholds": Comparison(
        {f"τ {threshold:g}": {"threshold": threshold} for threshold in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)},
        seeds=3,
        columns=columns,
        title="the AND-mask by its threshold",
    ),
    "fig-15": Comparison(
        {
            **{
                f"{rule}, {count} environments": counted(rule, count)
                for rule in ("and-mask", "mean")
                for count in COUNTS
            },
            # The signs of 8 or 4 examples are noisy, and too few agree for the default τ; these τ were chosen by the
            # training accuracy of seed 211, which no table has.
            **{
                f"smaller τ, {count} environments": {**counted("and-mask", count), "threshold": threshold}
                for count, threshold in ((512, 0.2), (1024, 0.15))
            },
            **{
                f"{rule}, 32 a step, {count} environments": grouped(rule, count)
                for count in (512, 1024)
                for rule in ("and-mask", "mean")
            },
            # The largest L2 of the paper's range, chosen on the test of seed 211 with 1024 environments (oracle).
            **{
                f"mean, L2, {count} environments": {**grouped("mean", count), "l1": 0.0, "l2": 1e-3} for count in COUNTS
            },
        },
        seeds=5,
        columns={"o.o.d.": "ood_accuracy", "training": "train_accuracy"},
        figures={"fig-15": environments_of_runs},
        title="accuracy by the number of environments",
    ),
    "difficulty": robustness("32 environments with shortcuts of variance 1", on({**CHOSEN, **LONGER}, (32,), 1.0, 3.0)),
    "few": robustness("the defaults where environments are few", on(DEFAULTS, ENVIRONMENTS[:3], 0.1, 3.0)),
    "between": robustness(
        "the defaults between 10 and 20 environments", on(DEFAULTS, range(11, 20), 0.1, 3.0), seeds=3
    ),
    "environments": robustness(
        "masks and the average, by the number of environments",
        on({**AND_MASK, **MEAN}, ENVIRONMENTS, 0.1, 2.0)
        | on(AND_MASK, ENVIRONMENTS, 0.1, 3.0)
        | on(DEFAULTS, ENVIRONMENTS[:3], 0.1, 3.0),
        figure="environments",
    ),
    "defaults": robustness("nothing given but the number of environments", on(DEFAULTS, ENVIRONMENTS, 0.1, 3.0)),
    "votes": robustness(
        "more votes or stricter ones, by the number of environments", on(VOTES, ENVIRONMENTS[1:4], 0.1, 3.0), "votes"
    ),
    "robustness": robustness(
        "defaults, by number of environments, variance of the shortcuts and revolutions",
        {
            name: row
            for data in itertools.product(*DIFFICULTIES)
            for name, row in on({**DEFAULTS, **AND_MASK, **MEAN, **VOTES}, ENVIRONMENTS, *data).items()
        },
        figure="robustness",
    ),
}
