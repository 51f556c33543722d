"""Real files out of Debian packages, written by the formats' own libraries: the same samples, each once."""

import gzip
import io
import json
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.sources import libraries
from tests.sources.compare import digest, digests
from tests.support import jobs

import rankfeed as rf

SCRIPT = Path(__file__).parent / "jobs" / "formats.py"
CELLS = (
    {"kind": "thread", "workers": 2, "shuffle": True},
    {"kind": "process", "workers": 2, "shuffle": "global"},
    {"kind": "stock", "workers": 2, "shuffle": "global"},
)


@dataclass(frozen=True)
class Real:
    """A data set written by its format's own library.

    Args:
        where: what is opened.
        expected: digests of what the format's own reader gives.
        size: bytes on disk.
    """

    where: str
    expected: list[str] = field(repr=False)
    size: int


def package(name: str, folder: Path) -> Path:
    """The files of a Debian package; nothing is installed."""
    subprocess.run(["apt-get", "download", name], cwd=folder, check=True, timeout=600, capture_output=True)
    (archive,) = folder.glob(f"{name}_*.deb")
    subprocess.run(["dpkg", "-x", archive, folder / name], check=True, timeout=600)
    return folder / name


def available() -> list[dict[str, str]]:
    """The index of all packages, a dict for each."""
    text = subprocess.run(
        ["apt-cache", "dumpavail"], capture_output=True, text=True, check=True, timeout=600
    ).stdout
    entries = []
    for paragraph in text.split("\n\n"):
        lines = paragraph.replace("\n ", " ").splitlines()
        entry = dict(line.split(": ", 1) for line in lines if ": " in line)
        if "Package" in entry:
            entries.append(entry)
    return entries


def sounds_in_tars(folder: Path) -> Real:
    import soundfile
    import webdataset as wds

    files = sorted(package("asterisk-core-sounds-en-wav", folder).rglob("*.wav"))
    with wds.ShardWriter(f"{folder}/sounds-%03d.tar", maxcount=100, verbose=0) as writer:
        for number, path in enumerate(files):
            writer.write({"__key__": f"{number:05d}", "wav": path.read_bytes(), "txt": path.stem})
    expected = []
    for sample in wds.WebDataset(sorted(map(str, folder.glob("*.tar"))), shardshuffle=False):
        sound, rate = soundfile.read(io.BytesIO(sample["wav"]), dtype="float32", always_2d=True)
        text = sample["txt"].decode()
        expected.append({"__key__": sample["__key__"], "txt": text, "wav": sound, "wav.rate": np.int64(rate)})
    return Real(f"{folder}/sounds-*.tar", digests(expected), sum(path.stat().st_size for path in files))


def images_in_lance(folder: Path) -> Real:
    import lance

    parts = package("dataset-fashion-mnist", folder) / "usr/share/datasets/fashion-mnist"
    path = folder / "images.lance"
    for number, part in enumerate(("train", "t10k")):
        labels = np.frombuffer(
            gzip.decompress((parts / f"{part}-labels-idx1-ubyte.gz").read_bytes())[8:], np.uint8
        )
        pixels = np.frombuffer(
            gzip.decompress((parts / f"{part}-images-idx3-ubyte.gz").read_bytes())[16:], np.uint8
        )
        images = pa.FixedSizeListArray.from_arrays(pa.array(pixels), 28 * 28)
        table = pa.table({"image": images, "label": pa.array(labels)})
        lance.write_dataset(table, str(path), mode="append" if number else "create", max_rows_per_file=9_000)
    found = lance.dataset(str(path)).to_table()
    pixels = np.concatenate([each.flatten().to_numpy() for each in found["image"].chunks]).reshape(-1, 28 * 28)
    labels = found["label"].to_numpy()
    expected = [digest({"image": image, "label": label}) for image, label in zip(pixels, labels, strict=True)]
    return Real(str(path), expected, sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))


def index_in_parquet(folder: Path) -> Real:
    entries = available()
    path = folder / "index.parquet"
    texts = ("Package", "Version", "Maintainer", "Description", "Depends", "Tag", "Filename", "SHA256")
    columns: dict[str, Any] = {name: [entry.get(name, "") for entry in entries] for name in texts}
    columns["Installed-Size"] = [int(entry.get("Installed-Size", 0)) for entry in entries]
    lengths = [[len(each) for each in entry.get("Depends", "").split(", ")] for entry in entries]
    columns["lengths"] = pa.array(lengths, pa.list_(pa.int32()))
    pq.write_table(pa.table(columns), path, row_group_size=5_000, compression="zstd")
    return Real(str(path), digests(libraries.rows_of(pq.read_table(path))), path.stat().st_size)


def dependencies_in_pyg(folder: Path) -> Real:
    """Each package with what it depends on: a star, and the edges among its points."""
    import torch
    from torch_geometric.data import Data, InMemoryDataset

    entries = available()
    number = {entry["Package"]: index for index, entry in enumerate(entries)}
    needs = [
        sorted(
            {
                number[word]
                for part in entry.get("Depends", "").split(", ")
                if (word := part.split(" ")[0]) in number
            }
        )
        for entry in entries
    ]
    graphs = []
    for index in range(len(entries)):
        nodes = [index, *(each for each in needs[index] if each != index)]
        place = {node: at for at, node in enumerate(nodes)}
        edges = [(place[a], place[b]) for a in nodes for b in needs[a] if b in place]
        sizes = [[float(entries[node].get("Installed-Size", 0))] for node in nodes]
        edge_index = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T.contiguous()
        graphs.append(Data(x=torch.tensor(sizes), edge_index=edge_index, y=torch.tensor([index])))
    (folder / "processed").mkdir()
    path = folder / "processed" / "data.pt"
    InMemoryDataset.save(graphs, str(path))
    return Real(str(folder), [digest(graph) for graph in libraries.graphs(folder)], path.stat().st_size)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "make",
    [sounds_in_tars, images_in_lance, index_in_parquet, dependencies_in_pyg],
    ids=lambda make: make.__name__,
)
def test_real_files_are_read_as_their_own_library_reads_them(make: Callable[[Path], Real], tmp_path: Path) -> None:
    real = make(tmp_path)
    source = rf.open(real.where)
    assert len(source) == len(real.expected)
    for first in range(0, len(source), 500):
        ids = range(first, min(first + 500, len(source)))
        assert digests(source.__getitems__(ids)) == [real.expected[each] for each in ids]

    cells = [{"format": "real", "global_batch": 128, **cell} for cell in CELLS]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"folders": {"real": real.where}, "cells": cells}))
    jobs.run(jobs.torchrun(2, SCRIPT, plan, tmp_path), tmp_path / "log", 900)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for cell, told in zip(cells, zip(*ranks, strict=True), strict=True):
        counted = Counter(sample for rank in told for step in rank["steps"] for sample in step)
        assert counted == Counter(range(len(source))), cell
        assert len(told[0]["steps"]) == len(told[1]["steps"]), cell
        for rank in told:
            assert all(real.expected[int(number)] == said for number, said in rank["digests"].items()), cell
    said = f"{len(source)} samples, {real.size >> 20} MiB, {len(cells)} cells on 2 ranks: each sample once"
    print(f"\n{make.__name__}: {said}, as its own library reads it")
