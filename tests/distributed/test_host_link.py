"""The link between hosts, with each process imitated by a thread."""

import asyncio
import errno
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mugrpo_jax import distributed
from mugrpo_jax.config import ConfigError
from mugrpo_jax.distributed import host_hub, host_link, launch
from mugrpo_jax.distributed.absence import GONE
from mugrpo_jax.distributed.host_link import HostLink
from mugrpo_jax.distributed.launchers import Launch

opened = []


@pytest.fixture(autouse=True)
def ends(monkeypatch):
    """Collects (status, message) by thread, and ends only the thread; closes the links that are left."""
    found = {}

    def end(status, message):
        found[threading.current_thread()] = (status, message)
        if threading.current_thread().name == "host link":
            asyncio.get_running_loop().stop()
        raise asyncio.CancelledError

    monkeypatch.setattr(host_link, "end_process", end)
    monkeypatch.setattr(HostLink, "current", None)
    yield found
    for link in opened:
        link._loop.call_soon_threadsafe(link._loop.stop) if link._loop.is_running() else None
        link._thread.join()
        if not link._loop.is_closed():
            link._loop.run_until_complete(link._disconnect())
            link._loop.close()
    opened.clear()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def connect(count, timeout_s=20.0, port=None, only=None):
    """Connect the processes of a run, or `only` some; return their links, or the errors as text."""
    port = port or free_port()
    places = [Launch("test", "localhost", port, count, i) for i in (only or range(count))]

    def one(place):
        try:
            link = HostLink(place, timeout_s)
            opened.append(link)
            return link
        except ConfigError as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(one, places))


def wait_for(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def vanish(link):
    """Close the connection as the system does for a killed process."""
    link._loop.call_soon_threadsafe(link._writer.transport.abort)


def test_values_and_stop_requests_reach_all():
    links = connect(3)
    with ThreadPoolExecutor(3) as pool:
        big = ["x" * 300_000, {"a": 1}]
        answers = list(pool.map(lambda link: link.gather("x", [link.launch.process, big]), links))
        assert answers == [[[i, big] for i in range(3)]] * 3
        stops = [type("Stop", (), {"requested": False})() for _ in range(3)]
        for link, stop in zip(links[:2], stops, strict=False):
            link.share(stop)
        stops[1].requested = True
        wait_for(lambda: stops[0].requested and links[2].stop_asked)
        links[2].share(stops[2])  # asked before it began to listen
        assert stops[2].requested
        list(pool.map(HostLink.close, links))


def test_a_closed_connection_ends_all_others_at_once(ends):
    began = time.monotonic()
    for dead, count in ((0, 3), (1, 4)):
        ends.clear()
        links = connect(count)
        if dead == 0:
            links[0]._loop.call_soon_threadsafe(
                lambda hub: [writer.transport.abort() for writer in hub._members.values()], links[0]._hub
            )
        else:
            vanish(links[dead])
        others = [link._thread for link in links if link.launch.process != dead]
        wait_for(lambda others=others: all(thread in ends for thread in others))
        line = (
            f"another host is gone: process {dead}, its connection is closed; the same command on all hosts "
        )
        assert {ends[thread] for thread in others} == {(GONE, line + "continues")}
    assert time.monotonic() - began < 8


def test_a_silent_process_ends_all_others(ends):
    links = connect(3, timeout_s=2)
    links[2]._loop.call_soon_threadsafe(time.sleep, 4)  # stopped, or its network cable is out
    wait_for(lambda: len(ends) == 2)
    for thread, (status, message) in ends.items():
        assert thread is not links[2]._thread
        assert status == GONE
        assert "another host is gone: process 2, no sign of life for 2 s" in message


@pytest.mark.parametrize("status", [2, GONE])
def test_an_error_is_told_to_all(ends, status):
    links = connect(3)
    with pytest.raises(asyncio.CancelledError):
        links[1].fail("data.jsonl: no such file", status)
    wait_for(lambda: len(ends) == 3)
    told = (status, "process 1: data.jsonl: no such file")
    assert sorted(ends.values()) == [(status, "data.jsonl: no such file"), told, told]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ConfigError("seed: too large"), 2, "seed: too large"),
        (OSError("no disk"), 2, "no disk"),
        (distributed.Absent("no sampler"), GONE, "no sampler"),
        (KeyboardInterrupt(), 130, "interrupted; the same command on all hosts continues"),
        (ZeroDivisionError("a\nb"), 1, "ZeroDivisionError: a b"),
    ],
)
def test_an_error_ends_all_hosts_with_the_status_of_its_kind(monkeypatch, capsys, error, status, message):
    class Link:
        def __init__(self, place, timeout_s):
            self.launch = place

        def fail(self, message, status):
            raise SystemExit((status, message))

    monkeypatch.setattr(launch, "HostLink", Link)
    for done in ("_initialize_jax", "_announce"):
        monkeypatch.setattr(launch, done, lambda *_: None)
    with pytest.raises(SystemExit) as ended, distributed.hosts("localhost:8476", 2, 0):
        raise error
    assert ended.value.code == (status, message)
    assert ("Traceback" in capsys.readouterr().err) == (status == 1)


def test_processes_that_do_not_come_are_named(monkeypatch, capsys):
    monkeypatch.setattr(host_hub, "SAY_AFTER_S", 0.1)
    (first, third) = connect(4, timeout_s=0.5, only=[0, 2])
    assert first == third
    assert first == (
        "Absent: processes 1, 3 of 4 did not come within 0.5 s; start all of them, or wait longer with "
        "--host-timeout"
    )
    (line,) = capsys.readouterr().err.splitlines()  # process 2 may still be on its way
    found = r"hosts: waiting for processes 1,( 2,)? 3 of 4 \(0 s, at most 0\.5 s, see --host-timeout\)"
    assert re.fullmatch(found, line)


def test_a_dead_coordinator_is_named(monkeypatch, capsys):
    monkeypatch.setattr(host_link, "SAY_AFTER_S", 0.1)
    port = free_port()
    (message,) = connect(2, timeout_s=0.3, port=port, only=[1])
    assert message == (
        f"Absent: test: process 0 at localhost:{port} not reached within 0.3 s (Connection refused); "
        "start it, and check its name, its port and the firewall"
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hosts: waiting for process 0 at localhost:{port} (0 s, at most 0.3 s")


def test_wrong_numbers_are_refused_and_strangers_ignored():
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(connect, 2, 20.0, port, [0])
        time.sleep(0.3)
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert stranger.recv(100) == b""
        (message,) = connect(3, port=port, only=[2])
        found = "ConfigError: this is one of 3 processes, but process 0 was started as one of 2"
        assert message.startswith(found)
        (message,) = connect(2, port=port, only=[0])
        assert f"port {port} cannot be opened here (Address already in use)" in message
        (second,) = connect(2, port=port, only=[1])
        (message,) = connect(2, port=port, only=[1])
        assert message == "ConfigError: there is already a process 1; give each process its own number"
        links = [*first.result(), second]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(HostLink.close, links))


def test_a_port_of_another_program_is_no_process_of_this_one():
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            with other.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                connection.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        (message,) = connect(2, port=other.getsockname()[1], only=[1])
        thread.join()
    assert "answers, but is no process of this program" in message


def test_hosts_without_ipv6_can_start(monkeypatch):
    class OnlyIPv4(socket.socket):
        def __init__(self, family=socket.AF_INET, *arguments, **keywords):
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *arguments, **keywords)

    monkeypatch.setattr(host_hub.socket, "socket", OnlyIPv4)
    links = connect(2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(HostLink.close, links))


def test_a_slow_process_is_named_and_at_last_ends_the_run(ends, monkeypatch, capfd):
    monkeypatch.setattr(host_hub, "SLOW_S", 0.5)
    monkeypatch.setattr(host_hub, "LATEST_S", 2.5)
    links = connect(2)
    threading.Thread(target=links[0].gather, args=["load", 1], daemon=True).start()
    wait_for(lambda: len(ends) == 2)
    assert "mugrpo: process 1 has not reached 'load' for " in capfd.readouterr().err
    for status, message in ends.values():
        assert status == GONE
        assert message.startswith("process 1 has not reached 'load' for ") and message.endswith("; gave up")


def test_hosts_that_are_out_of_step_end(ends):
    links = connect(2)
    for link, name in zip(links, ("load", "claim"), strict=True):
        threading.Thread(target=link.gather, args=[name, 1], daemon=True).start()
    wait_for(lambda: len(ends) == 2)
    out = "the hosts are out of step: process 1 is at 'claim', process 0 at 'load'"
    assert set(ends.values()) == {(2, out)}


def test_a_process_that_is_behind_is_named(monkeypatch, capfd):
    monkeypatch.setattr(host_hub, "SLOW_S", 0.5)
    links = connect(2)
    for link in links:
        link.reached("update 3")
    links[0].reached("update 4")
    wait_for(lambda: links[0]._hub._warned)
    shown = capfd.readouterr().err
    assert shown.startswith("mugrpo: process 1 has been at 'update 3' for ")
    assert shown.endswith("s, others are at 'update 4'; the others wait\n")


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_limit_that_is_none_is_refused(seconds):
    with (
        pytest.raises(ConfigError, match="--host-timeout: expected a number of seconds above 0"),
        distributed.hosts(timeout_s=seconds),
    ):
        pass
