"""Calls public functions with wrong and unusual values, and says which of them ended in a foreign exception.

A case is a target (a public function or method), one of its parameters and a value of the pool; all other
arguments are valid. Its outcome is right if the call raises a RankfeedError, or returns a result that can be used:
batches are read, sources fetched. Anything else is a failure: another exception, a wrong result, or no result
within the limit.
"""

from __future__ import annotations

import copy
import datetime
import decimal
import enum
import fractions
import inspect
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tests.support.tables import write_table

import rankfeed as rf
from rankfeed.errors import RankfeedError, safe_repr

#: Seconds that one case may take. Those that finish take milliseconds.
LIMIT = 20.0


class UserError(Exception):
    """Raised by the hostile objects of the pool, not by rankfeed."""


class Hang(BaseException):
    """Raised by the alarm; no ``except Exception`` can swallow it."""


class Unprintable(Exception):
    """An exception whose text cannot be had."""

    def __str__(self) -> str:
        raise UserError("no text")

    __repr__ = __str__


class Hostile:
    """Every protocol that a check may try ends in an exception."""

    def _refuse(self, *_: Any) -> Any:
        raise UserError("hostile")

    __str__ = __repr__ = __len__ = __iter__ = __bool__ = __index__ = __float__ = __int__ = __fspath__ = _refuse
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __getitem__ = __contains__ = __call__ = __array__ = _refuse
    __hash__ = object.__hash__


class Shrinking:
    """A Dataset that has fewer samples than its length says."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, int]:
        if index == 2:
            raise IndexError(index)
        return {"x": index}


class Stream(torch.utils.data.IterableDataset[dict[str, int]]):
    """An iterable Dataset."""

    def __iter__(self) -> Iterator[dict[str, int]]:
        return iter([{"x": 1}])


#: What a function of the user's may raise, or a call of it with arguments that it does not take.
OF_A_USER = (UserError, Unprintable, TypeError)


class Text(str):
    """A subclass of str."""


class Number(int):
    """A subclass of int."""


class Level(enum.IntEnum):
    """An int with a name."""

    TWO = 2


def raises(*_: Any, **__: Any) -> Any:
    """A function of the user's that fails, with an exception that has no text."""
    raise Unprintable


def nested(depth: int) -> list[Any]:
    """A list in a list in a list ..."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def endless() -> list[Any]:
    """A list that contains itself."""
    value: list[Any] = []
    value.append(value)
    return value


#: By name, so that a case can be repeated; made afresh for each case, since some are used up.
POOL: dict[str, Callable[[], Any]] = {
    **{
        repr(value): (lambda value=value: copy.copy(value))
        for value in (
            *(None, True, False, 0, 1, -1, 2, 3, 4, 7, 1.0, 1.9, 0.5, -0.5, math.nan, math.inf, -math.inf, 1j),
            *(2**31, 2**40, 2**63, 2**64, 2**70, -(2**63), -(2**70), 1e308, 1e-308),
            *("", "1", "x", "None", "True", "a\0b", "\ud800", "x y", "\n", "é", "..", ".", "no/such", "s3://b/k"),
            *("file:///etc/passwd", "/dev/null", "/dev/null/x", "*", "{0..3}", "[", "~", "https://h/x", "-"),
            *(b"", b"x", b"\xff", bytearray(b"x"), [], [0], [1, 2], [1, 1], [-1], [99], ["x"], ["x", "x"], [""]),
            *([None], [True], [1.5], ["x", 1], [[1]], [b"x"], (), (0,), (1, 2), ("x",), {}, {"x": 1}, {1: 2}),
            *({"": 1}, set(), {1}, frozenset({1}), range(0), range(3), range(5, 0, -1), slice(0, 2), slice("a")),
            *({"x": {}}, {"x": "int64"}, {"x": None}, [{}], [{"x": 1}], [{"x": 1}, {"y": 2}], Ellipsis),
            *(np.True_, np.uint8(4), np.int8(-1), np.int64(2), np.uint64(2**64 - 1), np.float64("nan")),
            *(np.float32(0.5), np.longdouble(2), np.datetime64("2020-01-01"), np.str_("x"), np.ma.masked),
            *(np.array(3), np.array([]), np.array([0, 1]), np.array(["x"]), np.array([True])),
            *(np.zeros((2, 2)), np.array([2**63], np.uint64), torch.empty(2, device="meta"), torch.int64),
            *(torch.tensor(2), torch.tensor([0, 1]), torch.tensor(True), torch.tensor(0.5)),
            *(torch.device("cpu"), torch.device("cuda:99"), decimal.Decimal(1), fractions.Fraction(1, 2)),
            *(datetime.timedelta(seconds=1), datetime.date(2020, 1, 1), Level.TWO, Path("no/such")),
        )
    },
    "10**5000": lambda: 10**5000,
    "'x' * 100000": lambda: "x" * 100_000,
    "np.array([object()])": lambda: np.array([object()]),
    "Text('x')": lambda: Text("x"),
    "Number(2)": lambda: Number(2),
    "memoryview": lambda: memoryview(b"x"),
    "nested(100_000)": lambda: nested(100_000),
    "endless()": endless,
    "iter([1])": lambda: iter([1]),
    "generator of dicts": lambda: ({"x": index} for index in range(3)),
    "itertools.count()": itertools.count,
    "lambda: None": lambda: lambda: None,
    "lambda x: x": lambda: lambda x: x,
    "lambda x, rng: None": lambda: lambda x, rng: None,
    "lambda a, b, c: a": lambda: lambda a, b, c: a,
    "raises": lambda: raises,
    "len": lambda: len,
    "int": lambda: int,
    "dict": lambda: dict,
    "object()": object,
    "type": lambda: type,
    "math": lambda: math,
    "re.compile('x')": lambda: re.compile("x"),
    "threading.Lock()": threading.Lock,
    "ValueError('x')": lambda: ValueError("x"),
    "Unprintable()": Unprintable,
    "Unprintable": lambda: Unprintable,
    "Hostile()": Hostile,
    "Hostile": lambda: Hostile,
    "[Hostile()]": lambda: [Hostile()],
    "{'x': Hostile()}": lambda: {"x": Hostile()},
    "Shrinking()": Shrinking,
    "SimpleNamespace(rank=0)": lambda: SimpleNamespace(rank=0, world_size=1),
    "rf.Topology": lambda: rf.Topology,
    "rf.Topology()": rf.Topology,
    "rf.Topology(1, 2)": lambda: rf.Topology(rank=1, world_size=2),
    "rf.Plan": lambda: rf.Plan,
    "rf.Plan(10)": lambda: rf.Plan(10),
    "rf.Plan(3)": lambda: rf.Plan(3),
    "rf.Source": lambda: rf.Source,
    "from_dataset": lambda: rf.from_dataset([{"x": 1}]),
    "from_iterable": lambda: rf.from_iterable([{"x": 1}]),
    "torch.utils.data.DataLoader": lambda: torch.utils.data.DataLoader([1, 2]),  # type: ignore[arg-type]
    "Stream()": Stream,
    "torch.utils.data.Dataset()": torch.utils.data.Dataset,
    "a state": lambda: {"rankfeed": 1, "epoch": 0, "position": 0, "steps": 0, "plan": np.int64(3)},
    "another state": lambda: {"rankfeed": np.int64(1), "epoch": 2**70, "position": -1, "steps": 0, "plan": {}},
}


@dataclass
class Target:
    """A public function with valid arguments.

    Args:
        call: what is called.
        valid: makes valid arguments, by name, in a new empty working directory.
        use: uses the result; an exception of rankfeed's is a right outcome here too. Told the fuzzed parameter.
        parameters: names to fuzz; those of the signature if empty.
        allowed: exceptions besides RankfeedError that are right, such as IndexError for an index out of range.
        amounts: parameters that say how much is counted: of them 2**31 takes minutes, and rightly so.
    """

    call: Callable[..., Any]
    valid: Callable[[], dict[str, Any]] = dict
    use: Callable[[Any, str], object] = lambda result, name: None
    parameters: tuple[str, ...] = ()
    allowed: tuple[type[BaseException], ...] = ()
    skipped: frozenset[str] = field(default_factory=frozenset)
    amounts: frozenset[str] = field(default_factory=frozenset)

    @property
    def names(self) -> list[str]:
        """The parameters that are fuzzed."""
        if self.parameters:
            return list(self.parameters)
        parameters = inspect.signature(self.call).parameters.values()
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        return [
            parameter.name
            for parameter in parameters
            if parameter.kind not in kinds and parameter.name not in ("self", *self.skipped)
        ]


def cases(target: Target, every: int = 1, offset: int = 0) -> list[tuple[str, str]]:
    """Parameter and name of the value: all of them, or each ``every``-th, beginning elsewhere for each target."""
    large = (repr(2**31), repr(2**40))
    pairs = [
        case
        for case in itertools.product(target.names, POOL)
        if case[0] not in target.amounts or case[1] not in large
    ]
    return pairs[offset % every :: every]


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """An exception in the main thread after so long."""

    def over(*_: object) -> None:
        raise Hang(f"no result after {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def failure(target: Target, parameter: str, value: str) -> str | None:
    """What is wrong with the outcome of one case; None if it is right."""
    folder = Path.cwd()
    work = folder / "case" / "of" / "many"
    shutil.rmtree(folder / "case", ignore_errors=True)
    work.mkdir(parents=True)
    os.chdir(work)
    try:
        arguments = target.valid()
        with limited(LIMIT), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                target.use(target.call(**{**arguments, parameter: POOL[value]()}), parameter)
            except (RankfeedError, *target.allowed) as error:
                if isinstance(error, RankfeedError) and not (error.summary and str(error).isprintable):
                    return f"an empty message: {error!r}"
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        with suppress(Exception):
            text = str(error)[:200]
            return f"{type(error).__name__}: {text} at {last.filename}:{last.lineno}"
        return f"{type(error).__name__} at {last.filename}:{last.lineno}"
    finally:
        os.chdir(folder)
    return None


def rows(count: int = 10) -> rf.Source:
    """A source whose samples can be told apart, with a dense and a ragged column."""
    return rf.from_dataset([{"x": index, "y": np.arange(index % 3)} for index in range(count)])


#: Parameters of a loader on which its samples depend.
_CHANGES_SAMPLES = {
    "source",
    "topology",
    "tail",
    "columns",
    "transform",
    "batch_transform",
    "collate_fn",
    "factory",
}


def read(loader: Any, parameter: str = "") -> None:
    """Read an epoch, and compare what came with what should."""
    batches = list(itertools.islice(loader, 100))
    if parameter not in _CHANGES_SAMPLES:
        counts = Counter(x for batch in batches for x in batch["x"].tolist())
        assert counts == Counter(range(10)), counts


def take(items: Any, parameter: str = "") -> None:
    """Read the first items."""
    list(itertools.islice(items, 20))


def to_text(result: Any, parameter: str = "") -> None:
    """Print the result."""
    str(result)


def fetch(source: Any, parameter: str = "") -> None:
    """Read a source wholly."""
    assert isinstance(source, rf.Source), source
    source.fingerprint  # noqa: B018
    source.fields  # noqa: B018
    source.fetch(range(len(source)))
    assert int(np.sum(source.blocks)) == len(source) > 0


def build(staging: Path) -> None:
    """Write something."""
    (staging / "data.txt").write_text("hello")


def _schedule() -> rf.Schedule:
    return rf.Schedule(rf.Plan(10), batch_size=2, topology=rf.Topology())


def _mesh() -> Any:
    return SimpleNamespace(
        mesh_dim_names=("dp", "tp"), mesh=np.arange(4).reshape(2, 2), get_coordinate=lambda: [1, 0]
    )


def _ledgers() -> dict[str, Any]:
    for _ in rf.Loader(rows(), audit="ledgers"):
        pass
    return {"folder": "ledgers"}


def _files(name: str) -> Callable[[], dict[str, Any]]:
    """Data of a format, written into the working directory."""

    def make() -> dict[str, Any]:
        path = Path(f"rows.{name}")
        if name == "npz":
            np.savez(path, x=np.arange(10))
        elif name == "packed":
            rf.write(({"x": row} for row in range(10)), path, progress=False)
        elif name == "tar":
            write_table(pa.table({"cls": range(10)}), path)
        else:
            write_table(pa.table({"x": range(10), "name": [f"row {row}" for row in range(10)]}), path)
        return {"uri": str(path)}

    return make


_SAMPLER = ("num_samples_or_source", "batch_size", "shuffle", "seed", "tail", "start", "topology")
_OPEN = ("uri", "columns", "format", "storage_options", "allow_pickle", "cache_dir")
_OPEN_TAR = ("decode", "missing", "duplicate_keys", "split", "index", "decompress")


def _lockstep(lockstep: Any, parameter: str) -> None:
    with lockstep:
        if lockstep.loader is not None:
            list(itertools.islice(lockstep, 20))


def _prepared(result: Any, parameter: str) -> None:
    if not isinstance(result, Path):
        result = result(build)()
    assert result.is_dir()


def _resumed(loader: Any) -> Callable[..., Any]:
    def load(state: Any) -> Any:
        loader.load_state_dict(state)
        return loader

    return load


def targets() -> dict[str, Target]:
    """All of rankfeed's public functions and classes, and the methods that users call."""
    from rankfeed.integrations import webdataset as wds

    source = rows()
    plan = rf.Plan(10, lanes=2, shuffle="window")
    stream = rf.from_iterable(lambda: ({"x": index, "y": np.arange(index % 3)} for index in range(10)))
    named: dict[str, Target] = {
        "Plan": Target(rf.Plan, lambda: {"blocks": [4, 6]}, lambda plan, _: plan.sample_ids(1, [0])),
        "Plan, windows": Target(
            rf.Plan, lambda: {"blocks": [4, 6], "shuffle": "window"}, lambda plan, _: plan.sample_ids(1, [0])
        ),
        "Plan.sample_ids": Target(plan.sample_ids, lambda: {"epoch": 0, "positions": [0]}),
        "Schedule": Target(
            rf.Schedule,
            lambda: {"plan": rf.Plan(10), "batch_size": 2, "topology": rf.Topology()},
            lambda schedule, _: [schedule.batch(step) for step in range(min(3, len(schedule)))],
        ),
        **{
            f"Schedule.{name}": Target(getattr(_schedule(), name), lambda: {"step": 0})
            for name in ("batch", "valid", "global_batch", "position_after")
        },
        "Topology": Target(rf.Topology),
        "Topology.detect": Target(rf.Topology.detect),
        "Topology.from_mesh": Target(rf.Topology.from_mesh, lambda: {"mesh": _mesh(), "dims": "dp"}),
        "Source.fetch": Target(source.fetch, lambda: {"sample_ids": [0]}),
        "Source.expect": Target(source.expect, lambda: {"sample_ids": [0]}),
        "Source.select": Target(source.select, lambda: {"chosen": lambda row: row["x"] > 3}, fetch),
        "Source.__getitem__": Target(source.__getitem__, allowed=(IndexError,)),
        "Source.__getitems__": Target(source.__getitems__, allowed=(IndexError,)),
        "from_dataset": Target(rf.from_dataset, lambda: {"dataset": [{"x": 1}]}, fetch),
        "from_iterable": Target(
            rf.from_iterable,
            lambda: {"factory": lambda: [{"x": 1}]},
            lambda made, parameter: read(rf.Loader(made), "factory"),
        ),
        "concat": Target(rf.concat, lambda: {"sources": [rows(3), rows(2)]}, fetch),
        "train_test_split": Target(rf.train_test_split, lambda: {"source": rows(100), "fractions": 0.4}),
        "Loader": Target(rf.Loader, lambda: {"source": rows(), "batch_size": 3}, read),
        "Loader, threads": Target(
            rf.Loader,
            lambda: {"source": rows(), "batch_size": 3, "num_workers": 2, "shuffle": True, "tail": "even"},
            read,
        ),
        "Loader, padded": Target(
            rf.Loader,
            lambda: {"source": rows(), "batch_size": 3, "tail": "pad", "shuffle": "window"},
            take,
            ("batch_size", "window", "lanes", "id_column", "collate_fn", "columns", "ragged", "pad_to"),
        ),
        "Loader of a stream": Target(
            rf.Loader, lambda: {"source": stream, "batch_size": 3}, read, skipped=frozenset({"source"})
        ),
        "Loader.set_epoch": Target(rf.Loader(rows()).set_epoch),
        "Loader.load_state_dict": Target(_resumed(rf.Loader(rows())), lambda: {"state": {}}),
        "stream.load_state_dict": Target(_resumed(rf.Loader(stream)), lambda: {"state": {}}),
        **{
            kind.__name__: Target(kind, lambda: {"num_samples_or_source": 10}, take, _SAMPLER)
            for kind in (rf.DistributedSampler, rf.DistributedBatchSampler)
        },
        "DistributedBatchSampler.set_epoch": Target(
            rf.DistributedBatchSampler(10).set_epoch, lambda: {"epoch": 1}
        ),
        "DistributedBatchSampler.state_dict": Target(rf.DistributedBatchSampler(10).state_dict),
        "DistributedBatchSampler.load_state_dict": Target(
            _resumed(rf.DistributedBatchSampler(10)), lambda: {"state": {}}
        ),
        "split": Target(
            rf.split,
            lambda: {"iterable": range(3)},
            take,
            allowed=(UserError, TypeError, NotImplementedError),  # of the user's own iterable, when it is iterated
        ),
        "prepare_once": Target(rf.prepare_once, lambda: {"path": "once", "build": build}, _prepared),
        "write": Target(
            rf.write,
            lambda: {"source_or_iterable": rows(), "dest": "rows.packed", "progress": False, "workers": 0},
            fetch,
            allowed=(UserError,),  # of the user's own iterable
            skipped=frozenset({"workers"}),  # processes: by themselves below
        ),
        "write, map": Target(
            rf.write,
            lambda: {"source_or_iterable": rows(), "dest": "p", "progress": False, "workers": 0, "map": dict},
            fetch,
            ("map", "map_batch", "seed", "order", "shard_bytes"),
        ),
        "audit": Target(
            rf.audit, lambda: {"loader": [{"sample_id": [0, 1]}], "max_steps": 9}, amounts=frozenset({"universe"})
        ),
        "verify_data": Target(
            rf.verify_data,
            lambda: {"path": _files("packed")()["uri"]},
            to_text,
            skipped=frozenset({"options"}),
            allowed=OF_A_USER,  # of the function that shows progress
        ),
        "verify_run": Target(rf.verify_run, _ledgers, to_text, allowed=OF_A_USER),
        "Lockstep": Target(
            rf.Lockstep,
            lambda: {"loader": [[1], [2]]},
            _lockstep,
            allowed=(UserError, TypeError, NotImplementedError),  # of the user's own loader, when it is iterated
        ),
        "watch": Target(rf.watch, lambda: {"loader": rf.Loader(rows())}, lambda watch, _: watch.close()),
        "RankfeedError": Target(RankfeedError, lambda: {"summary": "x"}, to_text),
        "open, parquet": Target(rf.open, _files("parquet"), fetch, (*_OPEN, "nulls", "cache_bytes")),
        "open, arrow": Target(
            rf.open, _files("arrow"), fetch, ("columns", "nulls", "cache_bytes", "unended", "shapes")
        ),
        "open, csv": Target(rf.open, _files("csv"), fetch, ("columns", "nulls", "delimiter", "types")),
        "open, jsonl": Target(rf.open, _files("jsonl"), fetch, ("columns", "nulls", "types")),
        "open, npz": Target(rf.open, _files("npz"), fetch, ("columns", "allow_pickle", "cache_dir")),
        "open, packed": Target(rf.open, _files("packed"), fetch, ("columns", "allow_pickle", "cache_dir")),
        "open, tar": Target(rf.open, _files("tar"), fetch, ("columns", "allow_pickle", "cache_dir", *_OPEN_TAR)),
        "webdataset.NodeSplitter": Target(wds.NodeSplitter, use=lambda splitter, _: list(splitter(["a", "b"]))),
        "webdataset.WorkerSplitter": Target(wds.WorkerSplitter),
        "webdataset.ShardedSamples": Target(
            wds.ShardedSamples, lambda: {"urls_or_source": rows(), "batch_size": 2}, take
        ),
        "webdataset.Resampled": Target(wds.Resampled, lambda: {"urls_or_source": rows(), "batch_size": 2}, take),
        "webdataset.ShardedSamples.share": Target(wds.ShardedSamples(rows(), 2).share, lambda: {"num_workers": 4}),
    }
    return {**named, **_commands(), **_of_frameworks()}


def _command(name: str, options: str, *arguments: str) -> Target:
    """A command of the command line, run in this process; values that are no text are given as their repr."""
    from typer.testing import CliRunner

    from rankfeed.cli.app import app

    def call(**given: Any) -> None:
        texts = {key: value if isinstance(value, str) else safe_repr(value) for key, value in given.items()}
        named = [text for key, value in texts.items() if key.startswith("--") for text in (key, value)]
        positional = [texts.get(f"argument {index}", text) for index, text in enumerate(arguments)]
        error = CliRunner().invoke(app, [name, *positional, *named]).exception
        if error is not None and not isinstance(error, SystemExit):
            raise error

    names = [f"argument {index}" for index in range(len(arguments))]
    return Target(call, lambda: _files("parquet")() and {}, parameters=(*names, *options.split()))


def _commands() -> dict[str, Target]:
    """Those that start no processes."""
    plans = "--ranks --workers --batch-size --shuffle --seed --window --lanes --tail --epoch --start"
    opening = "--format --option --cache-dir"
    return {
        "rankfeed inspect": _command("inspect", f"--samples --column {opening}", "rows.parquet"),
        "rankfeed plan": _command("plan", f"{plans} --blocks", "--samples=10"),
        "rankfeed prepare": _command("prepare", "--key --retries --timeout --input", "os:makedirs", "once"),
        "rankfeed write": _command("write", "--shard-mib --order --seed --runner", "rows.parquet", "packed"),
        "rankfeed index": _command("index", opening, "rows.parquet"),
        "rankfeed verify": _command("verify", f"{opening} --data", "rows.parquet"),
        "rankfeed verify --samples": _command("verify", f"{plans} --blocks", "--samples=10"),
        "rankfeed report": _command("report", f"{plans} --audit --run --stats --out --png", "rows.parquet"),
        "rankfeed topology": _command("topology", "--data --batch-size --shuffle --seed"),
    }


def _of_frameworks() -> dict[str, Target]:
    """Those of frameworks that are installed."""
    named: dict[str, Target] = {}
    with suppress(ImportError):
        from rankfeed.integrations.lance import ShardedSampler

        named["lance.ShardedSampler"] = Target(ShardedSampler)
    with suppress(ImportError):
        from torch_geometric.data import InMemoryDataset

        from rankfeed.integrations.pyg import NodeSeeds, prepare

        named["pyg.NodeSeeds"] = Target(
            NodeSeeds,
            lambda: {"input_nodes": [1, 2, 3], "batch_size": 2},
            take,
            ("input_nodes", "batch_size", "data", "shuffle", "seed", "tail", "topology"),
        )
        named["pyg.prepare"] = Target(
            prepare,
            lambda: {"dataset": InMemoryDataset, "root": "graphs"},
            parameters=("root", "key", "retries", "timeout", "dataset"),
        )
    with suppress(ImportError):
        from rankfeed.integrations.transformers import PadTokens

        batch = {"input_ids": torch.tensor([[5, 6], [8, 0]]), "input_ids_lengths": torch.tensor([2, 1])}
        named["transformers.PadTokens"] = Target(PadTokens, use=lambda pad, _: pad(batch))
    with suppress(ImportError):
        from rankfeed.integrations.accelerate import accelerated

        methods = ("gather_for_metrics", "skip_first_batches", "register_for_checkpointing")
        fake = SimpleNamespace(process_index=0, num_processes=1, **dict.fromkeys(methods, id))
        named["accelerate.accelerated"] = Target(
            accelerated, lambda: {"loader": rf.Loader(rows()), "accelerator": fake, "checkpoint": False}
        )
    with suppress(ImportError):
        from rankfeed.integrations.lightning import log_mean

        module = SimpleNamespace(trainer=SimpleNamespace(world_size=1), log=lambda *_, **__: None)
        named["lightning.log_mean"] = Target(
            log_mean,
            lambda: {"module": module, "name": "loss", "values": torch.ones(2)},
            skipped=frozenset({"module"}),
        )
    return named


def main(name: str, every: int, offset: int) -> None:
    """Run the cases of one target, a line of JSON for each: its names when it begins, its failure when it ends."""
    target = targets()[name]
    for parameter, value in cases(target, every, offset):
        print(json.dumps(["begin", parameter, value]), flush=True)
        print(json.dumps(["end", failure(target, parameter, value)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)  # threads of the user's that hang are no concern here
