"""The figures of loaders for Prometheus: an HTTP endpoint of this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

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

#: Endpoints of this process by host and port.
_endpoints: dict[tuple[str, int], MetricsEndpoint] = {}
_opening = threading.Lock()


def serve(watched: WatchedLoader, host: str, port: int) -> MetricsEndpoint:
    """Answer for a loader at ``http://host:port/metrics``, beside others of this process.

    Raises:
        MissingExtraError: prometheus_client is not installed.
        ArgumentError: another loader has this name there, or the port cannot be opened.
    """
    with _opening:
        endpoint = _endpoints.get((host, port))
        if endpoint is None or endpoint.closed:
            endpoint = _endpoints[host, port] = MetricsEndpoint(host, port)
        endpoint.join(watched)
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
        self.closed = False
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}/metrics"
        self._host = socket.gethostname()
        #: By name, with the highest value of each counter so far.
        self._watched: dict[str, tuple[WatchedLoader, dict[str, float]]] = {}
        self._started = False
        init_in_each_process(self.reset)
        registry.register(self)

    def reset(self) -> None:
        """In a forked child, which has no thread to answer: close the socket, so that the port becomes free."""
        self._lock = threading.Lock()
        if self._started:
            self._server.socket.close()
            self.closed = True
        self._started = True

    def join(self, watched: WatchedLoader) -> None:
        """Answer for one more loader."""
        with self._lock:
            there = self._watched.get(watched.name)
            if there is not None and there[0].stats() is not None:
                raise ArgumentError(
                    "another loader of this name is watched already",
                    found=repr(watched.name),
                    where=self.url,
                    remedy="give each a name: rankfeed.watch(loader, 'prometheus', name='validation')",
                )
            self._watched[watched.name] = watched, {}

    def leave(self, watched: WatchedLoader) -> None:
        """Answer for a loader no longer."""
        with _opening:
            with self._lock:
                if self._watched.get(watched.name, (None,))[0] is watched:
                    del self._watched[watched.name]
                if self._watched or self.closed:
                    return
                self.closed = True
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def collect(self) -> Iterator[Any]:
        """The answer: the current figures of all loaders."""
        with self._lock:
            found = [figures for figures in map(self._figures, list(self._watched.values())) if figures]
        for family, metrics in zip(self._families, (_COUNTERS, _GAUGES), strict=True):
            for name, description in metrics.items():
                values = family(f"rankfeed_{name}", description, labels=("rank", "host", "loader"))
                for labels, figures in found:
                    values.add_metric(labels, figures[name])
                yield values

    def _figures(self, each: tuple[WatchedLoader, dict[str, float]]) -> tuple[list[str], dict[str, float]] | None:
        watched, highest = each
        stats = watched.stats()
        if stats is None:
            return None
        # Prometheus takes a counter that falls, by a microsecond at the end of a wait, for a restart.
        highest |= {name: max(stats[name], highest.get(name, 0)) for name in _COUNTERS}
        rank = watched.rank()
        return ["" if rank is None else str(rank), self._host, watched.name], {**stats, **highest}
