"""The tables of a job's past as Parquet files, for pandas, Polars, DuckDB and everything else that reads Arrow.

The rule: columns and types are those of the rows in ``tables``, one row group for each step, and the files are all
there, whole, or none of them is. The package `pyarrow` (extra `parquet`) is needed here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
# For metrics, which do not come step by step.
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
    """The number of rows of each file written. Raises PastError, FileExistsError, and then has written none."""
    folder.mkdir(parents=True, exist_ok=True)
    schemas = {"metrics": _schema(MetricRow), "steps": _schema(StepRow), "episodes": _schema(EpisodeRow)}
    schemas |= {"tokens": TOKENS} if tokens else {}
    counts = dict.fromkeys(schemas, 0)
    with _files(folder, schemas) as writers:

        def write(name: str, table: pa.Table) -> None:
            writers[name].write_table(table)
            counts[name] += table.num_rows

        rows = tables.metric_rows(past)
        while part := list(islice(rows, ROWS_AT_ONCE)):
            write("metrics", _table(MetricRow, part))
        for step in steps:
            batch = past.batch(step)
            write("steps", _table(StepRow, [tables.step_row(batch)]))
            write("episodes", _table(EpisodeRow, list(tables.episode_rows(past, batch))))
            if tokens:
                write("tokens", _token_table(list(tables.token_columns(past, batch))))
    return counts


@contextmanager
def _files(folder: Path, schemas: Mapping[str, pa.Schema]) -> Iterator[dict[str, parquet.ParquetWriter]]:
    """What writes each of the files, which get their names at the end, and only if all of it was written."""
    paths = {folder / f".{name}.parquet.part": folder / f"{name}.parquet" for name in schemas}
    for path in paths.values():
        if path.exists():
            raise FileExistsError(17, "File exists", str(path))
    try:
        with ExitStack() as stack:
            yield {
                name: stack.enter_context(parquet.ParquetWriter(partial, schema, compression="zstd"))
                for partial, (name, schema) in zip(paths, schemas.items(), strict=True)
            }
        for partial, path in paths.items():
            partial.rename(path)
    finally:
        for partial in paths:
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
