"""Prometheus is answered over HTTP, at any time, by this machine alone; the port is free in time."""

import os
import re
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.diagnostics.watching import Doing, doing
from tests.support.jobs import free_port

import rankfeed as rf
from rankfeed.errors import ArgumentError, MissingExtraError

LIMIT = 30


def asked(watching: Any) -> dict[tuple[str, str, str], float]:
    """What Prometheus reads: values by metric, rank and loader."""
    with urllib.request.urlopen(watching.url, timeout=LIMIT) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["host"] == socket.gethostname()
            place = sample.name, sample.labels["rank"], sample.labels["loader"]
            assert place not in found
            found[place] = sample.value
    return found


def test_two_loaders_share_an_endpoint_and_the_last_closes_it() -> None:
    train = rf.Loader(rf.from_dataset([{"x": 1.0}] * 8), batch_size=2, topology=rf.Topology(rank=1, world_size=2))
    with rf.watch(train, "prometheus", port=0, name="train") as first:
        before = asked(first)
        assert before["rankfeed_steps_total", "1", "train"] == 0
        with rf.watch(doing(), "prometheus", port=0, name="test") as second:
            assert second.url == first.url
            list(train)
            both = asked(first)
        after = asked(first)
    assert both["rankfeed_samples_total", "1", "train"] == 4
    assert both["rankfeed_epoch_steps", "1", "train"] == 2
    assert both["rankfeed_cache_hits_total", "0", "test"] == 105
    assert both["rankfeed_waited_seconds_total", "0", "test"] == 5.0
    assert len(both) == 2 * len(after) == 2 * len(before) == 26
    with pytest.raises(urllib.error.URLError):
        asked(first)
    assert not [thread for thread in threading.enumerate() if "serve_forever" in thread.name]


def test_only_this_machine_is_answered_unless_told_otherwise() -> None:
    with rf.watch(doing(), "prometheus", port=0) as watching:
        port = int(re.fullmatch(r"http://127\.0\.0\.1:(\d+)/metrics", watching.url)[1])  # type: ignore[index]
        with socket.socket() as client, pytest.raises(OSError):  # noqa: PT012
            client.settimeout(LIMIT)
            client.connect(("127.0.0.2", port))
    with rf.watch(doing(), "prometheus", port=0, host="0.0.0.0") as watching, socket.socket() as client:
        client.connect(("127.0.0.2", int(watching.url.split(":")[2].split("/")[0])))


def test_a_name_that_is_taken_is_refused_until_its_loader_is_gone() -> None:
    loader = Doing()
    with rf.watch(loader, "prometheus", port=0) as first:
        with pytest.raises(ArgumentError, match="another loader of this name"):
            rf.watch(doing(), "prometheus", port=0)
        del loader
        other = Doing(epoch=5)
        with rf.watch(other, "prometheus", port=0) as second:
            assert asked(second)["rankfeed_epoch", "0", "loader"] == 5
            first.close()
            assert asked(second)["rankfeed_epoch", "0", "loader"] == 5


def test_a_port_that_is_taken_is_an_error_with_a_remedy() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with pytest.raises(ArgumentError, match=r"(?s)cannot be opened.*in use.*port \+ local_rank"):
            rf.watch(doing(), "prometheus", port=server.getsockname()[1])
    with pytest.raises(ArgumentError, match="cannot be opened"):
        rf.watch(doing(), "prometheus", port=0, host="192.0.2.1")


def test_ranks_of_one_host_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with rf.watch(doing(), "prometheus", port=port - 1) as watching:
        assert watching.url == f"http://127.0.0.1:{port}/metrics"
    with pytest.raises(ArgumentError, match="no port is left"):
        rf.watch(doing(), "prometheus", port=65535)


def test_a_process_that_was_forked_meanwhile_does_not_hold_the_port() -> None:
    port = free_port()
    theirs, ours = os.pipe()
    watching = rf.watch(doing(), "prometheus", port=port)
    child = os.fork()
    if not child:
        os.close(ours)
        watching.close()  # and is not held up by it
        os.read(theirs, 1)
        os._exit(7)
    try:
        assert asked(watching)["rankfeed_epoch", "0", "loader"] == 2
        watching.close()
        with rf.watch(doing(epoch=3), "prometheus", port=port) as again:
            assert asked(again)["rankfeed_epoch", "0", "loader"] == 3
        os.write(ours, b".")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        child = 0
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(ours)
        os.close(theirs)


def test_an_answer_does_not_wait_for_a_loader_that_waits() -> None:
    held, reading = threading.Event(), threading.Event()

    def slow(sample: Any) -> Any:
        reading.set()
        assert held.wait(LIMIT)
        return sample

    loader = rf.Loader(rf.from_dataset([{"x": 1.0}] * 4), batch_size=2, transform=slow, topology=rf.Topology())
    consumer = threading.Thread(target=lambda: list(loader))
    with rf.watch(loader, "prometheus", port=0) as watching:
        consumer.start()
        assert reading.wait(LIMIT)
        seen = [asked(watching) for _ in range(3)]
        held.set()
        while consumer.is_alive():
            seen.append(asked(watching))
        seen.append(asked(watching))
    waits = [each["rankfeed_waiting_seconds", "0", "loader"] for each in seen]
    assert 0 < waits[0] < waits[1] < waits[2]
    assert waits[-1] == 0
    for name in ("rankfeed_waited_seconds_total", "rankfeed_seconds_total", "rankfeed_steps_total"):
        counts = [each[name, "0", "loader"] for each in seen]
        assert counts == sorted(counts)


def test_without_prometheus_client_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    missing: Any = None
    monkeypatch.setitem(sys.modules, "prometheus_client", missing)
    with pytest.raises(MissingExtraError, match=r"pip install 'rankfeed\[prometheus\]'"):
        rf.watch(doing(), "prometheus", port=0)
