"""What a batch looks like: ragged as padded, nested or lists; bytes and text as lists; tuples stay tuples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.loading.feeds import ENGINES, NAMES, Memory, Pair, Pairs, Tuples, Wrapped, feed, same, sample

from rankfeed import errors
from rankfeed.columns.columns import Columns
from rankfeed.columns.layout import infer_layout
from rankfeed.loading import Loader
from rankfeed.loading.collate import collate, collate_samples
from rankfeed.loading.device import to_device
from rankfeed.loading.state import encode_state
from rankfeed.plan import Cursor
from rankfeed.sources import from_dataset
from rankfeed.topology import Topology
from rankfeed.writer import write

every_engine = pytest.mark.parametrize("engine", ENGINES, ids=NAMES)


def rows_of(name: str, ids: torch.Tensor) -> list[Any]:
    return [sample(sample_id)[name] for sample_id in ids.tolist()]


def test_ragged_columns_are_padded_with_zeros_and_have_lengths() -> None:
    for batch in feed():
        for name in ("x", "tokens"):
            rows = rows_of(name, batch["id"])
            assert batch[f"{name}_lengths"].tolist() == [len(row) for row in rows]
            assert batch[name].shape[1] == max(len(row) for row in rows)
            for padded, row in zip(batch[name], rows, strict=True):
                assert np.array_equal(padded[: len(row)], row)
                assert not padded[len(row) :].any()


@pytest.mark.parametrize("multiple", [1, 2, 3, 8, 500])
def test_pad_to_pads_ragged_columns_to_a_multiple(multiple: int) -> None:
    loader, plain = feed(pad_to=multiple), feed()
    for batch, without in zip(loader, plain, strict=True):
        for name in ("x", "tokens"):
            longest = without[name].shape[1]
            assert batch[name].shape[1] == -(-longest // multiple) * multiple
            assert torch.equal(batch[name][:, :longest], without[name])
            assert not batch[name][:, longest:].any()
            assert torch.equal(batch[f"{name}_lengths"], without[f"{name}_lengths"])
    assert loader.stats()["padding_share"] >= plain.stats()["padding_share"]


@pytest.mark.parametrize("wrong", [{"pad_to": 0}, {"pad_to": 2.5}, {"pad_to": 8, "ragged": "list"}])
def test_an_invalid_pad_to_raises_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.RankfeedError, match="pad_to"):
        feed(**wrong)


def test_pad_to_reduces_the_shapes_that_torch_compile_compiles() -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def graphs(**options: Any) -> int:
        torch.compiler.reset()
        compiled.clear()
        model = torch.compile(lambda x, lengths: x.sum() + lengths.sum(), backend=backend, dynamic=False)
        for batch in feed(size=48, batch_size=4, shuffle="global", **options):
            model(batch["x"], batch["x_lengths"])
        return len(compiled)

    assert graphs(pad_to=8) == 1
    assert graphs() > 1


@pytest.mark.parametrize("ragged", ["nested", "list"])
def test_ragged_columns_become_nested_tensors_or_lists_as_the_ragged_option_says(ragged: str) -> None:
    for batch in feed(ragged=ragged):
        assert "x_lengths" not in batch
        for name in ("x", "tokens"):
            if ragged == "nested":
                assert batch[name].is_nested
                assert batch[name].layout == torch.jagged
            else:
                assert isinstance(batch[name], list)
            pieces = list(batch[name].unbind() if ragged == "nested" else batch[name])
            assert all(map(np.array_equal, pieces, rows_of(name, batch["id"])))
            assert pieces[0].dtype == (torch.float32 if name == "x" else torch.int32)


def test_dense_columns_are_tensors_of_their_dtype_and_text_and_bytes_are_lists() -> None:
    for batch in feed():
        assert (batch["y"].dtype, batch["point"].dtype) == (torch.int64, torch.float32)
        assert batch["y"].tolist() == [sample_id * 10 for sample_id in batch["id"].tolist()]
        assert np.array_equal(batch["point"], np.stack(rows_of("point", batch["id"])))
        assert batch["raw"] == rows_of("raw", batch["id"])
        assert batch["name"] == rows_of("name", batch["id"])


def backwards(batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"raw": batch["raw"][::-1]}


@every_engine
@pytest.mark.parametrize("transform", [None, dict], ids=["columns", "samples"])
@pytest.mark.parametrize("size", [3, 120_000])  # also of less and more than what is sent by pickle from workers
def test_bytes_as_view_returns_uint8_arrays_that_stay_intact_while_kept(
    engine: dict[str, Any], transform: Any, size: int, tmp_path: Path
) -> None:
    rows = ({"raw": bytes([i]) * (i * size // 60), "name": str(i)} for i in range(60))
    source = write(rows, tmp_path / "data", progress=False)
    options: dict[str, Any] = {"transform": transform, "shuffle": True, "topology": Topology(), **engine}
    loader = Loader(source, 8, bytes_as="view", batch_transform=backwards, **options)
    batches = list(loader)  # kept: a buffer is not used again while a view of it exists
    for batch, plain in zip(batches, Loader(source, 8, **options), strict=True):
        assert [bytes(each) for each in batch["raw"]] == plain["raw"][::-1]
        assert {(type(each), each.dtype.name) for each in batch["raw"]} == {(np.ndarray, "uint8")}
        assert batch["name"] == plain["name"]
    kept = batches[2]["raw"][3]
    expected = bytes(kept)
    batches.clear()
    for _ in range(3):
        list(loader)
    assert bytes(kept) == expected


def test_an_unknown_bytes_as_raises_argument_error() -> None:
    with pytest.raises(errors.ArgumentError, match="bytes_as"):
        feed(bytes_as="array")


@every_engine
def test_tuple_samples_of_a_dataset_are_collated_into_tuples(engine: dict[str, Any]) -> None:
    batches = list(Loader(Wrapped(Tuples(10)), 4, topology=Topology(), **engine))
    for batch in batches:
        assert type(batch) is tuple
        pixels, labels, (halves, names) = batch
        assert pixels.shape == (len(labels), 2)
        assert [float(name) / 2 for name in names] == halves.tolist()
    assert [label for batch in batches for label in batch[1].tolist()] == list(range(10))


@every_engine
def test_named_tuple_samples_are_collated_into_the_same_named_tuple_type(engine: dict[str, Any]) -> None:
    for batch in Loader(Wrapped(Pairs(6)), 2, device="cpu", topology=Topology(), **engine):
        assert type(batch) is Pair
        assert torch.equal(batch.image[:, 0], batch.label.float())


def test_a_collate_fn_receives_the_samples_and_the_id_column_is_added() -> None:
    def longest(samples: list[dict[str, Any]]) -> dict[str, Any]:
        return {"longest": max(len(sample["tokens"]) for sample in samples)}

    for batch, usual in zip(feed(collate_fn=longest, columns=["tokens"]), feed(), strict=True):
        assert batch["longest"] == int(usual["tokens_lengths"].max())
        assert same(batch["id"], usual["id"])


def test_tuple_batches_with_padding_rows_raise_transform_error_on_every_rank() -> None:
    state = encode_state(Cursor(0, 9, 3), {"samples": 10, "shuffle": "none", "seed": 0, "lanes": 1}, "")
    for rank in range(3):  # rank 2 has a sample, the others stand-ins: all must stop
        loader = Loader(Wrapped(Tuples(10)), 1, topology=Topology(rank=rank, world_size=3))
        loader.load_state_dict(state)
        with pytest.raises(errors.TransformError, match=r"'valid' cannot be added"):
            list(loader)


def test_every_rank_has_the_valid_mask_at_a_step_with_padding_rows() -> None:
    state = encode_state(Cursor(0, 9, 3), {"samples": 10, "shuffle": "none", "seed": 0, "lanes": 1}, "")
    masks = []
    for rank in range(3):
        source = from_dataset([{"x": index} for index in range(10)])
        loader = Loader(source, 1, topology=Topology(rank=rank, world_size=3), id_column="id")
        state["source"] = source.fingerprint
        loader.load_state_dict(state)
        masks += [batch["valid"].tolist() for batch in loader]
    assert masks == [[False], [False], [True]]


def test_keys_whose_lengths_fields_would_collide_raise_argument_error() -> None:
    samples = [{1: [0], "1": [0, 0]}] * 2
    with pytest.raises(errors.ArgumentError, match="1_lengths"):
        collate_samples(samples, infer_layout(samples))


def test_nested_tensors_in_samples_raise_source_error() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    loader = Loader(from_dataset([{"x": nested}] * 3), 2, topology=Topology())
    with pytest.raises(errors.SourceError, match="'x' cannot be collated"):
        next(iter(loader))


def test_source_columns_with_names_reserved_by_the_loader_raise_argument_error_at_construction() -> None:
    source = Memory(5)
    source.fields = {**Memory.fields, "x_lengths": Memory.fields["y"], "valid": Memory.fields["y"]}  # type: ignore[misc]
    for options in ({}, {"ragged": "list", "tail": "pad"}):
        with pytest.raises(errors.ArgumentError, match="exists already"):
            Loader(source, **options)  # type: ignore[arg-type]
    Loader(source, ragged="list")
    Loader(source, columns=["x", "y"], tail="pad")


def test_the_last_fields_of_a_batch_are_the_sample_ids_and_the_valid_mask() -> None:
    loader = feed(tail="pad")
    batch = next(iter(loader))
    assert batch["id"].tolist() == loader.plan.sample_ids(0, range(len(batch["id"]))).tolist()
    assert list(batch)[-2:] == ["id", "valid"]
    assert batch["id"].dtype == torch.int64
    assert batch["valid"].dtype == torch.bool


def test_transformed_samples_may_hold_tensors_numbers_lists_and_strings() -> None:
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        return {
            "tensor": torch.ones(2, requires_grad=True),
            "number": 1.5,
            "flag": True,
            "list": [1, 2],
            "text": "a",
            "ragged": torch.arange(sample["y"] // 10 + 1),
        }

    batch = next(iter(feed(transform=transform)))
    assert batch["tensor"].shape == (4, 2)
    assert not batch["tensor"].requires_grad
    assert batch["number"].dtype == torch.float64
    assert batch["flag"].dtype == torch.bool
    assert batch["list"].tolist() == [[1, 2]] * 4
    assert batch["text"] == ["a"] * 4
    assert batch["ragged_lengths"].tolist() == [sample_id + 1 for sample_id in batch["id"].tolist()]


def test_bfloat16_tensors_are_stacked_by_torch_and_mixed_dtypes_raise_naming_the_sample() -> None:
    batch = next(iter(feed(transform=lambda sample: {"y": torch.ones(2, dtype=torch.bfloat16)})))
    assert (batch["y"].dtype, batch["y"].shape) == (torch.bfloat16, (4, 2))

    def changing(sample: dict[str, Any]) -> dict[str, Any]:
        return {"y": torch.ones(2, dtype=torch.float32 if sample["y"] == 10 else torch.bfloat16)}

    with pytest.raises(errors.TransformError, match=r"'y', sample 1,[\s\S]*"):
        list(feed(transform=changing))


def test_a_ragged_column_has_lengths_even_if_all_rows_of_a_batch_have_the_same_length() -> None:
    (batch, *_) = Loader(Memory(2), 1, columns=["x"], topology=Topology())
    assert "x_lengths" in batch


def test_a_ragged_element_of_a_tuple_becomes_a_pair_of_padded_tensor_and_lengths() -> None:
    ragged = Wrapped([(torch.ones(index), index) for index in range(1, 5)])
    (padded, lengths), numbers = next(iter(Loader(ragged, 2, topology=Topology())))
    assert (padded.tolist(), lengths.tolist(), numbers.tolist()) == ([[1, 0], [1, 1]], [1, 2], [1, 2])


def test_collate_of_numbers_strings_dicts_and_lists_follows_torch_default_collate() -> None:
    def collated(samples: list[Any]) -> Any:
        return collate_samples(samples, infer_layout(samples))[0]

    assert collated([1, 2]).tolist() == [1, 2]
    assert collated(["a", "b"]) == ["a", "b"]
    assert collated([{"a": (1, "x")}, {"a": (3, "y")}])["a"][0].tolist() == [1, 3]
    assert [part.tolist() for part in collated([[torch.ones(1), 2], [torch.zeros(1), 4]])] == [[[1], [0]], [2, 4]]


def test_a_ragged_column_whose_rows_are_all_empty_is_collated() -> None:
    rows = Columns.from_samples([{"x": []}, {"x": []}], Memory.fields)
    batch, _ = collate(rows, "pad")
    assert batch["x"].shape[:2] == (2, 0)
    assert batch["x_lengths"].tolist() == [0, 0]
    assert [len(row) for row in collate(rows, "list")[0]["x"]] == [0, 0]


def test_to_device_moves_a_packed_sequence_and_keeps_batch_sizes_on_the_cpu() -> None:
    sequence = torch.nn.utils.rnn.pack_sequence([torch.arange(3.0), torch.arange(2.0)])
    moved = to_device({"x": sequence}, torch.device("meta"))["x"]
    assert moved.data.device.type == "meta"
    assert moved.batch_sizes.tolist() == [2, 2, 1]  # on the CPU
