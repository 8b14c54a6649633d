"""A switch in user space, for machines whose kernel has no netem: one TUN device in each namespace.

    python benchmarks/relay.py BITS_PER_S DELAY_MS NAMESPACE ...

What a host sends leaves one packet after the other at the rate of its link, and arrives after the delay.
Nothing is dropped. Prints `ready` when the devices are there, and ends when stdin is closed.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import struct
import sys
import time

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_LARGEST = 65536


def open_tun(namespace: str) -> int:
    """A TUN device `eth0` in a namespace, as a file descriptor of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    home, there = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(there, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TUN | _IFF_NO_PI))
        libc.setns(home, _CLONE_NEWNET)
    finally:
        os.close(home)
        os.close(there)
    return device


def relay(devices: list[int], bits_per_s: float, delay_s: float) -> None:
    """Moves IPv4 packets by the last byte of their address: host k has k + 1. Until stdin is closed."""
    free_at_s = dict.fromkeys(devices, 0.0)  # when the link of a host has sent what it was given
    held: list[tuple[float, int, int, bytes]] = []  # when it arrives, order, where, what
    number = 0
    poll = select.poll()
    for source in (*devices, sys.stdin.fileno()):
        poll.register(source, select.POLLIN)
    while True:
        wait_ms = None if not held else max(0.0, (held[0][0] - time.monotonic()) * 1e3)
        for source, _ in poll.poll(wait_ms):
            if source == sys.stdin.fileno():
                return
            packet = os.read(source, _LARGEST)
            if packet[0] >> 4 == 4 and 1 <= packet[19] <= len(devices):
                leaves_s = max(time.monotonic(), free_at_s[source]) + len(packet) * 8 / bits_per_s
                free_at_s[source] = leaves_s
                number += 1
                heapq.heappush(held, (leaves_s + delay_s, number, devices[packet[19] - 1], packet))
        while held and held[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(held)
            os.write(target, packet)


def main() -> None:
    bits_per_s, delay_ms, *namespaces = sys.argv[1:]
    devices = [open_tun(namespace) for namespace in namespaces]
    print("ready", flush=True)
    relay(devices, float(bits_per_s), float(delay_ms) / 1e3)


if __name__ == "__main__":
    main()
