"""Fields that belong to one sample: collated alone and together, read again, and compared with the control."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.diagnostics.test_diagnosis import job
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

from rankfeed.diagnostics.batch_columns import columns
from rankfeed.diagnostics.doctor import rows as shapes
from rankfeed.diagnostics.doctor.outcomes import changed_reads, collated_apart
from rankfeed.diagnostics.doctor.pairs import exchanged_by_epoch, rows_apart
from rankfeed.diagnostics.doctor.records import EpochLog, Job, RankLog, RunLog, Step
from rankfeed.diagnostics.doctor.rereading import reread
from rankfeed.diagnostics.tagged import record

SAMPLES, BATCH = 48, 6
TEXTS = [torch.arange(1, 4 + 7 * index % 9) + 20 * index for index in range(SAMPLES)]


class Texts(Dataset[Any]):
    """Texts of different lengths, with labels."""

    def __init__(self) -> None:
        self.tokens = [text.clone() for text in TEXTS]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.tokens[index], index % 5


class TextStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(text.clone(), index % 5) for index, text in enumerate(TEXTS)])


def padded(rows: list[Any], value: int = 0) -> Any:
    texts, labels = zip(*rows, strict=True)
    return {
        "tokens": pad_sequence([*texts], batch_first=True, padding_value=value),
        "labels": torch.tensor(labels),
    }


def sorted_rows(rows: list[Any]) -> Any:
    rows = sorted(rows, key=lambda row: len(row[0]), reverse=True)
    lengths = [len(text) for text, _ in rows]
    packed = pack_padded_sequence(pad_sequence([text for text, _ in rows]), torch.tensor(lengths))
    return packed, torch.tensor([label for _, label in rows])


def masked(rows: list[Any]) -> Any:
    batch = padded(rows)
    mask = batch["tokens"] != 0
    positions = torch.arange(mask.shape[1]).expand(mask.shape)
    return batch | {"mask": mask, "hidden": ~mask, "positions": positions, "targets": torch.arange(len(rows))}


def with_negatives(rows: list[Any]) -> Any:
    batch = padded(rows)
    return batch | {"negative": batch["tokens"].roll(1, 0), "other": batch["labels"].flip(0)}


def with_order(rows: list[Any]) -> Any:
    batch = padded(rows)
    order = torch.tensor([len(text) for text, _ in rows]).argsort()
    starts = torch.tensor([len(text) for text, _ in rows]).cumsum(0)
    return {name: field[order] for name, field in batch.items()} | {"order": order, "starts": starts}


def mixed(rows: list[Any]) -> Any:
    batch, share = padded(rows), random.random()
    order = torch.randperm(len(rows))
    return batch | {"mixed": share * batch["tokens"] + (1 - share) * batch["tokens"][order],
                    "other": batch["labels"][order], "share": torch.full((len(rows),), share)}  # fmt: skip


def concatenated(rows: list[Any]) -> Any:
    lengths = [len(text) for text, _ in rows]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return {"tokens": torch.cat([text for text, _ in rows]), "bounds": bounds,
            "labels": torch.tensor([label for _, label in rows])}  # fmt: skip


def graph(rows: list[Any], offset: Callable[[torch.Tensor, int], int] = lambda edges, nodes: nodes) -> Any:
    """Nodes of which the last one has no edge."""
    nodes, edges, owners, first = [], [], [], 0
    for index, (text, _) in enumerate(rows):
        own = torch.stack([torch.arange(len(text) - 1), torch.arange(1, len(text))])
        nodes.append(torch.cat([text, text[:1]]))
        edges.append(own + first)
        owners.append(torch.full((len(nodes[-1]),), index))
        first += offset(own, len(nodes[-1]))
    return {"x": torch.cat(nodes), "edge_index": torch.cat(edges, 1), "batch": torch.cat(owners),
            "y": torch.tensor([label for _, label in rows])}  # fmt: skip


class Garbage:
    """A buffer that is never cleared, with a mask that hides what is left of other samples."""

    def __init__(self, *, hidden: bool) -> None:
        self.buffer, self.hidden = torch.zeros(BATCH, 12, dtype=torch.long), hidden

    def __call__(self, rows: list[Any]) -> Any:
        for row, (text, _) in enumerate(rows):
            self.buffer[row, : len(text)] = text
        tokens = self.buffer.clone()
        lengths = torch.tensor([len(text) for text, _ in rows])
        mask = torch.arange(12) < lengths[:, None] if self.hidden else tokens != 0
        return {"tokens": tokens, "mask": mask.long(), "labels": torch.tensor([label for _, label in rows])}


SOUND: dict[str, Callable[[list[Any]], Any]] = {
    "padded": padded,
    "padded by -1": lambda rows: padded(rows, -1),
    "sorted": sorted_rows,
    "masks and positions": masked,
    "negatives": with_negatives,
    "order": with_order,
    "mixed": mixed,
    "concatenated": concatenated,
    "graph": graph,
    "centered": lambda rows: {"x": (x := padded(rows)["labels"] * 1.0) - x.mean()},
    "dropped": lambda rows: padded([row for row in rows if row[1]] or rows),
    "hidden garbage": Garbage(hidden=True),
    "time first": lambda rows: padded(rows) | {"tokens": padded(rows)["tokens"].T},
    "lists": lambda rows: ([text for text, _ in rows], [label for _, label in rows]),
}  # fmt: skip


def tokens_sorted(rows: list[Any]) -> Any:
    texts = sorted((text for text, _ in rows), key=len)
    return pad_sequence([*texts], batch_first=True), torch.tensor([label for _, label in rows])


def tokens_shuffled(rows: list[Any]) -> Any:
    texts = random.sample([text for text, _ in rows], len(rows))
    return pad_sequence([*texts], batch_first=True), torch.tensor([label for _, label in rows])


COMBINED: dict[str, Callable[[list[Any]], Any]] = {
    "tokens sorted": tokens_sorted,
    "tokens sorted, with a padding mask": lambda rows: {
        "tokens": (tokens := tokens_sorted(rows)[0]), "hidden": tokens == 0, "labels": padded(rows)["labels"]},
    "labels reversed": lambda rows: (padded(rows)["tokens"], torch.tensor([label for _, label in rows[::-1]])),
    "labels shifted": lambda rows: padded(rows) | {"labels": padded(rows)["labels"].roll(1)},
    "lengths sorted": lambda rows: padded(rows) | {"length": torch.tensor(sorted(len(text) for text, _ in rows))},
    "labels of packed texts": lambda rows: (
        sorted_rows(rows)[0], torch.tensor([label for _, label in rows])),
    "concatenated in another order": lambda rows: concatenated(rows) | {"labels": padded(rows)["labels"].flip(0)},
    "edges offset by the largest end": lambda rows: graph(rows, lambda edges, nodes: int(edges.max()) + 1),
    "edges without an offset": lambda rows: graph(rows, lambda edges, nodes: 0),
}  # fmt: skip


def read(dataset: Any, collate: Any) -> list[RunLog]:
    """The control of a loader: a run of one rank that reads its first batches again."""
    loader = DataLoader(dataset, BATCH, collate_fn=collate)
    record(loader, keep=4)
    rank = RankLog(0, epochs=[EpochLog(0, [_step(tagged.batch) for tagged in loader], whole=True)])
    for reading in reread(loader, 0.0):
        rank.add(reading)
    assert rank.read_again is not None
    first = RankLog(0, epochs=rank.epochs)
    return [RunLog(job(ranks=1, workers=0), [log]) for log in (first, rank)]


def _step(batch: Any) -> Step:
    fields = columns(batch, BATCH)
    return Step(rows=BATCH, fields=shapes.hashed(fields), ends=shapes.all_ends(fields))


def said(control: list[RunLog]) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity) for finding in (*changed_reads(control), *collated_apart(control))]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", SOUND)
def test_a_collate_function_that_keeps_the_fields_of_samples_together_has_no_findings(
    name: str, stream: bool
) -> None:
    assert said(read(TextStream() if stream else Texts(), SOUND[name])) == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", COMBINED)
def test_a_collate_function_that_pairs_fields_of_different_samples_is_an_error(name: str, stream: bool) -> None:
    assert said(read(TextStream() if stream else Texts(), COMBINED[name])) == [("rows-come-apart", "error")]


def test_a_collate_function_that_pairs_fields_of_different_samples_at_random_is_unproven() -> None:
    assert said(read(Texts(), tokens_shuffled)) == [("rows-come-apart", "unproven")]


@pytest.mark.parametrize("stream", [False, True])
def test_a_collate_buffer_that_is_not_cleared_between_batches_is_an_error(stream: bool) -> None:
    assert ("reads-differ", "error") in said(read(TextStream() if stream else Texts(), Garbage(hidden=False)))


class Masking(Texts):
    """Masks tokens at random: in a copy, or in what the dataset keeps."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.reads = kind, 0
        self.generator = random.Random(3)

    def __getitem__(self, index: int) -> Any:
        tokens = self.tokens[index]
        if self.kind != "kept":
            tokens = tokens.clone()
        source: dict[str, Any] = {"own": self.generator, "fresh": np.random.default_rng()}
        source["unknown"] = random.SystemRandom()
        draw = source.get(self.kind, random).random
        if self.kind in ("unknown", "fresh"):
            random.random()
        tokens[torch.tensor([draw() < 0.4 for _ in tokens])] = 0
        return tokens, index % 5


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("copy", []),
        ("own", []),
        ("kept", [("reads-differ", "error")]),
        ("unknown", [("reads-differ", "unproven")]),
        ("fresh", [("reads-differ", "unproven")]),
    ],
)
def test_masking_tokens_that_the_dataset_keeps_is_an_error_and_masking_a_copy_is_not(
    kind: str, expected: list[tuple[str, str]]
) -> None:
    assert said(read(Masking(kind), padded)) == expected


class Scaled(Texts):
    def __getitem__(self, index: int) -> Any:
        self.tokens[index] *= 3
        return self.tokens[index], index % 5


class Cached(Texts):
    """A cache that has one place for several samples."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        kept = self.cache.setdefault(index % 40, self.tokens[index])
        self.cache[index % 7] = self.tokens[index]
        return kept, index % 5


class Counting(Texts):
    """The first token counts the reads of all items, which is no random generator."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        Counting.reads += 1
        return torch.cat([torch.tensor([Counting.reads]), self.tokens[index]]), index % 5


def test_items_that_differ_when_read_again_are_unproven_if_only_one_control_run_finished() -> None:
    assert said(read(Counting(), padded)[1:]) == [("reads-differ", "unproven")]


@pytest.mark.parametrize("dataset", [Scaled, Cached])
def test_a_dataset_whose_items_change_when_they_are_read_is_an_error(dataset: type[Texts]) -> None:
    assert said(read(dataset(), padded)) == [("reads-differ", "error")]


def test_getitems_and_collate_functions_of_several_samples_are_read_again_without_findings() -> None:
    class Fetching(Texts):
        def __getitems__(self, indices: list[int]) -> Any:
            return [super(Fetching, self).__getitem__(index) for index in indices]

    def of_several(rows: list[Any]) -> Any:
        assert len(rows) > 1
        return padded(rows)

    assert said(read(Fetching(), padded)) == []
    assert said(read(Fetching(), of_several)) == []
    numbers = DataLoader(Indexable(), batch_size=None, sampler=[[0, 1, 2], [3, 4]])  # type: ignore[arg-type]
    record(numbers, keep=4)
    assert [tagged.indices for tagged in numbers] == [[0, 1, 2], [3, 4]]
    assert [pair.first == pair.again for pair in reread(numbers, 0.0) if hasattr(pair, "again")] == [True]


class Indexable(Dataset[Any]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, indices: Any) -> Any:
        return {"x": np.arange(10).reshape(5, 2)[indices]}


#: The samples and labels of a worker of a rank, by (rank, ranks, worker, workers, epoch).
Shares = Callable[[int, int, int, int, int], tuple[Sequence[int], Sequence[int]]]
ORDER = range(120)


def alike(rank: int, ranks: int, worker: int, workers: int, epoch: int) -> Any:
    mine = ORDER[rank * workers + worker :: ranks * workers]
    return mine, mine


def by_rank_only(rank: int, ranks: int, worker: int, workers: int, epoch: int) -> Any:
    return alike(rank, ranks, worker, workers, epoch)[0], ORDER[rank::ranks]


def in_runs(rank: int, ranks: int, worker: int, workers: int, epoch: int) -> Any:
    mine = alike(rank, ranks, worker, workers, epoch)[0]
    return mine, ORDER[(rank * workers + worker) * len(mine) :]


def rolled(rank: int, ranks: int, worker: int, workers: int, epoch: int) -> Any:
    mine = alike(rank, ranks, worker, workers, epoch)[0]
    return mine, np.roll(mine, 12 * rank).tolist()


def remixed(share: Shares) -> Shares:
    """The same in another order in each epoch."""

    def mixed(rank: int, ranks: int, worker: int, workers: int, epoch: int) -> Any:
        order = random.Random(epoch).sample(ORDER, len(ORDER))
        samples, labels = share(rank, ranks, worker, workers, epoch)
        return [order[sample] for sample in samples], [order[label] for label in labels]

    return mixed


Fields = Callable[[int, int, int, int], dict[str, Any]]


def streams(share: Shares, fields: Fields) -> tuple[list[RunLog], list[RunLog]]:
    """A run of two ranks and two workers and one of three ranks, and the control."""

    def steps(rank: int, ranks: int, workers: int, epoch: int) -> Iterator[Step]:
        shares = [share(rank, ranks, worker, max(1, workers), epoch) for worker in range(max(1, workers))]
        for start in range(0, len(shares[0][0]), 10):
            for worker, (samples, labels) in enumerate(shares):
                places = [*enumerate(zip(samples, labels, strict=False))][start : start + 10]
                rows = [fields(sample, label, place, rank) for place, (sample, label) in places]
                batch = {name: np.array([row[name] for row in rows]) for name in rows[0]}
                ids = batch.pop("sample_id", None)
                yield Step(
                    rows=len(rows),
                    ids=None if ids is None else ids.tolist(),
                    fields=shapes.hashed(batch),
                    ends=shapes.all_ends(batch),
                    worker=worker if workers else None,
                )

    def log(this: Job) -> RunLog:
        ranks = [
            RankLog(
                rank,
                epochs=[
                    EpochLog(epoch, [*steps(rank, this.ranks, this.workers, epoch)], whole=True)
                    for epoch in range(this.epochs)
                ],
            )
            for rank in range(this.ranks)
        ]
        return RunLog(this, ranks)

    runs = [log(job()), log(job(ranks=3, workers=0, epochs=2))]
    return [log(job(ranks=1, workers=0))] * 2, runs


def image(sample: int) -> Any:
    return np.full((2, 2), sample)


LABELS: dict[str, Callable[[int], Any]] = {
    "classes": lambda label: label % 5,
    "sorted classes": lambda label: label // 25,
    "texts": lambda label: f"class {label * 31 % 7}",
    "floats": lambda label: label * 7 % 11 / 2,
}


@pytest.mark.parametrize("share", [by_rank_only, in_runs, rolled], ids=lambda share: share.__name__)
@pytest.mark.parametrize(
    ("name", "ids", "is_remixed"),
    [*((name, False, False) for name in LABELS), ("classes", True, False), ("texts", True, True)],
)
def test_labels_that_are_sharded_differently_from_their_images_are_found(
    share: Shares, name: str, ids: bool, is_remixed: bool
) -> None:
    def fields(sample: int, label: int, place: int, rank: int) -> dict[str, Any]:
        row = {"x": image(sample), "y": LABELS[name](label)}
        return row | {"sample_id": sample} if ids else row

    for dealt in (share, alike):
        controls, runs = streams(remixed(dealt) if is_remixed else dealt, fields)
        findings = [*rows_apart(controls, runs)]
        assert {finding.code for finding in findings} == ({"rows-come-apart"} if dealt is share else set())


#: Fields that depend on the rank, on the place in a stream or on a dataset beside, and on nothing else.
BESIDE: dict[str, Fields] = {
    "counters": lambda sample, label, place, rank: {"place": place, "rank": rank, "step": place // 10},
    "the row of a batch": lambda sample, label, place, rank: {"row": place % 10},
    "the first of a stream": lambda sample, label, place, rank: {"first": place == 0},
    "noise that is the same in each worker": lambda sample, label, place, rank: {"t": hash((place, 0.5))},
    "flags seeded by rank and sample": lambda sample, label, place, rank: {"flip": hash((rank, sample, 1)) % 2},
    "another dataset": lambda sample, label, place, rank: {"other": 1000 + label % 60, "kind": label % 60 % 4},
}


@pytest.mark.parametrize(
    ("name", "is_remixed"),
    [
        (name, is_remixed)
        for name in BESIDE
        for is_remixed in (False, True)
        if name != "another dataset" or not is_remixed
    ],
)
def test_counters_noise_and_other_fields_independent_of_the_sample_have_no_findings(
    name: str, is_remixed: bool
) -> None:
    def fields(sample: int, label: int, place: int, rank: int) -> dict[str, Any]:
        return {"x": image(sample), "y": sample % 7} | BESIDE[name](sample, label, place, rank)

    share = by_rank_only if name == "another dataset" else alike
    assert [*rows_apart(*streams(remixed(share) if is_remixed else share, fields))] == []


def drawn(order: list[int], at: int) -> random.Random:
    return random.Random(hash((*order, at)))


#: The fields of a row, by the order of its epoch and the place of the row in it.
ByPlace = Callable[[list[int], int], dict[str, Any]]
EXCHANGED: dict[str, ByPlace] = {
    "images of the next batch": lambda order, at: {
        "x": image(order[at + 10 if at < 110 else at]),
        "y": order[at] % 7,
    },
    "images of the row before": lambda order, at: {"x": image(order[at - 1]), "y": order[at] % 7},
    "both of the row before": lambda order, at: {"x": image(order[at - 1]), "y": order[at - 1] % 7},
    "labels of the row before": lambda order, at: {"x": image(order[at]), "y": order[at - 1] % 7},
}
NOT_EXCHANGED: dict[str, ByPlace] = {
    "all of one sample": lambda order, at: {"x": image(order[at]), "y": order[at] % 7},
    "random images": lambda order, at: {"x": image(drawn(order, at).random()), "y": order[at] % 7},
    "two views": lambda order, at: {"x": image(order[at] + 1000 * (order[0] % 2)), "y": order[at] % 7},
    "flags": lambda order, at: {"x": image(order[at]), "flip": drawn(order, at).random() < 0.5},
    "counters": lambda order, at: {"place": at, "row": at % 10, "y": order[at] % 7},
    "a partner": lambda order, at: {"x": image(order[at]), "other": image(order[at - 1])},
    "a partner's label": lambda order, at: {"x": image(order[at]), "y": order[at] % 7, "other": order[at - 1] % 7},
    "a second stream": lambda order, at: {
        "x": image(order[at]),
        "other": image(1000 + order[-at]),
        "kind": order[-at] % 9,
    },
    "a second stream beside random images": lambda order, at: {
        "x": image(drawn(order, at).random()),
        "other": image(1000 + order[-at]),
        "kind": order[-at] % 9,
    },
    "rows of a batch in random order": lambda order, at: {
        "y": order[at] % 7,
        "order": drawn(order, at // 10).sample(range(10), 10)[at % 10],
    },
}


@pytest.mark.parametrize("name", [*EXCHANGED, *NOT_EXCHANGED])
def test_values_exchanged_between_ids_are_an_error_and_random_or_partner_values_are_not(name: str) -> None:
    fields = (EXCHANGED | NOT_EXCHANGED)[name]

    def epoch(index: int) -> EpochLog:
        order = random.Random(index).sample(ORDER, len(ORDER))
        steps = []
        for start in range(0, len(order), 10):
            rows = [fields(order, at) for at in range(start, start + 10)]
            batch = {field: np.array([row[field] for row in rows]) for field in rows[0]}
            ids = order[start : start + 10]
            hashed = shapes.hashed(batch | {"sample_id": np.array(ids)})
            steps.append(Step(rows=10, ids=[*ids], fields=hashed, ends=shapes.all_ends(batch)))
        return EpochLog(index, steps, whole=True)

    control = RunLog(job(ranks=1, workers=0), [RankLog(0, epochs=[epoch(index) for index in range(3)])])
    codes = {(finding.code, finding.severity) for finding in exchanged_by_epoch([control])}
    assert codes == ({("rows-come-apart", "error")} if name in EXCHANGED else set())
