"""State of many domains as arrays: one row per domain, one column per quantity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class Columns:
    """Named float64 columns of equal length that grow, shrink and survive JSON bit for bit."""

    def __init__(
        self, num_rows: int, defaults: Mapping[str, float], *, width: int | None = None
    ) -> None:
        """Every row starts at `defaults`, and so does every row added later.

        With `width`, a row of each column holds that many numbers.
        """
        self._defaults = dict(defaults)
        self._shape = () if width is None else (width,)
        shape = (num_rows, *self._shape)
        self._columns = {name: np.full(shape, value) for name, value in defaults.items()}

    def __getitem__(self, name: str) -> Floats:
        """The column itself: changes in place are kept."""
        return self._columns[name]

    def __setitem__(self, name: str, values: Floats) -> None:
        """Replace a column."""
        assert values.shape == self._columns[name].shape
        self._columns[name] = values

    def add_row(self) -> None:
        """One more row, at the end."""
        for name, value in self._defaults.items():
            row = np.full((1, *self._shape), value)
            self._columns[name] = np.concatenate((self._columns[name], row))

    def remove_row(self, row: int) -> None:
        """Rows behind `row` move up."""
        for name in self._defaults:
            self._columns[name] = np.delete(self._columns[name], row, axis=0)

    def state(self) -> dict[str, list[Any]]:
        """JSON values; floats keep all their bits in JSON."""
        return {name: column.tolist() for name, column in self._columns.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        assert state.keys() == self._defaults.keys()
        for name, values in state.items():
            self._columns[name] = np.array(values, dtype=np.float64)
