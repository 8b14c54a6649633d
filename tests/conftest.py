"""Eight CPU devices for the whole test process, before anything uses JAX."""

import jaxsync

jaxsync.simulate_devices(8)
