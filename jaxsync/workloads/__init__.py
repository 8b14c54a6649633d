"""Small real training jobs in plain JAX: handwritten digits, and a character model of Python's own help.

Importing this package starts no backend and needs no extra; running a job needs `jaxsync[train]`.
"""
