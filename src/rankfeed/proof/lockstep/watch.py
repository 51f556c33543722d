"""Two threads that watch over a rank: one speaks with the others, one keeps the time and raises.

They are two, since a store whose host is stopped does not answer, and whoever asks it does not come back.
"""

import os
import socket
import threading
import time
from bisect import bisect
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from rankfeed._util.process_info import is_stopped, pid_namespace_id, process_start_time
from rankfeed.errors import LockstepError
from rankfeed.proof.lockstep import wake as waking
from rankfeed.proof.lockstep.here import Clock, Here, Sight
from rankfeed.proof.lockstep.judge import SETTLE
from rankfeed.proof.lockstep.link import EVERY, Address, Link, connect, is_left, listens
from rankfeed.proof.lockstep.process import remember, say, tells_first
from rankfeed.proof.lockstep.words import Verdict, Word

#: With which a process ends that could not be made to raise.
EXIT_CODE = 86
_TICK = EVERY / 4
#: Seconds that the end of a pass waits for the store, that an error does, and rank 0 for the others.
_BRIEF, _FLUSH, _LINGER = 5.0, 5.0, 8.0
#: Seconds in which ranks get to know each other.
_START = 3.0
#: How many ranks on either side of this one it looks after.
_NEAR = 4
#: Seconds between reminders of a thread that does not raise.
_AGAIN = 1.0


@dataclass(frozen=True)
class Terms:
    """On what terms ranks are watched; see Lockstep."""

    limit: float
    uneven: bool
    on_stuck: Literal["exit", "raise"]
    grace: float


class Watch:
    """Watches over this rank until all ranks are through.

    Args:
        name: under which the ranks that belong together watch each other.
        terms: see Lockstep.
    """

    def __init__(self, name: str, terms: Terms) -> None:
        from torch import distributed

        self.here = Here()
        self._name = name
        self.rank, self._ranks, self.terms = distributed.get_rank(), distributed.get_world_size(), terms
        self.verdict: Verdict | None = None
        self.over = False
        self.pid = os.getpid()
        self._host = socket.gethostname()
        self._clock = Clock(most=5 * EVERY)
        self._sight = Sight(self.here)
        self._missing: dict[int, str] = {}
        self._looked = 0.0
        self._lost: BaseException | None = None
        self._acknowledged = threading.Event()
        self._decided = threading.Event()
        self._hurry = threading.Event()
        store, self._keep, self._port = connect(name)
        # Under torchrun it is the launcher's, and outlives all ranks.
        self._has_store = self.rank == 0 and self._port > 0 and not _of_launcher()
        ports = waking.listening(self._port)
        self._address = Address(self._host, self.pid, process_start_time(self.pid), pid_namespace_id(), ports)
        self._link = Link(
            store,
            self.rank,
            self._ranks,
            self._address,
            self._word,
            lambda: self._clock.now,
            lambda rank: self._missing.get(rank) == "gone",
            terms.limit,
            terms.uneven,
        )
        waking.arm()
        remember(self)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._talk, self._guard)]
        for thread in self._threads:
            thread.start()

    # What the training thread calls.

    def acknowledge(self) -> None:
        """The training thread is back, and raises by itself."""
        self._acknowledged.set()
        waking.take_back()

    def error(self) -> LockstepError | None:
        """What is to be raised here."""
        if self.verdict is None or (self.verdict.rank == self.rank and self.here.state == "failed"):
            return None
        self.acknowledge()
        return self.verdict.error(self._word(0))

    def end_pass(self, state: Literal["ended", "left"]) -> None:
        """A pass is over; the others know of it when this returns, or the store hangs."""
        self.here.end(state)
        self._flush(_BRIEF)

    def close(self, most: float = _BRIEF) -> None:
        """No other step will be taken; the others know of it when this returns, or so many seconds are over."""
        if self.pid == os.getpid():
            self.here.end("left")
            self.here.closed = True
            self._hurry.set()
            self._flush(most)

    def fail(self, error: BaseException) -> LockstepError | None:
        """The training thread failed; the others know of it when this returns.

        Returns:
            What to raise instead: another rank is the cause.
        """
        if isinstance(error, LockstepError) or self.pid != os.getpid():
            self.linger()
            return None
        if (
            self.verdict is None and self.here.state != "failed"
        ):  # it passes a loop, a with and the end of a script
            self.here.fail(error)
            self._acknowledged.set()
            if not (self.here.collective or self._link.judging):
                # A launcher may end the judge before it says so.
                word = self._word(0)
                say(f"rankfeed.Lockstep: {word.who} failed {word.at}: {word.error}\n")
            self._flush(_FLUSH)
            if self.here.collective:
                self._decided.wait(SETTLE + _FLUSH + 4 * EVERY)
        found = self.error()
        self.linger()
        return found

    def linger(self) -> None:
        """Where this process has the store: keep it until the others have heard what they need to hear."""
        deadline = time.monotonic() + _LINGER
        while self._has_store and self._lost is None and time.monotonic() < deadline:
            link = self._link
            if self.here.state != "failed" and self.verdict is None:
                if self.over:
                    return
                # Who left its loop is soon to be missed in a collective: that fails as soon as this process ends.
                if self.here.state == "left" and link.parted == self._ranks:
                    return
            elif self.verdict is not None and link.thanks >= link.expected_thanks():
                return
            self._hurry.set()
            time.sleep(_TICK / 2)

    def stop(self) -> None:
        """End the threads: one that comes out of the store while Python shuts down would crash the process."""
        self.over = True
        self._hurry.set()
        for thread in self._threads:
            thread.join(_BRIEF)

    # What the threads do.

    def _word(self, beat: int) -> Word:
        here, sight = self.here, self._sight
        return Word(
            rank=self.rank,
            host=self._host,
            pid=self.pid,
            beat=beat,
            lap=here.lap,
            step=here.step,
            state=here.state,
            closed=here.closed,
            done=here.done,
            still=sight.still,
            waits=sight.waits,
            was=here.was,  # type: ignore[arg-type]  # is never "failed"
            error=here.error,
            collective=here.collective,
            lines=here.lines or sight.lines,
            missing=self._missing,
        )

    def _flush(self, most: float) -> None:
        """Have the link's thread say where this rank is, and wait for it."""
        mark = self.here.mark
        deadline = time.monotonic() + most
        while self._lost is None and self.verdict is None and not self.over and time.monotonic() < deadline:
            word = self._link.written
            if word is not None and (word.lap, word.step, word.state, word.closed) == mark:
                return
            self._hurry.set()
            time.sleep(0.002)

    def _talk(self) -> None:
        while not self.over:
            # The job is over for this rank, and may be for rank 0: torch logs at length what a lost store does.
            if self.here.closed and not self._has_store and is_left(self._keep):
                self._lost = ConnectionError("rank 0 has ended")
                return
            try:
                self._link.round()
            except Exception as error:
                if not self._connected_anew():
                    self._lost = error
                    return
            if self._link.verdict is not None and self.rank > 0:
                return  # rank 0 may go, and its store with it
            # Until all know each other, and when something is about to be decided or all is over, all hurry.
            hurry = self.here.state == "failed" or self._link.verdict is not None or self._clock.now < _START
            self._hurry.wait(_TICK if hurry or self.here.closed else EVERY)
            self._hurry.clear()
        if self.here.closed and self.rank > 0 and not is_left(self._keep):
            with suppress(Exception):  # rank 0 was killed in this moment
                self._link.leave()

    def _connected_anew(self) -> bool:
        """Whether a store that made an error is there still: one that is late is waited for until the limit."""
        if not listens(self._keep):
            return False
        with suppress(Exception):
            self._link.go_on_by(connect(self._name)[0])
        return True

    def _guard(self) -> None:
        while not self.over:
            time.sleep(_TICK)
            self._clock.tick()
            self._sight.look(self._clock.now, self.terms.limit / 2)
            self._look_at_neighbours()
            verdict = self._link.verdict or self._without_store()
            if verdict is not None:
                self._tell(verdict)
                return
            if self.here.closed and (self._lost is not None or self._is_over()):
                self.over = True

    def _is_over(self) -> bool:
        """Whether all ranks are through; for rank 0, which has the store, whether they need it no longer."""
        answer = self._link.answer
        if answer is None or not answer.over:
            return False
        return not self._has_store or self._link.left == self._ranks - 1

    def _look_at_neighbours(self) -> None:
        """See whether processes of this host are there: some, so that each is seen by some."""
        pause = 0.0 if self.here.state == "failed" else EVERY
        if not self._address.numbering or self._clock.now < self._looked + pause:
            return
        self._looked = self._clock.now
        roster = self._link.roster
        here = sorted(rank for rank, each in roster.items() if each.numbering == self._address.numbering)
        at = bisect(here, self.rank)
        near = {*here[:1], *(here[(at + step) % len(here)] for step in range(-_NEAR, _NEAR) if here)} - {self.rank}
        missing = {}
        for rank in near:
            born = process_start_time(roster[rank].pid)
            if roster[rank].born > 0 and born not in (-1, roster[rank].born):
                missing[rank] = "gone"
            elif is_stopped(roster[rank].pid):
                missing[rank] = "stopped"
        self._missing = missing

    def _without_store(self) -> Verdict | None:
        """What is to be said where the store is gone, or does not answer."""
        link, here = self._link, self.here
        silent = self._clock.now - link.answered
        over = link.answer is not None and link.answer.host_over
        inside = here.inside or here.collective
        if not inside or ((over or here.closed) and not here.collective):
            return None
        host = link.roster.get(0)
        who, rank = (f"rank 0 (host {host.host}, process {host.pid})" if host is not None else "rank 0"), 0
        if _of_launcher():
            who, rank = "the launcher", -1
        how = self._missing.get(rank)
        if self._lost is not None:
            gone = "is gone" if how == "gone" else "is gone or cannot be reached"
            return Verdict(rank, f"{who} {gone}, and the store of torch.distributed with it")
        if min(silent, self._sight.still) < self.terms.limit:
            return None
        why = "its process is stopped (SIGSTOP, or a debugger)" if how == "stopped" else "it hangs"
        return Verdict(rank, f"{who} has not been heard of for {silent:.0f} s: {why}; it holds the job's store")

    def _tell(self, verdict: Verdict) -> None:
        """Have this process raise."""
        self.verdict = verdict
        self._decided.set()
        here = self.here
        error = verdict.error(self._word(0))
        if self._link.judging or self._lost is not None:
            say(f"rankfeed.Lockstep: {error}\n")
        if here.closed or here.state == "failed" or not tells_first(self):
            return
        waking.wake(here.thread, error)
        ports = [port for address in self._link.roster.values() for port in address.ports]
        deadline = time.monotonic() + self.terms.grace
        released = False
        while not self.is_back():
            time.sleep(_AGAIN)
            if not released and not self.is_back():
                released = True  # in a thread of its own: an abort may hang as well
                threading.Thread(target=waking.let_go, args=(ports, self._port), daemon=True).start()
            waking.remind(here.thread)
            if time.monotonic() > deadline and not self.is_back():
                if self.terms.on_stuck == "exit":
                    why = f"this process cannot raise, and ends with code {EXIT_CODE}"
                    waking.end_process(EXIT_CODE, f"rankfeed.Lockstep: {why}: {error}\n")
                return

    def is_back(self) -> bool:
        """Whether what is to be raised here has been."""
        return self._acknowledged.is_set() or self.here.closed or waking.was_raised()


def _of_launcher() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
