"""Hosts on one machine: network namespaces, joined by links of a rate and a delay.

Needs Linux and the right to make network namespaces. Nothing outside of the namespaces is changed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PREFIX = "10.77.0."


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What lies between a host and the switch.

    Attributes:
        rate: As `tc` has it, such as `"1gbit"`; of what leaves a host.
        delay_ms: Of what leaves a host; a round trip takes twice as long.
    """

    rate: str
    delay_ms: int

    @property
    def bits_per_s(self) -> float:
        """
        >>> Link(rate="100mbit", delay_ms=1).bits_per_s
        100000000.0
        """
        number = self.rate.removesuffix("gbit").removesuffix("mbit")
        return float(number) * (1e9 if self.rate.endswith("gbit") else 1e6)

    def __str__(self) -> str:
        return f"{self.rate}, {self.delay_ms} ms"


class NoNamespacesError(Exception):
    """The machine does not let us make network namespaces; the text says why."""


def address(host: int) -> str:
    """The address of a host.

    >>> address(0)
    '10.77.0.1'
    """
    return f"{PREFIX}{host + 1}"


@contextlib.contextmanager
def hosts(number: int, link: Link) -> Iterator[tuple[list[str], str]]:
    """Namespaces that reach each other over such links, and what shapes these; removed at the end.

    The kernel's netem where it has one, else `relay.py`, which takes some of the machine's time.

    Raises:
        NoNamespacesError: They cannot be made here.
    """
    token = os.getpid()
    switch, names = f"jaxsync-{token}-switch", [f"jaxsync-{token}-{host}" for host in range(number)]
    with contextlib.ExitStack() as stack:
        for name in (switch, *names):
            _run("ip", "netns", "add", name)
            stack.callback(_remove, name)
            _in(name, "ip", "link", "set", "lo", "up")
        shaper = "netem" if _has_netem(switch) else "relay.py"
        if shaper == "netem":
            _join_by_bridge(switch, names, link)
        else:
            stack.enter_context(_join_by_relay(names, link))
        yield names, shaper


def _has_netem(name: str) -> bool:
    try:
        _in(name, "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "0ms")
    except NoNamespacesError:
        return False
    _in(name, "tc", "qdisc", "delete", "dev", "lo", "root")
    return True


def _join_by_bridge(switch: str, names: Sequence[str], link: Link) -> None:
    _in(switch, "ip", "link", "add", "bridge0", "type", "bridge")
    _in(switch, "ip", "link", "set", "bridge0", "up")
    for host, name in enumerate(names):
        _run(
            *("ip", "link", "add", "eth0", "netns", name, "type", "veth"),
            *("peer", "name", f"port{host}", "netns", switch),
        )
        _in(switch, "ip", "link", "set", f"port{host}", "master", "bridge0", "up")
        _start_device(host, name)
        netem = ["netem", "delay", f"{link.delay_ms}ms", "rate", link.rate, "limit", "100000"]
        _in(name, "tc", "qdisc", "add", "dev", "eth0", "root", *netem)


@contextlib.contextmanager
def _join_by_relay(names: Sequence[str], link: Link) -> Iterator[None]:
    command = [sys.executable, str(Path(__file__).with_name("relay.py"))]
    command += [str(link.bits_per_s), str(link.delay_ms), *names]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as relay:
        assert relay.stdin is not None
        assert relay.stdout is not None
        try:
            if relay.stdout.readline() != "ready\n":
                raise NoNamespacesError("the relay cannot open a TUN device in them")
            for host, name in enumerate(names):
                _start_device(host, name)
                _in(name, "ip", "link", "set", "eth0", "mtu", "9000")
            yield
        finally:
            relay.stdin.close()


def _start_device(host: int, name: str) -> None:
    _in(name, "ip", "address", "add", f"{address(host)}/24", "dev", "eth0")
    _in(name, "ip", "link", "set", "eth0", "up")


def wrap(name: str, host: int, command: list[str]) -> list[str]:
    """The command that runs `command` on a host, which is called by its address: gloo looks its name up."""
    shell = f'hostname {address(host)} && exec "$@"'
    return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", shell, "sh", *command]


def _in(name: str, *command: str) -> None:
    _run("ip", "netns", "exec", name, *command)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoNamespacesError(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        raise NoNamespacesError(f"{' '.join(command)}: {done.stderr.strip()}")


def _remove(name: str) -> None:
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
