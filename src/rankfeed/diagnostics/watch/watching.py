"""Showing how a loader is doing while it is iterated."""

from __future__ import annotations

import atexit
import os
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

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
from rankfeed.diagnostics.watch.figures import Curves, FunctionOutlet, Outlet, RecentRates, WatchedLoader
from rankfeed.diagnostics.watch.line import line_for
from rankfeed.diagnostics.watch.prometheus import serve
from rankfeed.errors import ArgumentError, TopologyError, safe_str
from rankfeed.topology import Topology

#: Port of local rank 0 for Prometheus: below those that systems assign themselves.
PORT = 18700
#: Seconds that the end of a job waits for an outlet that hangs.
_CLOSE_TIMEOUT = 5.0
_OPTIONS = {"line": "every all_ranks", "tensorboard": "every all_ranks log_dir", "prometheus": "port host"}


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

    Watching never stops training: an outlet that fails is closed with one warning.

    Args:
        loader: a `Loader`, also one that Accelerate prepared.
        to: "line": one line, in place if standard error is a terminal, now and then if it is a file.
            "tensorboard", or a ``SummaryWriter``. "prometheus": an endpoint at ``url``. Or a function that is
            called with a dict of numbers (``wandb.log``, say).
        name: of the loader, if several are watched.
        every: seconds between two readings; if left out, 1 on a terminal, 30 in a log, 10 elsewhere.
        all_ranks: show all ranks, not only rank 0. (For Prometheus each rank answers for itself.)
        log_dir: folder of TensorBoard's files; its own choice if None. With ``all_ranks`` it has one for each.
        port: for Prometheus, of local rank 0; others add their local rank. 18700 if None; 0 for any that is free.
        host: address on which Prometheus is answered, of this machine alone if None; "0.0.0.0" for all.

    Returns:
        a context manager; without ``with`` it ends at `Watch.close`, or with the loader or the process.

    Raises:
        ArgumentError: no such outlet, an option of another one, or a port that cannot be opened.
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
        watched = WatchedLoader(loader, name or "loader")
        endpoint = serve(watched, host or "127.0.0.1", _port(loader, PORT if port is None else port))
        return Watch(lambda: endpoint.leave(watched), endpoint.url)
    if isinstance(to, str):
        outlet: Outlet = Curves(name, log_dir=log_dir, by_rank=bool(all_ranks)) if to != "line" else line_for(name)
    elif hasattr(to, "add_scalar"):
        outlet = Curves(name, writer=to)
    else:
        outlet = FunctionOutlet(name, to)
    return Watch(_follow(WatchedLoader(loader, name), outlet, every or outlet.every, bool(all_ranks)))


class Watch:
    """What `watch` returns.

    Attributes:
        url: of the endpoint for Prometheus; None for other outlets.
    """

    def __init__(self, close: Callable[[], None], url: str | None = None) -> None:
        self._close = close
        self._process = os.getpid()
        self.url = url
        atexit.register(self.close)

    def close(self) -> None:
        """Show the last figures and end."""
        atexit.unregister(self.close)
        if self._process == os.getpid():  # a forked child has no thread
            self._close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _follow(watched: WatchedLoader, outlet: Outlet, every: float, all_ranks: bool) -> Callable[[], None]:
    """Show a loader by a daemon thread, which alone calls the outlet; returns what ends it."""
    closed = threading.Event()

    def show() -> None:
        recent, last = RecentRates(), False
        while not last:
            last = closed.wait(every)
            if (figures := watched.stats()) is None:
                return
            if figures["seconds"]:  # it was iterated, so its rank is known
                rank = watched.rank()
                if all_ranks or not rank:
                    outlet.show(recent.of(figures, time.monotonic()), rank)

    def run() -> None:
        text = ""
        try:
            show()
        except Exception as error:
            text = f"the loader is no longer watched: {type(error).__name__}: {safe_str(error)}"
        with suppress(Exception):
            outlet.close()
        if text:
            warnings.warn(text, RuntimeWarning, stacklevel=1)

    def close() -> None:
        closed.set()
        thread.join(_CLOSE_TIMEOUT)  # a disk or terminal that hangs does not delay the end of the job

    thread = threading.Thread(target=run, name="rankfeed-watch", daemon=True)
    thread.start()
    return close


def _check_options(to: Any, *, every: Any, all_ranks: Any, log_dir: Any, port: Any, host: Any) -> None:
    if isinstance(to, str) and to in _OPTIONS:
        allowed = _OPTIONS[to].split()
    elif not isinstance(to, str | type) and (hasattr(to, "add_scalar") or callable(to)):
        allowed = ["every", "all_ranks"]
    else:
        raise invalid("to", "'line', 'tensorboard', 'prometheus', a SummaryWriter or a function", to)
    options = {"every": every, "all_ranks": all_ranks, "log_dir": log_dir, "port": port, "host": host}
    for name, value in options.items():
        if value is not None and name not in allowed:
            raise ArgumentError(f"{name} belongs to another outlet", expected=f"{to!r} takes {', '.join(allowed)}")
    check_optional(check_seconds, "every", every, at_least=0.01)
    check_optional(check_bool, "all_ranks", all_ranks)
    check_optional(check_path, "log_dir", log_dir)
    check_optional(check_int, "port", port, at_least=0, at_most=65535)
    check_optional(check_name, "host", host)


def _port(loader: Any, first: int) -> int:
    """The port of this process: each rank of a host has its own."""
    if not first:
        return 0
    try:
        topology = Topology.detect()  # parallel peers that read the same samples are processes of their own
    except TopologyError:
        topology = loader.topology
    port = first + topology.local_rank
    if port > 65535:
        raise ArgumentError("no port is left for this rank", found=f"{first} + local rank {topology.local_rank}")
    return port
