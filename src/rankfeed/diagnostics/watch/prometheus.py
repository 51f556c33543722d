"""How loaders are doing, for Prometheus to ask: an endpoint of this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

from rankfeed._util.fork_safety import init_in_each_process
from rankfeed.diagnostics.watch.watched import Watched
from rankfeed.errors import ArgumentError
from rankfeed.sources.extras import need

#: Figures that only grow, and others: name of the metric, of the figure, and what is said of it.
_COUNTERS = (
    ("rankfeed_steps", "steps", "Batches delivered."),
    ("rankfeed_samples", "samples", "Samples delivered."),
    ("rankfeed_seconds", "seconds", "Seconds since the first batch was asked for."),
    ("rankfeed_waited_seconds", "waited_seconds", "Seconds that training waited for batches."),
    ("rankfeed_cache_lookups", "cache_lookups", "Rows read of decoded chunks."),
    ("rankfeed_cache_hits", "cache_hits", "Rows whose chunk was decoded already."),
    ("rankfeed_padded_bytes", "padded_bytes", "Bytes of ragged columns with their padding."),
    ("rankfeed_padding_bytes", "padding_bytes", "Bytes of ragged padding."),
)
_GAUGES = (
    ("rankfeed_epoch", "epoch", "Epoch in hand, or the last one."),
    ("rankfeed_epoch_step", "epoch_step", "Steps of the epoch that are done."),
    ("rankfeed_epoch_steps", "epoch_steps", "Steps of the epoch; 0 for a stream."),
    ("rankfeed_waiting_seconds", "waiting_seconds", "Seconds that training has waited for the batch in hand."),
    ("rankfeed_private_bytes", "private_bytes", "Memory of this process alone, mapped data left out."),
)
_LABELS = ("rank", "host", "loader")

#: Endpoints of this process, by the host and port that were asked for.
_endpoints: dict[tuple[str, int], Endpoint] = {}
_opening = threading.Lock()


def serve(watched: Watched, host: str, port: int) -> Endpoint:
    """Have Prometheus find a loader at ``http://host:port/metrics``, beside others of this process.

    Raises:
        MissingExtraError: prometheus_client is not installed.
        ArgumentError: another loader has this name there, or the port cannot be had.
    """
    with _opening:
        endpoint = _endpoints.get((host, port))
        if endpoint is None or endpoint.closed:
            endpoint = _endpoints[host, port] = Endpoint(host, port)
        endpoint.join(watched)
        return endpoint


class Endpoint:
    """A daemon thread that answers Prometheus; it ends with the last loader that leaves.

    Args:
        host: address to listen at.
        port: 0 for any that is free.
    """

    def __init__(self, host: str, port: int) -> None:
        client, core = (need(f"prometheus_client{part}", extra="prometheus") for part in ("", ".core"))
        self._families = core.CounterMetricFamily, core.GaugeMetricFamily
        registry = client.CollectorRegistry()
        try:
            self._server, self._thread = client.start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ArgumentError(
                "the port for Prometheus cannot be had",
                found=f"{host}:{port}: {error.strerror or error}",
                remedy="another port=, or port=0 for any that is free; the ranks of a host take port + local_rank",
            ) from error
        self.closed = False
        number = self._server.server_port
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{number}/metrics"
        self._host = socket.gethostname()
        self._watched: dict[str, tuple[Watched, dict[str, float]]] = {}
        self._here = False
        init_in_each_process(self.start_anew)
        registry.register(self)

    def start_anew(self) -> None:
        """In a forked child there is no thread to answer: the port is let go of, so that it is free in time."""
        self._lock = threading.Lock()
        if self._here:
            self._server.socket.close()
            self.closed = True
        self._here = True

    def join(self, watched: Watched) -> None:
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

    def leave(self, watched: Watched) -> None:
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
        """What Prometheus is answered: the figures of all loaders, as they are now."""
        with self._lock:
            found = [figures for figures in map(self._figures, list(self._watched.values())) if figures]
        for family, metrics in zip(self._families, (_COUNTERS, _GAUGES), strict=True):
            for metric, name, said in metrics:
                values = family(metric, said, labels=_LABELS)
                for labels, figures in found:
                    values.add_metric(labels, figures[name])
                yield values

    def _figures(self, each: tuple[Watched, dict[str, float]]) -> tuple[list[str], dict[str, float]] | None:
        watched, highest = each
        stats = watched.stats()
        if stats is None:
            return None
        # A counter that goes back by a microsecond, where a wait just ends, would be taken for a restart.
        highest |= {name: max(stats[name], highest.get(name, 0)) for _, name, _ in _COUNTERS}
        rank = watched.rank()
        return ["" if rank is None else str(rank), self._host, watched.name], {**stats, **highest}
