"""All processes of a launch tell each other what they take themselves to be, without a network: by small files.

Rank 0 reads what the others say and writes one answer, which all of them read, so that all come to one verdict. A
file left by an earlier job is told from one of this by an answer: each process makes up a name for itself and
follows only a rank 0 that has heard of this name, and rank 0 counts only who follows it.
"""

import hashlib
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from rankfeed.errors import RankfeedError, TopologyError
from rankfeed.storage.commit import TEMPORARY, decodable, write_atomic
from rankfeed.storage.network_fs import refresh_path
from rankfeed.topology.agreement import ProcessReport, format_ranks, missing_ranks

#: After all have come: so long somebody may still turn up who should not be there.
_SETTLE = 1.0
#: A process that cannot tell its rank, and rank 0 in the end, wait for the others for so long at most.
_LINGER = 10.0
#: Seconds between two questions to a network file system for what is there now.
_AFRESH = 2.0
_T = TypeVar("_T")


@decodable
class Said(msgspec.Struct, frozen=True):
    """What a process says: its made-up name, itself, and which processes of rank 0 it has an answer of."""

    name: str
    seen: ProcessReport
    follows: list[str] = []


@decodable
class Answer(msgspec.Struct, frozen=True):
    """What rank 0 says: whom it has heard of, and in the end all who follow it."""

    name: str
    heard: list[str]
    over: bool = False
    seen: list[ProcessReport] = []


def folder_of(mark: str) -> str:
    """Name of the folder in which the processes of a job meet.

    Args:
        mark: what all of them know of their job, and no other job does.

    Examples:
        >>> folder_of("SLURM_JOB_ID=7 SLURM_STEP_ID=0")
        '.rankfeed-topology-f87acd14'
    """
    return f".rankfeed-topology-{hashlib.sha256(mark.encode()).hexdigest()[:8]}"


def roll_call(folder: Path, me: ProcessReport, timeout: float) -> list[ProcessReport]:
    """Meet all other processes of this launch.

    Args:
        folder: that all of them see and no other job uses; made here, and removed by rank 0 in the end.
        me: this process.
        timeout: seconds to wait for rank 0, and then for all the others.

    Returns:
        What each process said, in the order of ranks: the same on all of them. Some are missing where they did not
        come in time.

    Raises:
        TopologyError: rank 0 did not come, or did not stay, or the folder cannot be written.
    """
    call = _Call(folder, me, uuid.uuid4().hex, timeout)
    try:
        call.members.mkdir(parents=True, exist_ok=True)
        call.answers.mkdir(exist_ok=True)
        return call.lead() if me.topology is not None and me.topology.rank == 0 else call.follow()
    except OSError as error:
        raise TopologyError(
            "the processes cannot meet in this folder",
            expected="a folder that all of them see and can write into",
            found=error,
            where=folder,
            remedy="name another one with --folder",
        ) from error


@dataclass
class _Call:
    folder: Path
    me: ProcessReport
    name: str
    timeout: float
    looked: float = 0.0

    @property
    def members(self) -> Path:
        return self.folder / "members"

    @property
    def answers(self) -> Path:
        return self.folder / "answers"

    @property
    def pause(self) -> float:
        """Seconds between two looks: longer where there are many, who all look at one file system."""
        return max(0.05, (1 if self.me.topology is None else self.me.topology.world_size) / 500)

    def lead(self) -> list[ProcessReport]:
        deadline, settled = time.monotonic() + self.timeout, 0.0
        heard: list[str] = []
        follows: list[str] = []
        while True:
            said = self._all(self.members, Said)
            # Another process may take itself for rank 0 as well: it is followed, so that it counts this one.
            answers = self._answers()
            if (told := self._told(answers)) is not None:  # it was the sooner
                return told
            names = sorted({self.name, *(answer.name for answer in answers)})
            if names != follows:
                follows = names
                self._put(self.members, Said(self.name, self.me, follows))
            here = {name: one.seen for name, one in said.items() if self.name in one.follows}
            here[self.name] = self.me
            if sorted(said) != heard:
                heard = sorted(said)
                self._put(self.answers, Answer(self.name, heard))
            now = time.monotonic()
            settled = settled or now if len(here) >= _expected(here) else 0.0
            if now > deadline or (settled and now > settled + _SETTLE):
                break
            time.sleep(self.pause)
        together = sorted(here.values(), key=_order)
        self._put(self.answers, Answer(self.name, sorted({*heard, *here}), True, together))
        self._leave()
        self._clean([name for name in here if name != self.name])
        return together

    def follow(self) -> list[ProcessReport]:
        patience = self.timeout if self.me.topology is not None else min(self.timeout, _LINGER)
        deadline = time.monotonic() + patience
        follows: list[str] | None = None
        while True:
            answers = self._answers()
            if (told := self._told(answers)) is not None:
                return told
            names = sorted(answer.name for answer in answers)
            if names != follows:
                if names and not follows:  # rank 0 lives: it waits for the others for so long
                    deadline = time.monotonic() + self.timeout + _LINGER
                follows = names
                self._put(self.members, Said(self.name, self.me, follows))
            if time.monotonic() > deadline:
                raise self._alone(bool(follows), patience)
            time.sleep(self.pause)

    def _told(self, answers: list[Answer]) -> list[ProcessReport] | None:
        """The last answer, if one of them is."""
        for answer in answers:
            if answer.over and self.me in answer.seen:
                self._leave()
                return answer.seen
        return None

    def _put(self, folder: Path, content: msgspec.Struct) -> None:
        write_atomic(folder / f"{self.name}.json", msgspec.json.encode(content))

    def _leave(self) -> None:
        """Say that the answer was read. Who never got one stays on the list: others see that it came."""
        with suppress(OSError):
            (self.members / f"{self.name}.json").unlink()

    def _alone(self, answered: bool, patience: float) -> TopologyError:
        there = [one.seen for one in self._all(self.members, Said).values()]
        size = 0 if self.me.topology is None else self.me.topology.world_size
        missing = missing_ranks(there, size)
        who = "rank 0 came, and was gone before all had come" if answered else "rank 0 did not come"
        return TopologyError(
            f"{who}: after {patience:.0f} seconds {format_ranks(missing) if missing else 'nobody'} is not there",
            expected=f"{size} processes that meet in one folder",
            found=f"{len(there)}",
            where=f"{self.me.name}, in {self.folder}",
            remedy="do all hosts see this folder (--folder), and does this launcher name its jobs the same on all "
            "of them (if not: --job NAME)? Or the other processes do not know that they are several",
        )

    def _answers(self) -> list[Answer]:
        """Those of processes of rank 0 that live, since they have heard of this one."""
        return [one for one in self._all(self.answers, Answer).values() if self.name in one.heard]

    def _all(self, folder: Path, kind: type[_T]) -> Mapping[str, _T]:
        now = time.monotonic()
        if now > self.looked + _AFRESH:
            self.looked = now
            for each in (self.members, self.answers):
                refresh_path(each / "again")
        found = {}
        for path in folder.glob("*.json"):
            # Gone by now, or left by another version, or it says what cannot be.
            with suppress(OSError, msgspec.DecodeError, RankfeedError):
                found[path.stem] = msgspec.json.decode(path.read_bytes(), type=kind)
        return found

    def _clean(self, followers: list[str]) -> None:
        """Remove the folder when all have read the answer; files of ours alone, so nothing else is lost."""
        deadline = time.monotonic() + min(self.timeout, _LINGER)
        while any((self.members / f"{name}.json").exists() for name in followers) and time.monotonic() < deadline:
            time.sleep(self.pause)
        with suppress(OSError):
            for folder in (self.members, self.answers):
                for path in (*folder.glob("*.json"), *folder.glob(f"{TEMPORARY}*")):
                    path.unlink(missing_ok=True)
                folder.rmdir()
            self.folder.rmdir()


def _expected(here: Mapping[str, ProcessReport]) -> int:
    """As many as the largest world that one of them takes itself to be in."""
    return max((one.topology.world_size for one in here.values() if one.topology is not None), default=1)


def _order(one: ProcessReport) -> tuple[int, str, int]:
    return (1 << 62 if one.topology is None else one.topology.rank), one.host, one.pid
