"""The ranks of a job tell each other where they are, by the store of torch.distributed, once a second.

Each rank writes one key and reads one. One rank, the judge, reads all words and writes the answer that all others
read; where it is not heard of any more, the next one takes its place. So a job of a thousand ranks costs the store
a few thousand small requests a second, and no rank waits for another.
"""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec

from rankfeed.errors import ArgumentError
from rankfeed.proof.lockstep.judge import Ranks, judge
from rankfeed.proof.lockstep.words import Verdict, Word
from rankfeed.storage.decodable import decodable

#: Seconds between two words.
EVERY = 1.0
#: Seconds after which the next rank takes the place of a judge that is silent; the one after it waits longer.
_SUCCESSION, _EACH = 5.0, 2.0
#: Seconds that a connection to the store may take.
_PATIENCE = 5.0


@decodable
class Address(msgspec.Struct, frozen=True):
    """Where a rank is.

    Attributes:
        host: its machine.
        pid: its process.
        born: when that was started, as topology.job says.
        numbering: in which its number is known.
        ports: at which it takes connections.
    """

    host: str
    pid: int
    born: int
    numbering: str
    ports: list[int]


@decodable
class Answer(msgspec.Struct, frozen=True):
    """What the judge says.

    Attributes:
        judge: its rank.
        beat: goes up with each answer.
        over: whether all ranks are through with their steps.
        host_over: whether rank 0 is.
        roster: whether the addresses of all ranks can be had.
        verdict: where there is one.
    """

    judge: int
    beat: int
    over: bool = False
    host_over: bool = False
    roster: bool = False
    verdict: Verdict | None = None


class Link:
    """One rank's exchange with all others. All of it is done by one thread, since a store may not answer.

    Args:
        store: a connection of its own, with a prefix of this job's.
        rank: this one.
        world_size: how many.
        address: of this rank.
        word: what this rank says, given the number of the word.
        now: seconds that this process has had.
        is_gone: whether the process of a rank is known to have ended.
        limit: see Ranks.
        uneven: see Ranks.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        address: Address,
        word: Callable[[int], Word],
        now: Callable[[], float],
        is_gone: Callable[[int], bool],
        limit: float,
        uneven: bool,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._address = address
        self._word = word
        self._now = now
        self._is_gone = is_gone
        self._limit, self._uneven = limit, uneven
        self._beat = 0
        self._known: set[int] = set()
        self._fresh = {each: (0, now()) for each in range(world_size)}
        self._words = {each: Word(each, "?", 0) for each in range(world_size)}
        self._judge_heard: tuple[object, float] = (None, now())
        self._counted: set[str] = set()
        self.judging = rank == 0
        self.written: Word | None = None
        self.answer: Answer | None = None
        self.answered = now()
        self.roster: dict[int, Address] = {}
        #: Of who has the store: how many ranks know the verdict; how many that rank 0 takes no other step; and how
        #: many have made their last request.
        self.thanks = self.parted = self.left = 0

    @property
    def verdict(self) -> Verdict | None:
        """That on which all ranks agree."""
        return self.answer.verdict if self.answer is not None else None

    def go_on_by(self, store: Any) -> None:
        """Take another connection to the same store."""
        self._store = store

    def round(self) -> None:
        """Say where this rank is, and hear of the others.

        Raises:
            Exception: whatever the store does; it is gone then.
        """
        if not self._beat:
            self._store.set(f"address/{self._rank}", _encoded(self._address))
        self._beat += 1
        word = self._word(self._beat)
        self._store.set(f"word/{self._rank}", _encoded(word))
        self.written = word
        heard = self._read()
        if self.judging:
            self.answer = self._judge(heard)
            self._store.set("answer", _encoded(self.answer))
        elif heard is not None:
            self.answer = heard
        self._find_roster()
        self._thank()
        self.answered = self._now()

    def _read(self) -> Answer | None:
        """What another judge says."""
        heard = _decoded(self._store.get("answer"), Answer) if self._store.check(["answer"]) else None
        now = self._now()
        mark = None if heard is None else (heard.judge, heard.beat)
        if mark != self._judge_heard[0]:
            self._judge_heard = mark, now
            if heard is not None and heard.judge != self._rank:
                # Two at once: the lower rank remains.
                self.judging = self.judging and self._rank < heard.judge
        silent = 0 if heard is None else heard.judge
        patience = _EACH * self._rank + (0.0 if self._is_gone(silent) else _SUCCESSION)
        if not self.judging and now - self._judge_heard[1] > patience:
            self.judging = True
            self._fresh = dict.fromkeys(range(self._world_size), (0, now))
            if self._store.check([f"word/{silent}"]):  # it is as silent as its answers are
                beat = _decoded(self._store.get(f"word/{silent}"), Word).beat
                self._fresh[silent] = beat, self._judge_heard[1]
        return heard

    def _judge(self, heard: Answer | None) -> Answer:
        words = self._all_words()
        now = self._now()
        silent = {each: now - self._fresh[each][1] for each in words}
        verdict = heard.verdict if heard is not None else None
        if verdict is None and (found := judge(Ranks(words, silent, self._limit, self._uneven))) is not None:
            verdict = _decoded(self._store.compare_set("verdict", "", _encoded(found)), Verdict)
        if len(self._known) == self._world_size and len(self.roster) < self._world_size:
            self.roster = {
                each: _decoded(told, Address)
                for each, told in zip(range(self._world_size), self._many("address"), strict=True)
            }
            self._store.set("roster", _encoded(self.roster))
        return Answer(
            self._rank,
            self._beat,
            over=all(word.closed for word in words.values()),
            host_over=words[0].closed,
            roster=len(self.roster) == self._world_size,
            verdict=verdict,
        )

    def _all_words(self) -> dict[int, Word]:
        for each in range(self._world_size):
            if each not in self._known and self._store.check([f"word/{each}"]):
                self._known.add(each)
        now = self._now()
        for each, told in zip(sorted(self._known), self._many("word"), strict=True):
            word = self._words[each] = _decoded(told, Word)
            if word.beat != self._fresh[each][0]:
                self._fresh[each] = word.beat, now
        return self._words

    def _many(self, what: str) -> list[bytes]:
        keys = [f"{what}/{each}" for each in sorted(self._known)]
        if self._store.has_extended_api():
            return list(self._store.multi_get(keys))
        return [self._store.get(key) for key in keys]

    def _find_roster(self) -> None:
        if len(self.roster) < self._world_size and self.answer is not None and self.answer.roster:
            self.roster = _decoded(self._store.get("roster"), dict[int, Address])
        elif not self.roster and self._store.check(
            ["address/0"]
        ):  # where the store is: known before all have come
            self.roster = {0: _decoded(self._store.get("address/0"), Address)}

    def _thank(self) -> None:
        """Let the rank that has the store know that this one has heard what it needs it for."""
        if self.verdict is not None:
            self.thanks = self._count("thanks")
        if self.answer is not None and self.answer.host_over:
            self.parted = self._count("parted")
        if self.answer is not None and self.answer.over and self._rank == 0:
            self.left = int(self._store.add("left", 0))

    def leave(self) -> None:
        """Make the last request to the store: rank 0 may end, and the store with it."""
        self._store.add("left", 1)

    def _count(self, what: str) -> int:
        """How many ranks have come here, this one among them; the number is asked for by rank 0 alone."""
        if what not in self._counted:
            self._counted.add(what)
            self._store.add(what, 1)
        return int(self._store.add(what, 0)) if self._rank == 0 else 0

    def expected_thanks(self) -> int:
        """How many ranks are alive to thank, as far as the judge knows: this one, and those that were heard of."""
        now = self._now()
        blamed = self.verdict.rank if self.verdict is not None else -1
        alive = [each for each, (_, since) in self._fresh.items() if now - since < 3 * EVERY and each != blamed]
        return len({*alive, self._rank})


def listens(store: Any) -> bool:
    """Whether a store is still there to be connected to anew; not only slow, or out of reach for a while.

    Args:
        store: of a process group.
    """
    at = bottom_of(store)
    if not getattr(at, "port", 0):
        return False  # none of a network: what it does wrong, it does for good
    try:
        socket.create_connection((at.host, at.port), _PATIENCE).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return False
    except OSError:
        pass  # in a network that fails it is neither seen to be there nor to be gone
    return True


def is_left(store: Any) -> bool:
    """Whether nobody keeps a store of a network any more, which is seen without asking it anything."""
    return bool(getattr(bottom_of(store), "port", 0)) and not listens(store)


def bottom_of(store: Any) -> Any:
    """The store under all prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def connect(name: str) -> tuple[Any, Any, int]:
    """A connection of one's own to the store of the default process group.

    Args:
        name: under which ranks that belong together write.

    Returns:
        the connection; the store itself, which lives as long as it is held; and the store's port, or 0.

    Raises:
        ArgumentError: it has none, as with MPI.
    """
    import torch.distributed
    from torch.distributed.distributed_c10d import _get_default_store

    distributed: Any = torch.distributed  # much of it has no types
    store: Any = _get_default_store()
    if store is None:
        raise ArgumentError(
            "Lockstep speaks by the store of torch.distributed, and this process group has none",
            found=f"the backend {distributed.get_backend()!r}",
            remedy="gloo or nccl have one",
        )
    bottom = bottom_of(store)
    port = int(getattr(bottom, "port", 0))
    # A job that torchrun starts anew finds the keys of the one before: they have another prefix.
    run = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    prefix = f"rankfeed/lockstep/{run}/{name}"
    try:
        own = store.clone()
    except (AttributeError, RuntimeError):  # torch before 2.8, or a store that is none of a network
        own = bottom
        if port:
            own = distributed.TCPStore(bottom.host, port, is_master=False, wait_for_workers=False)
    own.set_timeout(timedelta(seconds=30))
    return distributed.PrefixStore(prefix, own), store, port


def _encoded(what: Any) -> str:
    return msgspec.json.encode(what).decode()


def _decoded(told: bytes, kind: Any) -> Any:
    return msgspec.json.decode(told, type=kind)
