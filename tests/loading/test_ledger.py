"""Each rank writes down each step before it hands it over, and nothing goes wrong in silence."""

import copy
import io
import os
import pickle
import shutil
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import xxhash
from tests.loading.feeds import ENGINES, NAMES, Memory
from tests.support.jobs import run_python

import rankfeed as rf
from rankfeed.diagnostics import verify_run
from rankfeed.errors import ArgumentError, AuditError
from rankfeed.loading import ledger
from rankfeed.storage.ledger import DamagedBytes, PassHeader, StepRecord, decode_ledger, encode_header, encode_step


def said(folder: Path) -> list[Any]:
    return [record for path in sorted(folder.iterdir()) for record in decode_ledger(path.open("rb"))]


@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_a_step_is_recorded_in_the_ledger_when_it_is_delivered_and_not_when_it_is_built(
    engine: dict[str, Any], tmp_path: Path
) -> None:
    loader = rf.Loader(Memory(40), 4, audit=tmp_path, columns=["y"], **engine)
    batches = iter(loader)
    for count in range(1, 6):
        next(batches)
        assert Counter(type(record) for record in said(tmp_path)) == {PassHeader: 1, StepRecord: count}
    list(batches)
    verdict = verify_run(tmp_path)
    assert verdict.sound
    assert verdict.loaders[0].epochs[0].delivered == 40
    assert loader.audit_report is None, "a ledger asks no other rank"


@pytest.mark.parametrize("tail", ["even", "drop", "pad"])
@pytest.mark.parametrize("size", [1, 7, 30, 32])
def test_verify_run_counts_delivered_and_dropped_samples_for_each_tail(
    tail: Any, size: int, tmp_path: Path
) -> None:
    list(rf.Loader(Memory(size), 4, tail=tail, audit=tmp_path / "ledger", columns=["y"]))
    if tail == "drop" and size < 4:
        assert not (tmp_path / "ledger").exists() or verify_run(tmp_path / "ledger").sound
        return
    (epoch,) = verify_run(tmp_path / "ledger").loaders[0].epochs
    assert (epoch.delivered, epoch.dropped) == ((size // 4 * 4, size % 4) if tail == "drop" else (size, 0))


def test_two_loaders_of_a_process_share_one_ledger_file_and_are_verified_separately(tmp_path: Path) -> None:
    train, valid = rf.Loader(Memory(40), 4, shuffle=True, audit=tmp_path), rf.Loader(Memory(9), 4, audit=tmp_path)
    for _ in range(3):
        list(train)
        list(valid)
    verdict = verify_run(tmp_path)
    assert verdict.sound
    assert verdict.ledgers == 1
    assert sorted((len(loader.epochs), loader.epochs[0].delivered) for loader in verdict.loaders) == [
        (3, 9),
        (3, 40),
    ]


def test_verify_run_joins_the_ledgers_of_loaders_resumed_from_a_state_into_one_epoch(tmp_path: Path) -> None:
    state: Any = None
    for stop in (3, 2, 99):
        loader = rf.Loader(Memory(40), 4, audit=tmp_path)
        if state:
            loader.load_state_dict(state)
        list(zip(range(stop), loader, strict=False))
        state = loader.state_dict()
    (told,) = verify_run(tmp_path).loaders
    assert (told.epochs[0].delivered, told.missing, told.again) == (40, 0, 0)


def test_verify_run_reports_samples_repeated_after_a_break_and_samples_left_early(tmp_path: Path) -> None:
    loader = rf.Loader(Memory(40), 4, audit=tmp_path)
    next(iter(loader))
    list(loader)
    list(zip(range(2), loader, strict=False))
    loader.set_epoch(2)
    list(loader)
    verdict = verify_run(tmp_path)
    told = [(epoch.epoch, epoch.delivered, epoch.again, epoch.left_early) for epoch in verdict.loaders[0].epochs]
    assert told == [(0, 40, 4, 0), (1, 8, 0, 32), (2, 40, 0, 0)]
    assert verdict.sound


def test_verify_run_is_unsound_for_two_concurrent_iterators(tmp_path: Path) -> None:
    loader = rf.Loader(Memory(40), 4, audit=tmp_path)
    first, second = iter(loader), iter(loader)
    for _ in range(2):
        next(first)
        next(second)
    verdict = verify_run(tmp_path)
    assert verdict.sound is False
    assert "two iterations over the same data were active at the same time" in str(verdict)


def test_a_copied_and_pickled_loader_writes_to_the_same_ledger_folder(tmp_path: Path) -> None:
    loader = rf.Loader(Memory(8), 4, audit=tmp_path / "a")
    for other in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        next(iter(other))
    assert [type(record).__name__ for record in said(tmp_path / "a")] == ["PassHeader", "StepRecord"] * 2


def test_a_forked_child_writes_its_own_ledger(tmp_path: Path) -> None:
    loader = rf.Loader(Memory(8), 4, audit=tmp_path)
    next(iter(loader))
    child = os.fork()
    if child == 0:
        try:
            next(iter(loader))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_deleted_ledger_folder_is_created_again(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"
    for _ in range(2):
        loader = rf.Loader(Memory(8), 4, audit=folder, columns=["y"])
        list(loader)
        assert verify_run(folder).loaders[0].epochs[0].delivered == 8
        shutil.rmtree(folder)
    list(loader)  # its second epoch
    assert [type(record) for record in said(folder)] == [PassHeader, StepRecord, StepRecord]


@pytest.mark.parametrize("audit", ["", 1, None, ["folder"]])
def test_an_audit_argument_that_is_neither_a_path_nor_a_bool_raises_argument_error(audit: Any) -> None:
    with pytest.raises(ArgumentError, match="audit"):
        rf.Loader(Memory(8), audit=audit)


def test_an_unwritable_ledger_folder_raises_audit_error_at_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    loader = rf.Loader(Memory(8), audit=tmp_path / "file")
    for _ in range(2):  # and stays one
        with pytest.raises(AuditError, match="cannot be written"):
            next(iter(loader))


FULL = """
import resource, signal, sys
import rankfeed as rf
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
source = rf.from_dataset([{"x": i} for i in range(100)])
steps = 0
try:
    for batch in rf.Loader(source, 2, audit=sys.argv[1]):
        steps += 1
except rf.errors.AuditError as error:
    print(steps, error)
"""


def test_a_full_disk_is_an_error_and_the_ledger_keeps_all_steps_before_it(tmp_path: Path) -> None:
    output = run_python(FULL, tmp_path, PYTHONDONTWRITEBYTECODE="1")  # the limit would truncate .pyc files
    assert "the ledger of delivered batches cannot be written" in output
    steps = int(output.split()[0])
    verdict = verify_run(tmp_path)
    assert verdict.sound
    assert 0 < steps == verdict.loaders[0].epochs[0].delivered // 2 < 50


def test_no_ledger_is_written_before_the_first_step(tmp_path: Path) -> None:
    loader = rf.Loader(Memory(8), audit=tmp_path / "ledger")
    len(loader)
    iter(loader)
    assert not (tmp_path / "ledger").exists()


def test_the_launch_id_of_a_ledger_changes_with_the_slurm_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    name = ledger._launch_id()
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    assert "" != ledger._launch_id() != name


class Talkative(list[dict[str, int]]):
    def __repr__(self) -> str:
        raise AssertionError("this goes through all of the data")


def test_a_ledger_does_not_contain_the_repr_of_samples(tmp_path: Path) -> None:
    next(iter(rf.Loader(rf.from_dataset(Talkative([{"x": 1}] * 5)), audit=tmp_path)))
    assert said(tmp_path)[0].content.data == "TorchDatasetSource(5 samples)"


def test_a_ledger_step_records_which_function_may_have_dropped_samples(tmp_path: Path) -> None:
    """The name is in the highest byte of the step, 0 in earlier versions; an unknown value is damage."""
    next(iter(rf.Loader(Memory(40), 4, audit=tmp_path, columns=["y"])))
    header, seed = encode_header(0, said(tmp_path)[0].content)
    proven, unproven = (encode_step(0, seed, 1, 8, 5, function) for function in ("", "batch_transform"))
    number, _, step, *rest = struct.unpack("<IIQQQ", unproven)
    assert struct.unpack("<IIQQQ", proven)[2] == 1
    step |= 0xFF << 56
    check = xxhash.xxh32_intdigest(struct.pack("<IQQQ", number, step, *rest), seed)
    later = struct.pack("<IIQQQ", number, check, step, *rest)
    records = list(decode_ledger(io.BytesIO(header + proven + unproven + later)))[1:]
    assert [getattr(record, "unproven", None) for record in records] == ["", "batch_transform", None]
    assert isinstance(records[-1], DamagedBytes)
