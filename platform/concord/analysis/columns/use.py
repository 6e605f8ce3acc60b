"""What a trained model makes of each column of a table: its loss when the column is shuffled, and its gradient."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import t
from torch import Tensor

from concord.analysis.columns.relations import LEVEL, Columns, Numbers, Term
from concord.analysis.consistency.environment_losses import EnvironmentLosses
from concord.environments.collection import generator_for
from concord.environments.table_encoder import FIRST_LEVEL, TableEncoder
from concord.gradients.risk import Loss, Risk

_BLOCKS = 10  # of an environment's rows, each with a loss of its own, for the interval


@dataclass(frozen=True)
class Use:
    """A model's use of the columns by environment.

    Attributes:
        shuffled: the increase of the loss when the column's values are shuffled among an environment's rows
            ``(environments,)``, by column.
        helps: its sign ``(environments,)``, by column; 0 where it may be noise, that is where 0 is in the 95 % interval
            over ten blocks of rows.
        gradient: the mean change of the output by one deviation of a number, or as a level is set ``(environments,)``,
            by the shown term of the column: of a number, or the log odds of a class.
    """

    shuffled: dict[str, Numbers]
    helps: dict[str, Numbers]
    gradient: dict[str, Numbers]


def use_of_columns(
    model: torch.nn.Module,
    risk: Loss | Risk,
    environments: Mapping[str, tuple[Tensor, Tensor]],
    encoder: TableEncoder,
    classes: Sequence[str],
    columns: Columns,
    seed: int = 0,
    advance: Callable[[int, int], None] = lambda *_: None,
) -> Use:
    """A model's use of a table's columns.

    Args:
        model: takes encoded rows; on the device of all computations.
        risk: the loss or the risk.
        environments: encoded rows and targets of each environment, in the order of ``columns``.
        encoder: of the rows.
        classes: the names of the classes; empty for a number.
        columns: the columns with their terms.
        seed: of the shuffling.
        advance: called after each column with the number of finished columns and of all.
    """
    places = _places(encoder)
    before = {name: _losses(model, risk, *rows) for name, rows in environments.items()}
    found = Use({}, {}, {})
    for done, (column, own) in enumerate(places.items(), 1):
        pairs = []
        for name, (inputs, targets) in environments.items():
            order = torch.randperm(len(inputs), generator=generator_for(seed, name, column))
            shuffled = inputs.clone()
            shuffled[:, own] = inputs[order][:, own]
            pairs.append(_mean_and_sign(_losses(model, risk, shuffled, targets) - before[name]))
        found.shuffled[column], found.helps[column] = np.array(pairs).T
        if (term := columns.shown.get(column)) is not None:
            slopes = [_slope(model, inputs, term, encoder, classes) for inputs, _ in environments.values()]
            found.gradient[column] = np.array(slopes)
        advance(done, len(places))
    return found


def _places(encoder: TableEncoder) -> dict[str, list[int]]:
    """The inputs of each column."""
    places: dict[str, list[int]] = {}
    for number, each in enumerate(encoder.numeric):
        places.setdefault(each.name, []).extend((2 * number, 2 * number + 1))
    first, _ = encoder.widths
    return places | {each.name: [first + number] for number, each in enumerate(encoder.categories)}


def _losses(model: torch.nn.Module, risk: Loss | Risk, inputs: Tensor, targets: Tensor) -> Numbers:
    """The losses of blocks of the rows."""
    size = -(-len(inputs) // _BLOCKS)
    pieces = zip(inputs.split(size), targets.split(size), strict=True)
    blocks = {str(number): piece for number, piece in enumerate(pieces)}
    return np.array(list(EnvironmentLosses(model, risk, blocks).at_solution.values()))


def _mean_and_sign(differences: Numbers) -> tuple[float, float]:
    mean, count = float(differences.mean()), len(differences)
    if count < 2:
        return mean, 0.0
    half = float(t.isf(LEVEL / 2, count - 1) * differences.std(ddof=1) / np.sqrt(count))
    return mean, float(np.sign(mean)) if abs(mean) > half else 0.0


def _slope(model: torch.nn.Module, inputs: Tensor, term: Term, encoder: TableEncoder, classes: Sequence[str]) -> float:
    """The mean change of the output by the term's input, in these rows."""
    own = _places(encoder)[term.column]
    rows = inputs.to(next(model.parameters()).device)
    category = next((each for each in encoder.categories if each.name == term.column), None)
    if category is not None:
        level = term.part.removeprefix("= ")
        changed = rows.clone()
        changed[:, own] = FIRST_LEVEL + category.levels.index(level) if level in category.levels else 0
        with torch.no_grad():
            return float((_score(model(changed), term, classes) - _score(model(rows), term, classes)).mean())
    parts = [each.part for each in encoder.numeric if each.name == term.column]
    place = own[1] if term.part == "missing" else own[2 * parts.index(term.part)]
    rows = rows.requires_grad_()
    (gradient,) = torch.autograd.grad(_score(model(rows), term, classes).sum(), rows)
    return float(gradient[:, place].mean())


def _score(outputs: Tensor, term: Term, classes: Sequence[str]) -> Tensor:
    """The output that a term speaks for: a number, the mean of classes in order, or the log odds of a class."""
    outputs = outputs.reshape(len(outputs), -1)
    if outputs.shape[1] == 1:
        return outputs[:, 0]
    if not term.target:
        return outputs.softmax(1) @ torch.tensor([float(each) for each in classes]).to(outputs)
    number = list(classes).index(term.target)
    others = torch.cat([outputs[:, :number], outputs[:, number + 1 :]], dim=1)
    return outputs[:, number] - others.logsumexp(1)
