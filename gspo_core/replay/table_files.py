"""The tables of a job's past as Parquet files, for pandas, Polars, DuckDB and everything else that reads Arrow.

The rule: columns and types are those of the rows in ``tables``, one row group for each step, and a file is there whole
or not at all. The package `pyarrow` (extra `parquet`) is needed here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from gspo_core.replay import tables
from gspo_core.replay.past import Past
from gspo_core.replay.tables import BranchColumns, EpisodeRow, MetricRow, StepRow

RowT = TypeVar("RowT", StepRow, EpisodeRow, MetricRow)
# Of metrics, which do not come step by step.
ROWS_AT_ONCE = 100_000
_TYPES: dict[object, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    dict[str, float]: pa.map_(pa.string(), pa.float64()),
}
TOKENS = pa.schema(
    [
        *((name, pa.int64()) for name in ("step", "group", "member", "branch")),
        *((name, pa.int32()) for name in ("position", "turn", "token")),
        ("is_sampled", pa.bool_()),
        *((name, pa.int32()) for name in ("version", "staleness")),
        *((name, pa.float32()) for name in ("logprob", "trained_logprob")),
    ]
)


def write_tables(past: Past, steps: Sequence[int], folder: Path, *, tokens: bool) -> dict[str, int]:
    """The number of rows of each file written. Raises PastError, FileExistsError."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = {"metrics": _write_metrics(past, folder)}
    with (
        _file(folder, "steps", _schema(StepRow)) as write_step,
        _file(folder, "episodes", _schema(EpisodeRow)) as write_episodes,
        _file(folder, "tokens", TOKENS if tokens else None) as write_tokens,
    ):
        counts |= {"steps": 0, "episodes": 0, **({"tokens": 0} if tokens else {})}
        for step in steps:
            batch = past.batch(step)
            counts["steps"] += write_step(_table(StepRow, [tables.step_row(batch)]))
            counts["episodes"] += write_episodes(_table(EpisodeRow, list(tables.episode_rows(past, batch))))
            if tokens:
                counts["tokens"] += write_tokens(_token_table(list(tables.token_columns(past, batch))))
    return counts


def _write_metrics(past: Past, folder: Path) -> int:
    rows, count = tables.metric_rows(past), 0
    with _file(folder, "metrics", _schema(MetricRow)) as write:
        while part := list(islice(rows, ROWS_AT_ONCE)):
            count += write(_table(MetricRow, part))
    return count


Write = Callable[[pa.Table], int]


@contextmanager
def _file(folder: Path, name: str, schema: pa.Schema | None) -> Iterator[Write]:
    """A way to write tables to the file, which gets its name at the end. Without a schema: nothing is written."""
    if schema is None:
        yield lambda table: 0
        return
    path, partial = folder / f"{name}.parquet", folder / f".{name}.parquet.part"
    if path.exists():
        raise FileExistsError(17, "File exists", str(path))
    try:
        with parquet.ParquetWriter(partial, schema, compression="zstd") as writer:

            def write(table: pa.Table) -> int:
                writer.write_table(table)
                return int(table.num_rows)

            yield write
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def _schema(row: type[RowT]) -> pa.Schema:
    hints = typing.get_type_hints(row)
    return pa.schema([(field.name, _type(hints[field.name])) for field in dataclasses.fields(row)])


def _type(hint: Any) -> pa.DataType:
    if isinstance(hint, types.UnionType):
        [hint] = [one for one in typing.get_args(hint) if one is not type(None)]
    return _TYPES[hint]


def _table(row: type[RowT], rows: Iterable[RowT]) -> pa.Table:
    found, schema = list(rows), _schema(row)
    return pa.table(
        {
            name: pa.array([_value(getattr(one, name)) for one in found], schema.field(name).type)
            for name in schema.names
        },
        schema,
    )


def _value(value: object) -> object:
    return list(value.items()) if isinstance(value, dict) else value


def _token_table(branches: Sequence[BranchColumns]) -> pa.Table:
    columns = {}
    for field in TOKENS:
        pieces = [np.broadcast_to(getattr(one, field.name), one.token.shape) for one in branches]
        values = np.concatenate(pieces) if pieces else np.zeros(0)
        columns[field.name] = pa.array(values, field.type, from_pandas=False)
    return pa.table(columns, TOKENS)
