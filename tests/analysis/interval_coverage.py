"""Coverage of the intervals, and false verdicts, in simulated predictions whose truth is known.

``python tests/analysis/interval_coverage.py`` prints all numbers; the slow tests hold them to limits.
"""

import sys
from collections.abc import Callable, Iterator

import numpy as np
from scipy import special, stats

from concord.analysis.intervals import Estimate, Scale, Values, area_under_curve, mean_of_rows, next_interval
from concord.analysis.uncertainty import Verdict, verdict

Random = np.random.Generator
_SHARED = 0.3  # of the variance of a row's score within a cluster, or between seeds


def covers(make: Callable[[Random], Estimate | None], scale: Scale, truth: float, sets: int) -> float:
    """The share of data sets whose interval has the truth."""
    random, found = np.random.default_rng(0), []
    for _ in range(sets):
        estimate = make(random)
        interval = None if estimate is None else estimate.interval(scale)
        if interval is not None:
            found.append(interval.low <= truth <= interval.high)
    return float(np.mean(found))


def grouped(random: Random, rows: int, clusters: int) -> tuple[Values, Values]:
    """Standard normal numbers of rows, correlated within clusters of different size."""
    codes = np.unique(random.integers(0, clusters, rows), return_inverse=True)[1]
    shared = random.normal(size=clusters)[codes]
    return _SHARED**0.5 * shared + (1 - _SHARED) ** 0.5 * random.normal(size=rows), codes


def right_rows(rows: int, share: float, clusters: int = 0, seeds: int = 1) -> Callable[[Random], Estimate]:
    """Rows of which this share is predicted rightly; of several seeds the mean."""

    def make(random: Random) -> Estimate:
        if clusters:
            scores, codes = grouped(random, rows, clusters)
            return mean_of_rows((scores < special.ndtri(share)).astype(float), codes)
        noise = _SHARED**0.5 * random.normal(size=(seeds, rows))
        scores = (1 - _SHARED) ** 0.5 * random.normal(size=rows) + noise
        return mean_of_rows((scores < special.ndtri(share)).mean(0))

    return make


def squared_errors(rows: int, clusters: int = 0, freedom: float = 0) -> Callable[[Random], Estimate]:
    """Squared normal errors, or of Student's t with this freedom; the mean is 1, or freedom / (freedom - 2)."""

    def make(random: Random) -> Estimate:
        if clusters:
            errors, codes = grouped(random, rows, clusters)
            return mean_of_rows(np.square(errors), codes)
        errors = random.standard_t(freedom, rows) if freedom else random.normal(size=rows)
        return mean_of_rows(np.square(errors))

    return make


def two_classes(positive: int, negative: int, area: float, clusters: int = 0) -> Callable[[Random], Estimate | None]:
    """Scores of two classes with this area under the curve."""
    apart, rows = float(special.ndtri(area)) * 2**0.5, positive + negative

    def make(random: Random) -> Estimate | None:
        if clusters:
            noise, codes = grouped(random, rows, clusters)
            truth = random.random(rows) < positive / rows
            return area_under_curve((noise + apart * truth)[None], truth, codes)
        truth = np.arange(rows) < positive
        return area_under_curve((random.normal(size=rows) + apart * truth)[None], truth)

    return make


def next_covers(environments: int, between: float, sets: int, rows: int = 200) -> float:
    """The share of data sets whose prediction interval has the next environment's accuracy."""
    random, found = np.random.default_rng(0), []
    for _ in range(sets):
        share = special.expit(1.5 + between * random.normal(size=environments + 1))
        values = random.binomial(rows, share) / rows
        known = next_interval(values[:-1].tolist(), "share", [float(rows)] * environments)
        assert known is not None
        found.append(known[0].low <= values[-1] <= known[0].high)
    return float(np.mean(found))


def verdicts(
    environments: int, methods: int, sets: int, gain: float = 0.0, apart: float = 0.4, rows: int = 100
) -> Iterator[Verdict]:
    """Verdicts over methods of which the last is better by ``gain`` log-odds in the mean environment.

    Methods differ in each environment by ``apart`` log-odds and share the difficulty of rows, of which there are 0.5 to
    2 times ``rows``.
    """
    random = np.random.default_rng(0)
    names = [f"method {at}" for at in range(methods)]
    for _ in range(sets):
        values: dict[str, dict[str, list[float]]] = {name: {} for name in names}
        estimates: dict[str, dict[str, Estimate]] = {name: {} for name in names}
        for place in range(environments):
            count = int(rows * random.uniform(0.5, 2))
            base, difficulty = 1.2 + 0.5 * random.normal(), random.logistic(size=count)
            for at, name in enumerate(names):
                better = gain if at == methods - 1 else 0.0
                level = base + better + apart * random.normal()
                own = np.where(random.random(count) < 0.5, difficulty, random.logistic(size=count))
                estimate = mean_of_rows((own < level).astype(float))
                values[name][str(place)], estimates[name][str(place)] = [estimate.value], estimate
        found = verdict(values, "accuracy", "max", estimates=estimates)
        assert found is not None
        yield found


def better(environments: int, methods: int, sets: int, gain: float = 0.0, apart: float = 0.4) -> float:
    """The share of data sets in which another method than the first is called better."""
    return float(
        np.mean([each.recommended != "method 0" for each in verdicts(environments, methods, sets, gain, apart)])
    )


def bca_covers(make: Callable[[Random], Values], truth: float, sets: int) -> float:
    """The share of data sets whose BCa interval of a mean, scipy's, has the truth; for comparison."""
    random, found = np.random.default_rng(0), []
    for _ in range(sets):
        numbers = make(random)
        if np.ptp(numbers) == 0:
            found.append(False)  # it has no width
            continue
        low, high = stats.bootstrap((numbers,), np.mean, n_resamples=999, rng=random).confidence_interval
        found.append(low <= truth <= high)
    return float(np.mean(found))


COVERAGE: dict[str, Callable[[int], float]] = {
    **{
        f"accuracy {share}, {rows} rows": lambda sets, rows=rows, share=share: covers(
            right_rows(rows, share), "share", share, sets
        )
        for rows in (60, 200, 1000)
        for share in (0.6, 0.8, 0.95)
    },
    "accuracy 0.8, 60 rows, 3 seeds": lambda sets: covers(right_rows(60, 0.8, seeds=3), "share", 0.8, sets),
    **{
        f"accuracy {share}, {rows} rows, {clusters} clusters": lambda sets, rows=rows, share=share, clusters=clusters: (
            covers(right_rows(rows, share, clusters), "share", share, sets)
        )
        for rows, clusters in ((60, 20), (200, 40), (1000, 100))
        for share in (0.8, 0.95)
    },
    **{
        f"mse, {rows} rows": lambda sets, rows=rows: covers(squared_errors(rows), "positive", 1.0, sets)
        for rows in (60, 200, 1000)
    },
    "mse of heavy tails (t, 6 df), 200 rows": lambda sets: covers(
        squared_errors(200, freedom=6), "positive", 1.5, sets
    ),
    **{
        f"mse, {rows} rows, {clusters} clusters": lambda sets, rows=rows, clusters=clusters: covers(
            squared_errors(rows, clusters), "positive", 1.0, sets
        )
        for rows, clusters in ((60, 20), (200, 40), (1000, 100))
    },
    **{
        f"auc {area}, {positive} of {rows} rows positive": lambda sets, rows=rows, positive=positive, area=area: covers(
            two_classes(positive, rows - positive, area), "bounded", area, sets
        )
        for rows, positive in ((60, 5), (60, 20), (200, 20), (1000, 100))
        for area in (0.6, 0.75, 0.9)
    },
    "auc 0.8, 200 rows, 40 clusters": lambda sets: covers(two_classes(60, 140, 0.8, 40), "bounded", 0.8, sets),
    **{
        f"next environment, {count} known, spread {between}": lambda sets, count=count, between=between: next_covers(
            count, between, sets
        )
        for count in (4, 7, 20, 60)
        for between in (0.2, 1.0)
    },
}
BCA: dict[str, Callable[[int], float]] = {
    "accuracy 0.95, 60 rows": lambda sets: bca_covers(
        lambda random: (random.random(60) < 0.95).astype(float), 0.95, sets
    ),
    "mse, 60 rows": lambda sets: bca_covers(lambda random: np.square(random.normal(size=60)), 1.0, sets),
}
FALSE_BETTER: dict[str, Callable[[int], float]] = {
    f"{methods} methods, {count} environments, apart {apart}": lambda sets, methods=methods, count=count, apart=apart: (
        better(count, methods, sets, apart=apart)
    )
    for methods, count in ((2, 4), (5, 4), (12, 7), (5, 20))
    for apart in (0.0, 0.4)
}
POWER: dict[str, Callable[[int], float]] = {
    f"5 methods, {count} environments, better by {gain} log-odds": lambda sets, count=count, gain=gain: better(
        count, 5, sets, gain
    )
    for count in (4, 7, 20)
    for gain in (0.5, 1.5)
}


if __name__ == "__main__":
    sets = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    for heading, cases in (("coverage", COVERAGE), ("BCa", BCA), ("false better", FALSE_BETTER), ("power", POWER)):
        for name, share in cases.items():
            print(f"| {heading} | {name} | {share(sets):.3f} |", flush=True)
