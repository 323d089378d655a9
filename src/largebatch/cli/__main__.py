"""Which verb was typed, and how does a failure end? One verb a file; here they only meet."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Run the command line; a user's error is one sentence and exit code 2, Ctrl-C is 130."""
    if importlib.util.find_spec("typer") is None:
        sys.stderr.write(
            "error: the command line needs the package 'typer', which is not installed. "
            "Run: pip install 'largebatch[study]'\n"
        )
        sys.exit(2)
    try:
        from largebatch.cli.app import run
    except KeyboardInterrupt:
        sys.stderr.write("error: stopped before anything was begun.\n")
        sys.exit(130)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
