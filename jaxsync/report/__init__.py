"""Plans, runs and hangs in forms that people look at: text, HTML, pictures, traces.

What is here takes plain data and knows neither JAX nor threads. The forms need no script, no font and nothing
from the network, and are read in light and dark alike.
"""

from jaxsync.report.text import format_bytes, format_count, format_table

__all__ = ["format_bytes", "format_count", "format_table"]
