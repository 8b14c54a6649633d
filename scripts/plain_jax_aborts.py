"""Shows what guard_dispatch is for: the same loop in plain JAX ends the process.

    python scripts/plain_jax_aborts.py [DEVICES]     (default 8; 0.10.2 on 2 cores)

On a machine with fewer cores than simulated devices, JAX 0.10 hangs within about 40 un-awaited launches of a
program with a collective, and XLA ends the process with SIGABRT after 60 seconds (exit code 134 in a shell).
JAX 0.12 was seen to survive. Run it by hand: it is no test, because its point is to be killed.

With `--guarded` the same loop runs 20,000 times and exits with 0.
"""

from __future__ import annotations

import argparse
import sys

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxsync


def main() -> None:
    """Launches un-awaited programs until the process is gone or the loop is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("devices", nargs="?", type=int, default=8)
    parser.add_argument("--guarded", action="store_true")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", arguments.devices)  # and not the larger thread pool
    mesh = jaxsync.make_mesh({"data": arguments.devices})
    step = jax.jit(
        jax.shard_map(
            lambda x: (x + jax.lax.pmean(x.sum(), "data")) / 3,
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data"),
        )
    )
    if arguments.guarded:
        step = jaxsync.guard_dispatch(step)
    x = jnp.ones(2 * arguments.devices)
    for launch in range(20_000):
        x = step(x)
        if launch % 20 == 0:
            sys.stderr.write(f"\rlaunched {launch}")
    sys.stderr.write(f"\nfinished, x = {float(x[0])}\n")


if __name__ == "__main__":
    main()
