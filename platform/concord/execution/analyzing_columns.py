"""The part ``columns`` of an analysis: a trained model's table, and the model's use of its columns."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from typing_extensions import TypedDict

from concord.analysis.columns.report import ColumnReport, as_json
from concord.analysis.consistency.network import Settings
from concord.environments.collection import some_examples
from concord.errors import InputError
from concord.execution.trained_model import TrainedModel

if TYPE_CHECKING:
    from concord.environments.table import TableEnvironments


class TableReport(TypedDict):
    """The columns of a table as JSON, with the purposes of its environments."""

    purposes: dict[str, str]
    columns: list[ColumnReport]


def fitted_table(trained: TrainedModel) -> "TableEnvironments | None":
    """The environments of a model with a loss, if they are a table's, and not of texts alone."""
    from concord.environments.table import TableEnvironments  # with pandas, which takes a third of a second

    config = trained.config
    environments = trained.job.job.environments_of(config)
    if not isinstance(environments, TableEnvironments) or trained.job.job.loss is None:
        return None
    if not environments.table.kinds:
        return None
    return environments.fitted(config.data.held_out, config.run.seed)


def table_columns(
    trained: TrainedModel, settings: Settings, device: torch.device, advance: Callable[[int, int], None]
) -> TableReport:
    """The columns of a table in all environments, and the model's use of them."""
    from concord.analysis.columns.relations import relations
    from concord.analysis.columns.use import use_of_columns

    config, environments = trained.config, fitted_table(trained)
    assert environments is not None
    assert environments.encoder is not None
    frozen = environments.text is not None and not environments.text.train
    if frozen and isinstance(trained.model, torch.fx.GraphModule):  # a version's program, with the encoder inside
        raise InputError(
            f"--model: {trained.name} takes texts, and columns are measured behind their encoder; give --name"
        )
    columns = relations(environments.table)
    parts = environments.split(environments.train, config.data.held_out, config.run.seed)
    held_out = settings.split == "held-out"
    own = [each.held_out if held_out and each.held_out is not None else each.training for each in parts]
    others = environments.load(columns.environments[len(own) :])
    # Without weights: what is shown of columns counts rows alike.
    rows = {each.name: some_examples(each, settings.examples, settings.seed, "columns")[:2] for each in (*own, *others)}
    known = environments.table.classes or ()
    classes = tuple(map(str, range(len(known)) if environments.table.task == "ordinal" else known))
    model, loss = trained.model.to(device), trained.job.job.loss
    assert loss is not None
    use = use_of_columns(model, loss, rows, environments.encoder, classes, columns, settings.seed, advance)
    return {
        "purposes": dict(zip(columns.environments, columns.purposes, strict=True)),
        "columns": as_json(columns, use),
    }
