"""The command line: `jaxsync COMMAND`, one module a command."""

from __future__ import annotations

import argparse
import sys

import jaxsync
from jaxsync.cli import audit, doctor, launch, report, train, tune
from jaxsync.cli.endings import discard, interruptible
from jaxsync.errors import JaxsyncError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE

_COMMANDS = (train, tune, launch, report, audit, doctor)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        0 if all went well; 2 if the job cannot run, after one message on stderr; 130 if it was interrupted;
        141 if what reads its output has stopped.
        `launch` returns what its processes did; `audit` and `doctor` return 1 if something looks wrong.

    Raises:
        SystemExit: From argparse: 0 after `--help` and `--version`, 2 if the arguments make no sense.

    >>> main(["train", "configs/digits.toml", "--set", "train.steps=0"])
    2
    """
    parser = _make_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return EXIT_ERROR
    try:
        with interruptible():
            code: int | None = args.run(args)
            sys.stdout.flush()  # here, and not at exit, where Python can only complain
    except JaxsyncError as error:
        print(f"jaxsync: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt as error:
        print(f"jaxsync: {str(error) or 'interrupted'}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `| head` has read enough
        discard(sys.stdout)
        discard(sys.stderr)
        return EXIT_BROKEN_PIPE
    return code or 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxsync", description="Gradient synchronisation for JAX.")
    parser.add_argument("--version", action="version", version=f"jaxsync {jaxsync.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser
