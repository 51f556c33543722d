"""How a loader is doing, shown while it is iterated."""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from rankfeed._util.validate import (
    check_bool,
    check_int,
    check_name,
    check_optional,
    check_path,
    check_seconds,
    check_str,
    invalid,
)
from rankfeed.diagnostics.watch.line import line_for
from rankfeed.diagnostics.watch.prometheus import serve
from rankfeed.diagnostics.watch.tensorboard import Curves, Told
from rankfeed.diagnostics.watch.watched import Figures, Watched
from rankfeed.errors import ArgumentError, TopologyError, safe_str
from rankfeed.topology import Topology

#: Where Prometheus finds local rank 0, if nothing else is said: below the ports that systems give out themselves.
PORT = 18700
#: Seconds that the end of a job waits for an outlet that hangs.
_PATIENCE = 5.0


def watch(
    loader: Any,
    to: Any = "line",
    *,
    name: str = "",
    every: float | None = None,
    all_ranks: bool | None = None,
    log_dir: str | Path | None = None,
    port: int | None = None,
    host: str | None = None,
) -> Watch:
    """Show how a loader is doing while it is iterated: speed, waiting for data, cache hits, memory.

    Looking on costs training nothing, and never ends it: what cannot be shown any more is left, with a warning.

    Args:
        loader: a `Loader`, also one that was taken to Accelerate.
        to: "line": one line, in place where standard error is a terminal, now and then where it is a file.
            "tensorboard", or a ``SummaryWriter``. "prometheus": an endpoint at ``url``. Or a function that is
            called with a dict of numbers (``wandb.log``, say).
        name: what the loader is called where several are watched.
        every: seconds between two looks; if left out, 1 on a terminal, 30 in a log, 10 elsewhere.
        all_ranks: show all ranks, not rank 0 alone. (For Prometheus each rank answers for itself.)
        log_dir: where TensorBoard's files go; its own choice if None. With ``all_ranks`` a folder for each in it.
        port: for Prometheus, of local rank 0; others add their local rank. 18700 if None; 0 for any that is free.
        host: address that Prometheus may come by, this machine alone if None; "0.0.0.0" for all that there are.

    Returns:
        a context manager; without ``with`` it goes on until `Watch.close`, or until loader or process are gone.

    Raises:
        ArgumentError: no such outlet, an option of another one, or a port that cannot be had.
        MissingExtraError: the outlet needs a package that is not installed.

    Examples:
        >>> import rankfeed as rf
        >>> loader = rf.Loader(rf.from_dataset([{"x": 1.0}] * 8), batch_size=2)
        >>> seen = []
        >>> with rf.watch(loader, to=seen.append):
        ...     for batch in loader:
        ...         pass
        >>> seen[-1]["rankfeed/epoch_step"]
        4
    """
    if not (callable(getattr(loader, "stats", None)) and hasattr(type(loader), "__iter__")):
        raise invalid("loader", "a rankfeed.Loader", loader)
    name = check_str("name", name)
    _check_options(to, every=every, all_ranks=all_ranks, log_dir=log_dir, port=port, host=host)
    if isinstance(to, str) and to == "prometheus":
        watched = Watched(loader, name or "loader")
        endpoint = serve(watched, host or "127.0.0.1", _port(loader, PORT if port is None else port))
        return Watch(lambda: endpoint.leave(watched), endpoint.url)
    if isinstance(to, str):
        outlet: Outlet = Curves(name, log_dir=log_dir, by_rank=bool(all_ranks)) if to != "line" else line_for(name)
    elif hasattr(to, "add_scalar"):
        outlet = Curves(name, writer=to)
    else:
        outlet = Told(name, to)
    return Watch(_Ticker(Watched(loader, name), outlet, every or outlet.every, bool(all_ranks)).close)


class Watch:
    """What `watch` returns.

    Attributes:
        url: where Prometheus finds it; None for other outlets.
    """

    def __init__(self, close: Callable[[], None], url: str | None = None) -> None:
        self._close = close
        self._process = os.getpid()
        self.url = url
        atexit.register(self.close)

    def close(self) -> None:
        """Show the last figures, and end."""
        atexit.unregister(self.close)
        if self._process == os.getpid():  # a forked child has nothing of it but this object
            self._close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Outlet(Protocol):
    """Where figures are shown."""

    #: Seconds between two looks, if nothing else is said.
    every: float

    def show(self, figures: Figures, rank: int | None) -> None:
        """Show how a loader is doing."""

    def close(self) -> None:
        """There is no more to show."""


class _Ticker:
    """A daemon thread that looks at a loader and shows what it sees, and alone speaks to the outlet."""

    def __init__(self, watched: Watched, outlet: Outlet, every: float, all_ranks: bool) -> None:
        self._watched, self._outlet, self._every, self._all_ranks = watched, outlet, every, all_ranks
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rankfeed-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(_PATIENCE)  # a disk or terminal that hangs does not hold up the job's end

    def _run(self) -> None:
        failed: Exception | None = None
        try:
            over = False
            while not over:
                over = self._over.wait(self._every)
                figures = self._watched.stats()
                if figures is None:
                    return
                if figures["seconds"]:  # once it is iterated, its rank is known
                    rank = self._watched.rank()
                    if self._all_ranks or not rank:
                        self._outlet.show(figures, rank)
        except Exception as error:
            failed = error
        finally:
            with suppress(Exception):
                self._outlet.close()
        if failed is not None:
            text = f"the loader is no longer watched: {type(failed).__name__}: {safe_str(failed)}"
            warnings.warn(text, RuntimeWarning, stacklevel=1)


def _check_options(to: Any, *, every: Any, **options: Any) -> None:
    """Refuse what cannot be meant."""
    theirs = {"line": "every all_ranks", "tensorboard": "every all_ranks log_dir", "prometheus": "port host"}
    if isinstance(to, str) and to in theirs:
        allowed = theirs[to].split()
    elif not isinstance(to, str | type) and (hasattr(to, "add_scalar") or callable(to)):
        allowed = ["every", "all_ranks"]
    else:
        raise invalid("to", "'line', 'tensorboard', 'prometheus', a SummaryWriter or a function", to)
    given = {name: value for name, value in {"every": every, **options}.items() if value is not None}
    for name in given.keys() - allowed:
        raise ArgumentError(f"{name} belongs to another outlet", expected=f"{to!r} takes {', '.join(allowed)}")
    check_optional(check_seconds, "every", every, at_least=0.01)
    check_optional(check_bool, "all_ranks", options["all_ranks"])
    check_optional(check_path, "log_dir", options["log_dir"])
    check_optional(check_int, "port", options["port"], at_least=0, at_most=65535)
    check_optional(check_name, "host", options["host"])


def _port(loader: Any, first: int) -> int:
    """The port of this process: ranks of one host have one each."""
    if not first:
        return 0
    try:
        here = Topology.detect()  # parallel peers that read the same samples are processes of their own
    except TopologyError:  # the user knows better than the environment
        here = loader.topology
    port = first + here.local_rank
    if port > 65535:
        raise ArgumentError("no port is left for this rank", found=f"{first} + local rank {here.local_rank}")
    return port
