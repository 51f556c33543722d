"""Arrow tables written as any format, by the suffix of a path."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
from tests.support.tar import write_tar


def _write_ipc(
    table: pa.Table, path: Path, new: Any, compression: str | None = None, rows: int | None = None
) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression, emit_dictionary_deltas=True)
    with new(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)


def _write_huggingface(table: pa.Table, folder: Path, **options: Any) -> None:
    """A folder as `Dataset.save_to_disk` leaves it; that of the library refuses some types."""
    folder.mkdir()
    _write_ipc(table, folder / "data.arrow", pa.ipc.new_stream, **options)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}], "_fingerprint": "0"}')
    (folder / "dataset_info.json").write_text("{}")


def _write_lance(table: pa.Table, path: Path, **options: Any) -> None:
    import lance

    lance.write_dataset(table, path, **options)


def _write_tar(table: pa.Table, path: Path) -> None:
    rows = enumerate(table.to_pylist())
    members = [(index, name, value) for index, row in rows for name, value in row.items() if value is not None]
    write_tar(path, [(f"{index:03}.{name}", str(int(value)).encode()) for index, name, value in members])


#: How each suffix is written; a folder has none.
TABLE_WRITERS: dict[str, Callable[..., Any]] = {
    ".parquet": lambda table, path, **options: pq.write_table(table, path, **options),
    ".feather": lambda table, path: pa.feather.write_feather(table, path, compression="zstd"),
    ".arrow": lambda table, path, **options: _write_ipc(table, path, pa.ipc.new_file, **options),
    ".arrows": lambda table, path, **options: _write_ipc(table, path, pa.ipc.new_stream, **options),
    ".csv": lambda table, path: pa.csv.write_csv(table, path),
    ".jsonl": lambda table, path: path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist())),
    ".lance": _write_lance,
    ".tar": _write_tar,
    ".hf": _write_huggingface,
}


def write_table(table: pa.Table, path: Path, **options: Any) -> Path:
    """Write a table in the format of the path's suffix, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    TABLE_WRITERS[path.suffix](table, path, **options)
    return path
