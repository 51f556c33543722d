"""The figures of loaders for Prometheus: an HTTP endpoint of this process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from rankfeed._util.fork_safety import init_in_each_process
from rankfeed.diagnostics.watch.figures import WatchedLoader
from rankfeed.errors import ArgumentError
from rankfeed.sources.extras import need

#: Figures that only grow, and their descriptions; the metric of a figure is ``rankfeed_<figure>``.
_COUNTERS = {
    "steps": "Batches delivered.",
    "samples": "Samples delivered.",
    "seconds": "Seconds since the first batch was requested.",
    "waited_seconds": "Seconds that training waited for batches.",
    "cache_lookups": "Rows read of decoded chunks.",
    "cache_hits": "Rows whose chunk was decoded already.",
    "padded_bytes": "Bytes of ragged columns with their padding.",
    "padding_bytes": "Bytes of padding of ragged columns.",
}
_GAUGES = {
    "epoch": "Current epoch, or the last one.",
    "epoch_step": "Steps of the epoch that are done.",
    "epoch_steps": "Steps of the epoch; 0 for a stream.",
    "waiting_seconds": "Seconds that training has waited for the current batch.",
    "private_bytes": "Memory of this process alone, without mapped data.",
}

#: Endpoints of this process by host and port, and a lock of them and their loaders.
_endpoints: dict[tuple[str, int], MetricsEndpoint] = {}
_changing = threading.Lock()


def serve(watched: WatchedLoader, host: str, port: int) -> MetricsEndpoint:
    """Answer for a loader at ``http://host:port/metrics``, beside others of this process."""
    with _changing:
        endpoint = _endpoints.get((host, port))
        if endpoint is None or endpoint.closed:
            endpoint = _endpoints[host, port] = MetricsEndpoint(host, port)
        other = endpoint.watched.get(watched.name)
        if other is not None and other.stats() is not None:
            raise ArgumentError(
                "another loader of this name is watched already",
                found=repr(watched.name),
                where=endpoint.url,
                remedy="give each a name: rankfeed.watch(loader, 'prometheus', name='validation')",
            )
        endpoint.watched[watched.name] = watched
        return endpoint


class MetricsEndpoint:
    """A daemon thread that answers Prometheus until the last loader leaves; port 0 is any that is free."""

    def __init__(self, host: str, port: int) -> None:
        client, core = (need(f"prometheus_client{part}", extra="prometheus") for part in ("", ".core"))
        self._families = core.CounterMetricFamily, core.GaugeMetricFamily
        registry = client.CollectorRegistry()
        try:
            self._server, self._thread = client.start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ArgumentError(
                "the port for Prometheus cannot be opened",
                found=f"{host}:{port}: {error.strerror or error}",
                remedy="another port=, or port=0 for any that is free; the ranks of a host use port + local_rank",
            ) from error
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}/metrics"
        self.closed = False
        self.watched: dict[str, WatchedLoader] = {}
        #: The highest value of each counter so far.
        self._highest: WeakKeyDictionary[WatchedLoader, dict[str, float]] = WeakKeyDictionary()
        self._process = os.getpid()
        init_in_each_process(self.reset)
        registry.register(self)

    def reset(self) -> None:
        """In a forked child, which has no thread to answer: close the socket, so that the port becomes free."""
        if self._process != os.getpid():
            self._server.socket.close()
            self.closed = True

    def leave(self, watched: WatchedLoader) -> None:
        """Answer for a loader no longer."""
        with _changing:
            if self.watched.get(watched.name) is watched:
                del self.watched[watched.name]
            if not self.watched and not self.closed:
                self.closed = True
                self._server.shutdown()
                self._server.server_close()
                self._thread.join()

    def collect(self) -> Iterator[Any]:
        """The answer: the current figures of all loaders."""
        found = []
        for watched in [*self.watched.values()]:
            if (stats := watched.stats()) is not None:
                # Prometheus takes a counter that falls, by a microsecond at the end of a wait, for a restart.
                highest = self._highest.setdefault(watched, {})
                highest |= {name: max(stats[name], highest.get(name, 0)) for name in _COUNTERS}
                rank = watched.rank()
                labels = ["" if rank is None else str(rank), socket.gethostname(), watched.name]
                found.append((labels, {**stats, **highest}))
        for family, metrics in zip(self._families, (_COUNTERS, _GAUGES), strict=True):
            for name, description in metrics.items():
                values = family(f"rankfeed_{name}", description, labels=("rank", "host", "loader"))
                for labels, figures in found:
                    values.add_metric(labels, figures[name])
                yield values
