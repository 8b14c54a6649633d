"""`python -m jaxsync`: the command line."""

from jaxsync.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
