"""What the figures of a run are called, and how each is written: by `jaxsync train` and by a report alike."""

from __future__ import annotations

import math

from jaxsync.report.text import format_bytes

FINAL_LOSS = "final training loss"
SKIPPED = "steps skipped as not finite"
SPEED = "steps/s"
COLLECTIVES = "collectives per step"
BYTES_SYNCED = "bytes synced per step"
GRADIENT_ERROR = "largest gradient difference"
IN_LOOPS = "in loops, which run more than once"  # collectives


def format_metric(name: str, value: float) -> str:
    """What a workload measured on held-out data.

    >>> format_metric("test_accuracy", 0.98611), format_metric("val_bits_per_char", 1.90149)
    ('98.61 %', '1.901')
    """
    return f"{100 * value:.2f} %" if name.endswith("accuracy") else f"{value:.3f}"


def format_speed(steps_per_s: float | None) -> str:
    """Steps a second; None is unknown.

    >>> format_speed(273.66), format_speed(None)
    ('273.7', '-')
    """
    return "-" if steps_per_s is None else f"{steps_per_s:.1f}"


def format_bytes_synced(num_bytes: int) -> str:
    """Bytes that each device hands to the collectives of one sync.

    >>> format_bytes_synced(2048)
    '2048 (2.0 KiB)'
    """
    return f"{num_bytes} ({format_bytes(num_bytes)})"


def format_gradient_error(value: float | None) -> str:
    """The largest difference of a synced gradient to that of one device; None and NaN are unknown.

    >>> format_gradient_error(1.34e-8), format_gradient_error(None)
    ('1.3e-08 of the norm, to one device', '-')
    """
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.1e} of the norm, to one device"
