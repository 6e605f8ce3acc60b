"""A rule of the user's own: a frozen dataclass in a Python file, named ``FILE.py:RULE``.

The text of the file travels to other processes and is kept with a run. So a rule also runs on machines without its
file, and a resumed run has the text that it began with, even if the file has changed.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from concord.aggregation.column_rule import ColumnRule, combined
from concord.aggregation.families import Rule, as_rule
from concord.aggregation.rule import aggregate
from concord.aggregation.weighting import Weighting, weights_of
from concord.errors import ArgumentError, InputError
from concord.hyperparameters import Hyperparameter, hyperparameters_of
from concord.source_file import read_source, refusing, run_source


@dataclass(frozen=True)
class RuleFile:
    """The file of a rule, its text, and the name of the rule in it."""

    path: str
    source: str = field(repr=False)
    name: str

    @staticmethod
    def is_reference(aggregator: str) -> bool:
        """Whether this names a Python file, and no built-in rule."""
        return re.fullmatch(r".*\.py(:.*)?", aggregator) is not None

    @staticmethod
    def read(reference: str) -> "RuleFile":
        """The file that ``FILE.py:RULE`` names."""
        file, name = RuleFile.parts(reference)
        path = Path(file).resolve()
        return RuleFile(str(path), read_source(path, partial(ArgumentError, "aggregator", reference)), name)

    @staticmethod
    def parts(reference: str) -> tuple[str, str]:
        """The file and the rule of ``FILE.py:RULE`` (ArgumentError if it names no rule)."""
        file, _, name = reference.rpartition(":")
        if not file.endswith(".py") or not name.isidentifier():
            expected = "name the rule in the file: FILE.py:RULE"
            raise ArgumentError("aggregator", reference, expected)
        return file, name

    @property
    def file_name(self) -> str:
        """The name of the file without its folder, which belongs to one machine."""
        return Path(self.path).name

    @property
    def reference(self) -> str:
        """The name of the rule in configurations and runs."""
        return f"{self.file_name}:{self.name}"

    def load(self) -> "OwnRule":
        """Run the text, and take the rule from it."""
        refusal = partial(ArgumentError, "aggregator", self.reference)
        module = run_source(self.path, self.source, "rule", refusal)
        kind = getattr(module, self.name, None)
        if kind is None:
            parts = ("finish", "weights", "combine")
            there = [name for name, each in vars(module).items() if any(hasattr(each, part) for part in parts)]
            raise refusal(f"there is no {self.name} in the file; it has {', '.join(there) or 'no rule'}")
        if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
            raise refusal(
                "is no dataclass; a rule is a frozen dataclass with statistics and finish(sums, environments), with "
                "weights(gram), or with combine(columns)"
            )
        with refusing("its fields have no types", self.path, refusal):
            return OwnRule(self, kind, hyperparameters_of(kind))


@dataclass(frozen=True)
class OwnRule:
    """A rule of the user's own: its file, its class, and its fields by name."""

    file: RuleFile
    kind: type[Any]
    options: Mapping[str, Hyperparameter]

    def build(self, values: Mapping[str, Any]) -> Rule:
        """Make the rule with these values of its fields; other values are ignored."""
        with refusing("cannot be made", self.file.path, self._refused):
            rule: Rule = self.kind(**{name: values[name] for name in self.options})
        return rule

    def check(self, rule: Rule) -> None:
        """Refuse a rule that fails on a few numbers (ArgumentError)."""
        gradients = torch.linspace(-1, 1, 12).reshape(3, 4)
        try:
            with refusing("cannot be used", self.file.path, InputError):
                known = as_rule(rule)
                if isinstance(known, Weighting):
                    weights_of(known, gradients @ gradients.T)
                elif isinstance(known, ColumnRule):
                    combined(known, gradients)
                else:
                    aggregate(known, gradients)
        except InputError as error:
            raise self._refused(str(error)) from error

    def _refused(self, problem: str) -> ArgumentError:
        return ArgumentError("aggregator", self.file.reference, problem)
