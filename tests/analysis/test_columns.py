"""Which columns of a table hold: votes, relations and their breaks, drifts, and a model's use of the columns."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp, spearmanr
from torch.nn.functional import cross_entropy

from concord.aggregation import chance_of
from concord.analysis.columns.figures import columns_figure
from concord.analysis.columns.relations import Columns, Votes, relations
from concord.analysis.columns.report import ColumnReport, as_json, broken_lines, relation_cells, use_cells
from concord.analysis.columns.use import use_of_columns
from concord.environments.collection import generator_for
from concord.environments.table import TableEnvironments, from_table
from concord.models.table_network import TableNetwork
from concord.storage.typed_json import require_type

SITES = {"a": 300, "b": 250, "c": 400, "d": 200, "e": 150, "f": 300, "last": 120}


def hospitals(seed: int = 0, **columns: Any) -> pd.DataFrame:
    """Rows of seven sites: ``steady`` means the same everywhere, ``marker`` the opposite at the last site."""
    random = np.random.default_rng(seed)
    site = np.repeat(list(SITES), list(SITES.values()))
    health, noise = random.normal(size=(2, len(site)))
    frame = pd.DataFrame(
        {
            "site": site,
            "steady": health + random.normal(size=len(site)),
            "marker": np.where(site == "last", -1, 1) * health + random.normal(size=len(site)),
            "noise": random.normal(size=len(site)),
            "rare": random.random(len(site)) < 0.1,
            "ward": random.choice(["in", "out", "day"], len(site), p=[0.6, 0.3, 0.1]),
            "died": np.where(health + 0.5 * noise > 0.5, "yes", "no"),
        }
    )
    return frame.assign(**columns)


def of(frame: pd.DataFrame, **options: Any) -> Columns:
    return relations(from_table(frame, environment="site", target="died", **options).table)


@given(st.integers(1, 60), st.integers(0, 60))
def test_the_chance_of_an_agreement_is_the_masks(environments: int, positive: int) -> None:
    positive = min(positive, environments)
    votes = Votes.count(np.array([1] * positive + [-1] * (environments - positive) + [0] * 3))
    assert (votes.of, votes.agree) == (environments, max(positive, environments - positive))
    threshold = (2 * votes.agree - environments) / environments
    assert votes.chance == pytest.approx(chance_of(threshold, environments))


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), levels=st.integers(3, 50), gaps=st.floats(0, 0.4), regression=st.booleans())
def test_a_relation_is_spearmans_correlation_inside_an_environment(
    seed: int, levels: int, gaps: float, regression: bool
) -> None:
    random = np.random.default_rng(seed)
    rows = 90
    x = random.integers(0, levels, rows).astype(float)
    y = x + random.normal(size=rows) * levels
    x[random.random(rows) < gaps] = np.nan
    frame = pd.DataFrame({"site": ["a", "b", "c"] * 30, "x": x, "died": y if regression else (y > np.median(y))})
    term = next(each for each in of(frame).terms["x"] if each.part == "")
    for place, name in enumerate("abc"):
        own = frame[(frame.site == name) & frame.x.notna()]
        assert term.rows[place] == len(own)
        if np.isnan(term.values[place]):  # about five rows have to differ from the most common value
            assert min(len(own) - each.value_counts().max() for each in (own.x, own.died)) < 6
        else:
            assert term.values[place] == pytest.approx(spearmanr(own.x, own.died).statistic, abs=1e-9)


def test_signs_of_noise_seldom_vote_and_tiny_environments_never_do() -> None:
    votes = [term.signs for seed in range(10) for name in ("noise", "rare", "ward")
             for term in of(hospitals(seed)).terms[name]]  # fmt: skip
    assert np.mean(np.concatenate(votes) != 0) < 0.06
    tiny = pd.DataFrame({"site": np.repeat(["a", "b", "c"], [9, 9, 40]), "x": range(58), "died": [0, 1] * 29})
    tiny["x"] = tiny.x + 1000 * tiny.died
    (term,) = of(tiny).terms["x"]
    assert np.isnan(term.values[:2]).all()
    assert term.signs.tolist() == [0, 0, 1]


def test_what_turns_round_is_named_and_what_holds_is_not() -> None:
    named = [[term.column for term in of(hospitals(seed), test=["last"]).broken] for seed in range(20)]
    assert all(found[:1] == ["marker"] for found in named)
    assert sum(len(found) > 1 for found in named) <= 1
    columns = of(hospitals(), test=["last"])
    assert columns.shown["marker"].votes == Votes(6, 6, 1)  # the test has no vote
    assert columns.shown["marker"].votes.chance == chance_of(1.0, 6)
    (line,) = broken_lines(as_json(columns), dict(zip(columns.environments, columns.purposes, strict=True)))
    assert line.startswith("breaks: marker turns round: last (test) -0.")
    assert line.endswith(" in the others (with class yes)")


def test_values_that_are_missing_not_at_random_are_a_term_of_their_own() -> None:
    frame, random = hospitals(), np.random.default_rng(1)
    hides = np.where(frame.site.isin(["b", "c"]) & (frame.died == "no"), 0.6, 0.05)
    columns = of(frame.assign(steady=frame.steady.mask(random.random(len(frame)) < hides)))
    gaps = next(term for term in columns.terms["steady"] if term.part == "missing")
    assert gaps.signs[1:3].tolist() == [-1, -1]
    assert columns.shown["steady"] is gaps
    assert "steady missing" in [term.label for term in columns.broken]
    assert columns.missing["steady"][1] > 0.2 > columns.missing["steady"][0]


def test_drift_is_kolmogorovs_distance_where_it_is_more_than_noise() -> None:
    frame = hospitals()
    frame.loc[frame.site == "d", "steady"] += 2
    columns = of(frame)
    own = ks_2samp(frame.steady[frame.site == "d"], frame.steady).statistic
    assert columns.drift["steady"][3] == pytest.approx(own)
    assert columns.drift["noise"].tolist() == [0] * 7


def test_several_classes_speak_for_one_of_them_and_classes_in_order_are_numbers() -> None:
    frame = hospitals()
    ends = np.where(frame.steady > 1, "gone", np.where(frame.noise > 0, "home", "here"))
    assert of(frame.assign(died=ends)).shown["steady"].target == "gone"
    assert of(frame.assign(died=frame.steady.round().clip(-2, 2).astype(int))).shown["steady"].target == ""


class Known(TableNetwork):
    """A linear network with given weights: of each numeric column's value, and of levels."""

    def __init__(self, environments: TableEnvironments, weights: Mapping[str, float], level: float) -> None:
        encoder = environments.encoder
        assert encoder is not None
        super().__init__(*encoder.widths, outputs=2, hidden_layers=0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()
            for place, column in enumerate(encoder.numeric):
                self.rest.weight[1, 2 * place] = weights.get(column.name, 0.0)  # type: ignore[index, union-attr]
            self.embeddings[0].weight[2 + encoder.categories[0].levels.index("in"), 1] = level  # type: ignore[operator]


def test_a_models_use_is_what_its_weights_say() -> None:
    environments = from_table(hospitals(), environment="site", target="died", test=["last"]).fitted(0, 0)
    columns = relations(environments.table)
    columns.shown["ward"] = next(term for term in columns.terms["ward"] if term.part == "= in")
    model = Known(environments, {"marker": 2.0, "steady": 0.5}, level=0.7).eval()
    rows = {name: (environments[name].inputs, environments[name].targets) for name in columns.environments}
    assert environments.encoder is not None
    use = use_of_columns(model, cross_entropy, rows, environments.encoder, ("no", "yes"), columns)
    assert use.gradient["marker"] == pytest.approx(np.full(7, 2.0))
    assert use.gradient["noise"] == pytest.approx(np.zeros(7))
    elsewhere = [(hospitals().ward[hospitals().site == name] != "in").mean() for name in columns.environments]
    assert use.gradient["ward"] == pytest.approx(0.7 * np.array(elsewhere), rel=1e-5)
    assert use.shuffled["noise"] == pytest.approx(np.zeros(7))
    assert use.helps["marker"].tolist() == [1, 1, 1, 1, 1, 1, -1]  # at the last site it misleads
    assert use.helps["noise"].tolist() == [0] * 7

    found = as_json(columns, use)
    lines = list(broken_lines(found, dict(zip(columns.environments, columns.purposes, strict=True))))
    assert "; it misleads the model, whose loss falls when it is shuffled: last -" in lines[0]
    marker = next(each for each in found if each["column"] == "marker")
    assert use_cells(marker)["helps"] == "6 of 7"
    assert use_cells(marker)["gradient"] == "+2.00"


def test_what_a_shuffled_column_costs_is_the_mean_over_rows_of_any_number() -> None:
    environments = from_table(hospitals(), environment="site", target="died", test=["last"]).fitted(0, 0)
    columns, encoder = relations(environments.table), environments.encoder
    assert encoder is not None
    model = Known(environments, {"marker": 2.0}, level=0.7).eval()
    rows = {name: (environments[name].inputs[:101], environments[name].targets[:101]) for name in columns.environments}
    use = use_of_columns(model, cross_entropy, rows, encoder, ("no", "yes"), columns)
    place = 2 * [each.name for each in encoder.numeric].index("marker")
    for (name, (inputs, targets)), cost in zip(rows.items(), use.shuffled["marker"], strict=True):
        shuffled = inputs.clone()
        order = torch.randperm(101, generator=generator_for(0, name, "marker"))
        shuffled[:, place : place + 2] = inputs[order, place : place + 2]
        losses = [float(cross_entropy(model(each), targets)) for each in (inputs, shuffled)]
        assert cost == pytest.approx(losses[1] - losses[0])


def test_a_report_is_json_of_its_type_and_cells_say_what_is_not_known() -> None:
    site_wide = hospitals().site.map({name: number for number, name in enumerate(SITES)})
    found = as_json(of(hospitals(beds=site_wide)))
    for each in json.loads(json.dumps(found, allow_nan=False)):
        require_type(each, ColumnReport)
    beds = relation_cells(next(each for each in found if each["column"] == "beds"))
    assert (beds["with the target"], beds["agree"]) == ("constant, or few rows", "–")


@pytest.mark.parametrize(("environments", "columns"), [(4, 5), (160, 40), (50, 45)])
def test_a_picture_of_any_size_shows_the_columns_that_break_first(environments: int, columns: int) -> None:
    random = np.random.default_rng(0)
    site = np.repeat([f"a hospital with a long name, number {number}" for number in range(environments)], 30)
    died = random.integers(0, 2, len(site))
    values = {f"column {number} with a long name": random.normal(size=len(site)) for number in range(columns - 1)}
    turned = np.where(site == site[0], -9, 9) * died + random.normal(size=len(site))
    found = of(pd.DataFrame({"site": site, **values, "turned": turned, "died": died}), test=[site[-1]])
    figure = columns_figure(as_json(found), dict(zip(found.environments, found.purposes, strict=True)), "a run")
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[0] == "turned"
    assert len(labels) == min(columns, 40)
