"""What a trained model makes of each column of a table: its loss when the column is shuffled, and its gradient."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import t
from torch import Tensor

from concord.analysis.columns.relations import LEVEL, Columns, Numbers, Term
from concord.environments.collection import generator_for
from concord.environments.table_encoder import FIRST_LEVEL, MISSING, OTHER, TableEncoder
from concord.gradients.risk import Loss

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
    loss: Loss,
    environments: Mapping[str, tuple[Tensor, Tensor]],
    encoder: TableEncoder,
    classes: Sequence[str],
    columns: Columns,
    seed: int = 0,
    advance: Callable[[int, int], None] = lambda *_: None,
) -> Use:
    """A model's use of a table's columns.

    Args:
        model: takes encoded rows; in evaluation mode, on the device of all computations.
        loss: of outputs and targets, a mean.
        environments: encoded rows and targets of each environment, in the order of ``columns``.
        encoder: of the rows.
        classes: the names of the classes; empty for a number.
        columns: the columns with their terms.
        seed: of the shuffling.
        advance: called after each environment with the number of finished ones and of all.
    """
    places, device = _places(encoder), next(model.parameters()).device
    shown = {name: columns.shown[name] for name in places if name in columns.shown}
    levels = {name: code for name, term in shown.items() if (code := _code(term, encoder)) is not None}
    numeric = {name: _place(term, encoder) for name, term in shown.items() if name not in levels}
    found: list[dict[str, tuple[float, float, float]]] = []
    for name, (inputs, targets) in environments.items():
        rows, right = inputs.to(device), targets.to(device)
        changed = [rows]
        for column, own in places.items():
            order = torch.randperm(len(rows), generator=generator_for(seed, name, column)).to(device)
            changed.append(_with(rows, own, rows[order][:, own]))
        changed += [_with(rows, places[column], code) for column, code in levels.items()]
        with torch.no_grad():
            before, *after = model(torch.cat(changed)).split(len(rows))
        usual, of_blocks = float(loss(before, right)), _losses(loss, before, right)
        moved = {
            column: _score(outputs, shown[column], classes) - _score(before, shown[column], classes)
            for column, outputs in zip(levels, after[len(places) :], strict=True)
        }
        slopes = {column: float(each.mean()) for column, each in moved.items()}
        gradients = {
            target: _gradient(model, rows, next(term for term in shown.values() if term.target == target), classes)
            for target in {shown[column].target for column in numeric}
        }
        slopes |= {column: float(gradients[shown[column].target][place]) for column, place in numeric.items()}
        found.append(
            {
                column: (
                    float(loss(outputs, right)) - usual,
                    _sign(_losses(loss, outputs, right) - of_blocks),
                    slopes.get(column, np.nan),
                )
                for column, outputs in zip(places, after, strict=False)
            }
        )
        advance(len(found), len(environments))
    by_column = {column: np.array([each[column] for each in found]).T for column in places}
    return Use(
        {column: values[0] for column, values in by_column.items()},
        {column: values[1] for column, values in by_column.items()},
        {column: by_column[column][2] for column in shown},
    )


def _places(encoder: TableEncoder) -> dict[str, list[int]]:
    """The inputs of each column."""
    places: dict[str, list[int]] = {}
    for number, each in enumerate(encoder.numeric):
        places.setdefault(each.name, []).extend((2 * number, 2 * number + 1))
    first, _ = encoder.widths
    return places | {each.name: [first + number] for number, each in enumerate(encoder.categories)}


def _place(term: Term, encoder: TableEncoder) -> int:
    """The input of a numeric column's term."""
    own = _places(encoder)[term.column]
    parts = [each.part for each in encoder.numeric if each.name == term.column]
    return own[1] if term.part == "missing" else own[2 * parts.index(term.part)]


def _code(term: Term, encoder: TableEncoder) -> int | None:
    """The code of a category's term; None for a number."""
    levels = next((each.levels for each in encoder.categories if each.name == term.column), None)
    if levels is None:
        return None
    level = term.part.removeprefix("= ")
    return FIRST_LEVEL + levels.index(level) if level in levels else MISSING if term.part == "missing" else OTHER


def _with(rows: Tensor, places: list[int], values: Tensor | int) -> Tensor:
    changed = rows.clone()
    changed[:, places] = values if isinstance(values, Tensor) else float(values)
    return changed


def _losses(loss: Loss, outputs: Tensor, targets: Tensor) -> Numbers:
    """The losses of blocks of the rows, of which none is much smaller than the others."""
    blocks = zip(*(each.tensor_split(min(_BLOCKS, len(each))) for each in (outputs, targets)), strict=True)
    return np.array([float(loss(*block)) for block in blocks])


def _gradient(model: torch.nn.Module, rows: Tensor, term: Term, classes: Sequence[str]) -> Tensor:
    """The mean gradient of a term's output by the inputs, ``(inputs,)``."""
    rows = rows.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(_score(model(rows), term, classes).sum(), rows)
    return gradient.mean(0)


def _sign(differences: Numbers) -> float:
    mean, count = float(differences.mean()), len(differences)
    if count < 2:
        return 0.0
    half = float(t.isf(LEVEL / 2, count - 1) * differences.std(ddof=1) / np.sqrt(count))
    return float(np.sign(mean)) if abs(mean) > half else 0.0


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
