"""LitData's StreamingDataset, in an environment of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.zoo.data import BATCH, ROWS, folder, sample


def numbered(index: int) -> dict[str, Any]:
    return {"sample_id": index, "x": float(sample(index)["x"])}


def chunks() -> str:
    def write(path: Path) -> None:
        import litdata

        litdata.optimize(numbered, list(range(ROWS)), str(path / "chunks"), chunk_size=10, num_workers=1)

    return str(folder("litdata", write) / "chunks")


def streaming(num_workers: int, multiprocessing_context: Any) -> Any:
    """As its documentation says: sound."""
    import litdata

    dataset = litdata.StreamingDataset(chunks(), shuffle=True, drop_last=False)
    return litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=num_workers)


def sampled_again(num_workers: int, multiprocessing_context: Any) -> Any:
    """Its data set is a share already, and a plain DataLoader shuffles nothing: sound, one order of workers."""
    import litdata
    from torch.utils.data import DataLoader

    dataset = litdata.StreamingDataset(chunks(), shuffle=False, drop_last=False)
    context = multiprocessing_context if num_workers else None
    return DataLoader(dataset, BATCH, num_workers=num_workers, multiprocessing_context=context)


def drops_the_rest(num_workers: int, multiprocessing_context: Any) -> Any:
    """Batches of 7 with drop_last, which is its default on several ranks: the rest of each worker never comes."""
    import litdata

    dataset = litdata.StreamingDataset(chunks(), shuffle=True)
    return litdata.StreamingDataLoader(dataset, batch_size=7, num_workers=num_workers, drop_last=True)
