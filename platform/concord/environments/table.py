"""Environments from a table with a column for the environment of each row.

A :class:`TableEncoder` turns missing values, texts and dates into numbers. It is fitted on the training rows alone: the
training environments without their held-out parts. A registered model has the encoder inside.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from concord.environments.collection import Environments, RawRows, held_out_places
from concord.environments.csv_file import CsvFormat
from concord.environments.table_encoder import TableEncoder
from concord.environments.table_rows import Kind, Table, TargetScale, Task, fit_encoder, read_table_rows
from concord.errors import InputError

_EXAMPLE_ROWS = 5


class TableEnvironments(Environments):
    """The environments of a table; :meth:`fitted` makes numbers of their rows."""

    def __init__(
        self, table: Table, encoder: TableEncoder | None = None, target_scale: TargetScale | None = None
    ) -> None:
        purposes = table.by_purpose
        super().__init__(
            self._encoded, purposes["train"], purposes["validation"], purposes["test"], version=table.version
        )
        self.table, self.encoder, self.target_scale, self.learn = table, encoder, target_scale, True

    def leaving_out(self, *names: str) -> "TableEnvironments":
        """See :meth:`Environments.leaving_out`."""
        purposes = super().leaving_out(*names).by_purpose()
        return TableEnvironments(replace(self.table, by_purpose=purposes))

    def fitted(self, fraction: float, seed: int) -> "TableEnvironments":
        """With encoder and target's scale fitted on the training environments, without their held-out parts."""
        kept = []
        for name in self.train:
            rows = self.table.rows([name])
            places, _ = held_out_places(name, len(rows), fraction, seed)
            kept.append(rows if places is None else rows.iloc[places.numpy()])
        training = pd.concat(kept)
        return TableEnvironments(self.table, fit_encoder(training, self.table.kinds), self.table.target_scale(training))

    @property
    def raw(self) -> RawRows:
        """The parts with which a registered model takes raw rows of the table."""
        assert self.encoder is not None
        classes = (self.table.target,) if self.table.classes is None else tuple(map(str, self.table.classes))
        rows = self.table.rows(self.train)[list(self.encoder.columns)].head(_EXAMPLE_ROWS)
        return RawRows(self.encoder, rows, classes, self.target_scale)

    def only_names(self) -> Environments:
        """See :meth:`Environments.only_names`; also with rows of validation environments, from 0 in the table."""
        names = super().only_names()
        names.classes = None if self.table.classes is None else tuple(map(str, self.table.classes))
        names.rows = {name: self.table.rows([name]).index.to_numpy() for name in self.validation}
        return names

    def _encoded(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self.encoder is None:
            raise InputError(
                "environments of a table: the encoder is not fitted; call fitted(fraction, seed), with the fraction of "
                "rows that are held out, or 0"
            )
        rows = self.table.rows([name])
        try:
            inputs = self.encoder.encode(rows)
        except ValueError as error:
            raise InputError(f"environment {name}: {error}") from error
        targets = _targets(self.table, rows, self.target_scale)
        finite = {each.name: np.isfinite(inputs[:, 2 * place]) for place, each in enumerate(self.encoder.numeric)}
        for column, right in {**finite, self.table.target: targets.isfinite().reshape(-1).numpy()}.items():
            for row in np.flatnonzero(~right)[:1]:
                found = f"row {rows.index[row]} has {rows[column].iloc[row]}, too far from the training rows"
                raise InputError(f"environment {name}: column {column}: {found}; correct or remove it")
        return torch.from_numpy(inputs), targets


def from_table(
    data: str | Path | pd.DataFrame,
    *,
    target: str,
    environment: str | None = None,
    validation: Sequence[str] = (),
    test: Sequence[str] = (),
    kinds: Mapping[str, Kind] | None = None,
    task: Task | None = None,
    environment_bins: int | None = None,
    separator: str = ",",
    encoding: str = "utf-8",
    decimal: str = ".",
    thousands: str = "",
    missing: Sequence[str] = (),
    date_format: str = "",
) -> TableEnvironments:
    """Environments from a table: a CSV or Parquet file, a folder with one file for each environment, or a pandas
    frame.

    Args:
        data: the table.
        target: the column to predict. Rows without one are left out.
        environment: the column of each row's environment; for a folder None means the files' names.
        validation, test: names of these environments; all others train.
        kinds: of columns for which :func:`~concord.environments.table_rows.inferred_kinds` is wrong.
        task: classification or regression; None infers it from the target.
        environment_bins: cut a numeric environment column at quantiles into this many environments.
        separator, encoding, decimal, thousands, missing, date_format: of CSV files, see
            :class:`~concord.environments.csv_file.CsvFormat`.

    A warning names each column whose numbers or dates are not read as such.
    """
    form = CsvFormat(separator, encoding, decimal, thousands, tuple(missing), date_format)
    table = read_table_rows(
        data,
        form,
        target=target,
        environment=environment,
        validation=validation,
        test=test,
        kinds=kinds,
        task=task,
        environment_bins=environment_bins,
    )
    return TableEnvironments(table)


def _targets(table: Table, rows: pd.DataFrame, scale: TargetScale | None) -> torch.Tensor:
    """Classes as int64, or standardized numbers as float32 of shape ``(rows, 1)``."""
    values = rows[table.target]
    if scale is not None:
        standardized = (values.to_numpy(dtype=np.float64) - scale.mean) / scale.deviation
        return torch.from_numpy(standardized.astype(np.float32)).unsqueeze(1)
    assert table.classes is not None
    codes = pd.Categorical(values, categories=list(table.classes)).codes
    return torch.from_numpy(codes.astype(np.int64))
