"""Environments from a table with a column for the environment of each row.

A :class:`TableEncoder` turns missing values, texts and dates into numbers. It is fitted on the training rows alone: the
training environments without their held-out parts. A registered model has the encoder inside.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import nn

from concord.environments.collection import Environments, RawRows, held_out_places
from concord.environments.csv_file import CsvFormat
from concord.environments.table_encoder import TableEncoder
from concord.environments.table_rows import Kind, Table, TargetScale, Task, fit_encoder, read_table_rows
from concord.environments.text_defaults import TEXT_LENGTH, TEXT_MODEL
from concord.errors import InputError
from concord.weighted import Weighted

if TYPE_CHECKING:
    from concord.environments.text_model import TextInputs

_EXAMPLE_ROWS = 5


class TableEnvironments(Environments):
    """The environments of a table; :meth:`fitted` makes numbers of their rows."""

    def __init__(
        self,
        table: Table,
        encoder: TableEncoder | None = None,
        target_scale: TargetScale | None = None,
        text: "TextInputs | None" = None,
        text_scale: tuple[NDArray[Any], NDArray[Any]] | None = None,
    ) -> None:
        version = table.version if text is None else f"{table.version}-{text.model.digest}"
        super().__init__(self._encoded, **table.by_purpose, version=version)
        self.table, self.encoder, self.target_scale, self.learn = table, encoder, target_scale, True
        self.text, self._text_scale = text, text_scale

    @staticmethod
    def of(
        table: Table, text_model: str = TEXT_MODEL, text_length: int = TEXT_LENGTH, *, train_encoder: bool = False
    ) -> "TableEnvironments":
        """The environments of a table, with an encoder of its columns of text."""
        if not table.text:
            return TableEnvironments(table)
        from concord.environments.text_model import TextInputs, load_text_model

        text = TextInputs(load_text_model(text_model, table.text, text_length), train_encoder, table.frame)
        return TableEnvironments(replace(table, between=text.width), text=text)

    def network(self, network: nn.Module) -> nn.Module:
        """The network of a table's inputs, behind an encoder of texts that is trained with it."""
        if self.text is None or not self.text.train:
            return network
        return self.text.network(network, self.table.widest.widths[0] - self.table.between)

    def leaving_out(self, *names: str) -> "TableEnvironments":
        """See :meth:`Environments.leaving_out`."""
        purposes = super().leaving_out(*names).by_purpose()
        return TableEnvironments(replace(self.table, by_purpose=purposes), text=self.text)

    def holding_out(self, fraction: float, seed: int) -> "TableEnvironments":
        """See :meth:`Environments.holding_out`."""
        purposes = super().holding_out(fraction, seed).by_purpose()
        return TableEnvironments(replace(self.table, by_purpose=purposes), text=self.text)

    def fitted(self, fraction: float, seed: int) -> "TableEnvironments":
        """With encoder and target's scale fitted on the training environments, without their held-out parts."""
        kept, fraction = [], self.fraction_of_examples(fraction)
        for name in self.train:
            rows = self.table.rows([name])
            places, _ = held_out_places(name, len(rows), fraction, seed, self.units(name))
            kept.append(rows if places is None else rows.iloc[places.numpy()])
        training = pd.concat(kept)
        encoder, scale = replace(fit_encoder(training, self.table.kinds), between=self.table.between), None
        if self.text is not None and self.text.train:
            encoder = _with_tokens(encoder, self.text)
        elif self.text is not None:
            vectors = self.text.vectors(training)
            deviation = np.nanstd(vectors, 0)
            scale = np.nanmean(vectors, 0), 1 / np.where(deviation > 0, deviation, np.inf)
        return TableEnvironments(self.table, encoder, self.table.target_scale(training), self.text, scale)

    def units(self, name: str) -> torch.Tensor | None:
        """See :meth:`Environments.units`: rows with the same value of the table's cluster column."""
        if self.table.cluster is None:
            return None
        codes, _ = pd.factorize(self.table.rows([name])[self.table.cluster])
        return torch.from_numpy(codes.astype(np.int64))

    @property
    def raw(self) -> RawRows:
        """The parts with which a registered model takes raw rows of the table."""
        assert self.encoder is not None
        classes = (self.table.target,) if self.table.classes is None else tuple(map(str, self.table.classes))
        encoder, network = self.encoder, None
        if self.text is not None and not self.text.train:
            first = encoder.widths[0] - encoder.between
            network = functools.partial(self.text.network, numeric=first, scale=self._text_scale)
            encoder = _with_tokens(encoder, self.text)
        rows = self.table.rows(self.train)[list(encoder.columns)].head(_EXAMPLE_ROWS)
        return RawRows(encoder, rows, classes, self.target_scale, network)

    def only_names(self) -> Environments:
        """See :meth:`Environments.only_names`; also with rows and clusters of validation environments."""
        names = super().only_names()
        names.classes = None if self.table.classes is None else tuple(map(str, self.table.classes))
        names.rows = {name: self.table.rows([name]).index.to_numpy() for name in self.validation}
        if (cluster := self.table.cluster) is not None:
            places = (*self.validation, *self.test)
            names.clusters = {name: self.table.rows([name])[cluster].astype(str).to_numpy() for name in places}
        return names

    def _encoded(self, name: str) -> tuple[torch.Tensor, torch.Tensor] | Weighted:
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
        if self._text_scale is not None and self.text is not None:
            (mean, factor), first = self._text_scale, self.encoder.widths[0]
            scaled = (self.text.vectors(rows) - mean) * factor
            inputs[:, first - self.encoder.between : first] = np.nan_to_num(scaled)
        targets = _targets(self.table, rows, self.target_scale)
        finite = {each.name: np.isfinite(inputs[:, 2 * place]) for place, each in enumerate(self.encoder.numeric)}
        for column, right in {**finite, self.table.target: targets.isfinite().reshape(-1).numpy()}.items():
            for row in np.flatnonzero(~right)[:1]:
                value, where = rows[column].iloc[row], self.table.row_names(rows.index[row])
                found = f"{where} has {value}, too far from the training rows"
                raise InputError(f"environment {name}: column {column}: {found}; correct or remove it")
        if (weights := self.table.weights(rows)) is not None:
            return Weighted(torch.from_numpy(inputs), targets, torch.from_numpy(weights.astype(np.float32)))
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
    environment_by: tuple[str | int, str] | None = None,
    test_last: int | None = None,
    weight: str | None = None,
    cluster_by: str | None = None,
    levels: Sequence[str] = (),
    text: Sequence[str] = (),
    text_model: str = TEXT_MODEL,
    text_length: int = TEXT_LENGTH,
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
        task: classification, regression, ordinal (levels in an order) or count (whole numbers from 0 on); None infers
            one of the first two from the target.
        environment_bins: cut a numeric environment column at quantiles into this many environments.
        environment_by: in place of an environment's column, a unit or a number of parts and a column of dates, such as
            ``("week", "admitted")``, see :func:`~concord.environments.periods.periods`.
        test_last: test on the last environments in time, this many.
        weight: a column by which rows count, in the loss and in every measure; no input.
        cluster_by: a column that names what several rows belong to, such as a patient: held-out rows are drawn by it,
            so that no patient's rows stand on both sides, and intervals are over them; no input.
        levels: the values of an ordinal target from the lowest to the highest; numbers need none.
        text: columns of text, of which a frozen encoder makes inputs.
        text_model: a folder, or a name on the hub of Hugging Face, with the encoder; see
            :mod:`~concord.environments.text_model`.
        text_length: the largest number of tokens of a text.
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
        environment_by=environment_by,
        test_last=test_last,
        weight=weight,
        cluster_by=cluster_by,
        levels=levels,
        text=text,
    )
    return TableEnvironments.of(table, text_model, text_length)


def _with_tokens(encoder: TableEncoder, text: "TextInputs") -> TableEncoder:
    return replace(encoder, tokens=text.model.tokens, between=text.model.tokens.width)


def _targets(table: Table, rows: pd.DataFrame, scale: TargetScale | None) -> torch.Tensor:
    """Classes as int64, counts as int64 of shape ``(rows, 1)``, or standardized numbers as float32 of this shape."""
    values = rows[table.target]
    if table.task == "count":
        return torch.from_numpy(values.to_numpy(dtype=np.int64, copy=True)).unsqueeze(1)
    if scale is not None:
        standardized = (values.to_numpy(dtype=np.float64) - scale.mean) / scale.deviation
        return torch.from_numpy(standardized.astype(np.float32)).unsqueeze(1)
    assert table.classes is not None
    codes = pd.Categorical(values, categories=list(table.classes)).codes
    return torch.from_numpy(codes.astype(np.int64))
