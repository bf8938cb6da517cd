"""What the paper reports: every number of its evaluation, with its place.

The numbers are in `published.toml`; the paper's text and pictures are not. Names of networks, datasets, links and
methods are those of the configuration, so that our rows can be matched with printed ones.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from pipar.errors import InputError
from pipar.settings.config import DATASETS, MODELS

Model = Literal[MODELS]  # type: ignore[valid-type]
Dataset = Literal[DATASETS]  # type: ignore[valid-type]
LinkName = Literal["4g", "4g+", "wifi"]
MethodName = Literal["fl", "sfl", "pipar"]

_Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_+-]*$")]
_Text = Annotated[str, Field(min_length=1)]
_Count = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Percent = Annotated[float, Field(ge=0, le=100)]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # TOML has no other sequence


class _Printed(BaseModel):
    """Anything that the paper prints; an unknown key, or a number in place of text, is an error in our file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    place: _Text  # section and figure or table, as in "V-B1, Fig. 4"
    line: _Count  # of the paper's LaTeX source


class Statement(_Printed):
    """One number or range of the text. "Up to" has only a `high`, "at least" only a `low`; a single number has both.

    `in_words`: the paper gives no number; the bound, if any, is what its words mean.
    """

    name: _Name
    experiment: _Name
    what: _Text
    low: _Finite | None = None
    high: _Finite | None = None
    unit: str = ""
    in_words: bool = False
    models: Annotated[tuple[Model, ...], BeforeValidator(_as_tuple)] = ()
    datasets: Annotated[tuple[Dataset, ...], BeforeValidator(_as_tuple)] = ()
    links: Annotated[tuple[LinkName, ...], BeforeValidator(_as_tuple)] = ()
    method: MethodName | None = None
    against: MethodName | None = None

    @model_validator(mode="after")
    def _is_a_range(self) -> Statement:
        if self.low is None and self.high is None and not self.in_words:
            raise ValueError("has neither low nor high")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"has a low of {self.low:g} above its high of {self.high:g}")
        return self

    def __str__(self) -> str:
        """The range as tables show it: "1.4 to 3.4 x", "up to 64.1 x", "at least 0.96", "27 %"."""
        return f"{_range(self.low, self.high)} {self.unit}".strip()


def _range(low: float | None, high: float | None) -> str:
    match low, high:
        case None, None:
            return "in words"
        case None, float() | int():
            return f"up to {high:g}"
        case float() | int(), None:
            return f"at least {low:g}"
        case _:
            return f"{low:g}" if low == high else f"{low:g} to {high:g}"


class Accuracy(_Printed):
    """A column of the two tables of accuracies, in percent of the test set."""

    model: Model
    dataset: Dataset
    fl: _Percent
    sfl: _Percent
    pipar: _Percent
    difference: _Finite  # of pipar to the better of the other two, as printed


class Selection(_Printed):
    """A row of the two tables of parameters: what the paper's approach chose, and what exhaustive search found."""

    model: Model
    dataset: Dataset
    link: LinkName
    split_point: _Count
    micro_batches: _Count
    epoch_s: _Seconds
    choosing_s: _Seconds
    best_split_point: _Count
    best_micro_batches: _Count
    best_epoch_s: _Seconds
    searching_s: _Seconds
    printed_score: Annotated[float, Field(gt=0, le=1)]

    @property
    def score(self) -> float:
        """T_opt / T from the printed times; two printed scores of Table VIII differ from it."""
        return self.best_epoch_s / self.epoch_s

    @property
    def optimal(self) -> bool:
        """Whether the chosen P and N are the best ones."""
        return (self.split_point, self.micro_batches) == (self.best_split_point, self.best_micro_batches)


_ACCURACY_ROW = ("model", "dataset", "fl", "sfl", "pipar", "difference")
_SELECTION_ROW = (
    "link", "line", "split_point", "micro_batches", "epoch_s", "choosing_s",
    "best_split_point", "best_micro_batches", "best_epoch_s", "searching_s", "printed_score",
)  # fmt: skip


class Published(BaseModel):
    """All that the evaluation prints."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    statements: tuple[Statement, ...]
    accuracies: tuple[Accuracy, ...]
    selections: tuple[Selection, ...]

    @model_validator(mode="after")
    def _names_are_unique(self) -> Published:
        _refuse_twice([statement.name for statement in self.statements], "statements")
        _refuse_twice([(row.model, row.dataset) for row in self.accuracies], "accuracies")
        _refuse_twice([(row.model, row.dataset, row.link) for row in self.selections], "selections")
        return self

    def statement(self, name: str) -> Statement:
        """Return the statement of this name."""
        for statement in self.statements:
            if statement.name == name:
                return statement
        raise InputError(f"'{name}' is not a statement of the paper; choose from {self._names()}.")

    def about(self, experiment: str) -> tuple[Statement, ...]:
        """Return the statements about one experiment, in the order of the text."""
        return tuple(statement for statement in self.statements if statement.experiment == experiment)

    def accuracy(self, model: str, dataset: str) -> Accuracy | None:
        """Return the printed accuracies of one training; None if there are none."""
        return next((row for row in self.accuracies if (row.model, row.dataset) == (model, dataset)), None)

    def selection(self, model: str, dataset: str, link: str) -> Selection | None:
        """Return the printed plans of one training; None if there are none."""
        wanted = (model, dataset, link)
        return next((row for row in self.selections if (row.model, row.dataset, row.link) == wanted), None)

    def _names(self) -> str:
        return ", ".join(statement.name for statement in self.statements)


@cache
def published() -> Published:
    """Return what the paper prints."""
    return read_published(resources.files("reproduction").joinpath("published.toml").read_text("utf-8"))


def read_published(text: str) -> Published:
    """Return the content of a file of published numbers; raise one sentence about the first error in it."""
    try:
        tree = tomllib.loads(text)
        return Published.model_validate(
            {
                "statements": tuple(_statements(tree.pop("statements"))),
                "accuracies": tuple(_rows(tree.pop("accuracy"), _ACCURACY_ROW)),
                "selections": tuple(_rows(tree.pop("selection"), _SELECTION_ROW)),
                **tree,  # anything else is refused
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise InputError(f"The published numbers are damaged at {where}: {first['msg']}.") from None
    except (KeyError, ValueError) as error:
        raise InputError(f"The published numbers are damaged: {error}.") from None


def _statements(by_experiment: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [{"experiment": name, **one} for name, several in by_experiment.items() for one in several]


def _rows(tables: list[dict[str, Any]], columns: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the rows of tables as records; the keys above a table's rows apply to each of them."""
    return list(chain.from_iterable(_table_rows(table, columns) for table in tables))


def _table_rows(table: dict[str, Any], columns: tuple[str, ...]) -> list[dict[str, Any]]:
    above = {key: value for key, value in table.items() if key != "rows"}
    return [{**above, **dict(zip(columns, row, strict=True))} for row in table["rows"]]


def _refuse_twice(names: Sequence[object], of_what: str) -> None:
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"{twice[0]} occurs twice in the {of_what}")
