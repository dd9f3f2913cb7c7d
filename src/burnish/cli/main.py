"""Entry point of the `burnish` command.

Nothing is imported here beyond the standard library: `burnish --help` must answer at once.
"""

import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TextIO

EXIT_BUG = 1
EXIT_USER = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 done, 1 our fault, 2 the user's, 130 interrupted."""
    _replace_closed_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    # What follows -- belongs to somebody else's command.
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in ours
    if debug:
        arguments.remove("--debug")
    with ErrorsForPeople(debug=debug, as_json="--json" in ours):
        from burnish.cli.app import build_app

        status = build_app()(arguments, exit_on_error=False, print_error=False)
        sys.stdout.flush()
        sys.exit(status if isinstance(status, int) else 0)


class ErrorsForPeople:
    """Turns whatever leaves a command into one line, the fix, and an exit status."""

    def __init__(self, *, debug: bool, as_json: bool) -> None:
        """With `debug`, bugs keep their traceback; with `as_json`, errors are also JSON."""
        self._debug = debug
        self._as_json = as_json

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Translate `error`; a clean exit and an exit status pass through."""
        if error is None or isinstance(error, SystemExit | GeneratorExit):
            return
        # Colours and the like are not worth an import here: this also runs when imports fail.
        if isinstance(error, BrokenPipeError):
            # The reader of our output left. Python would complain again when it flushes stdout.
            _discard(sys.stdout)
            raise SystemExit(EXIT_BROKEN_PIPE) from None
        if isinstance(error, KeyboardInterrupt):
            self._say(str(error) or "Interrupted.", code="interrupted")
            raise SystemExit(EXIT_INTERRUPTED) from None
        if isinstance(error, OSError) and error.filename is None and _was_speaking(tb):
            _discard(sys.stdout)
            what: str | None = f"stdout: {error.strerror}. Fix: send the output elsewhere"
        else:
            what = _users_mistake(error, debug=self._debug)
        if what is not None:
            self._say(what, code="user_error")
            raise SystemExit(EXIT_USER) from None
        if self._debug:
            return
        from burnish.core.errors import one_line

        path = _save_traceback(error)
        self._say(
            f"{one_line(error)}. This is a bug in burnish. Traceback: {path} (or run with --debug)",
            code="bug",
        )
        raise SystemExit(EXIT_BUG) from None

    def _say(self, text: str, *, code: str) -> None:
        _write(sys.stderr, f"burnish: {text}\n")
        line = ""
        if self._as_json:
            import json

            error = {"error": {"code": code, "message": text}}
            line = json.dumps(error, separators=(",", ":")) + "\n"
        _write(sys.stdout, line)


def _replace_closed_streams() -> None:
    """Python has None for a stream that its parent closed; the output then goes nowhere.

    Opening in the order of the descriptors takes their places, so that no file of a run does.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _write(stream: TextIO, text: str) -> None:
    """Write and flush; a stream that takes nothing must not hide the exit status."""
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        _discard(stream)


def _was_speaking(tb: TracebackType | None) -> bool:
    """Whether an error left the code that prints: a full stdout is no lack of space for runs."""
    writer = ""
    while tb is not None:
        writer, tb = str(tb.tb_frame.f_globals.get("__name__")), tb.tb_next
    return writer.startswith(("burnish.cli.", "rich.", "cyclopts.")) or writer == "__main__"


def _discard(stream: TextIO) -> None:
    """Let a stream end nowhere: Python flushes it once more at exit."""
    try:
        descriptor = stream.fileno()
    except OSError:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _users_mistake(error: BaseException, *, debug: bool) -> str | None:
    """The line to print if the user can fix `error`, else None."""
    import errno

    from cyclopts import CycloptsError

    from burnish.core.errors import ClassifiedFailure, UserError

    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, CycloptsError):
        verbs = " ".join(("burnish", *(error.command_chain or ()), "--help"))
        return f"{' '.join(str(error).split())} Fix: {verbs}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" ({error.filename})" if error.filename else ""
        return f"No disk space left{where}. Fix: free some, then start again; runs can --resume"
    if isinstance(error, ClassifiedFailure) and not debug:
        # Infrastructure and sandbox: the machine. The others are somebody's code.
        machine = error.failure.kind in ("infra", "sandbox")
        fix = "burnish doctor names what this machine lacks" if machine else "--debug shows where"
        return f"{error}. Fix: {fix}"
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("burnish"):
        return f"Package {error.name} is missing. Fix: pip install 'burnish[train,envs]'"
    return None


def _save_traceback(error: BaseException) -> str:
    """Write the traceback to a file of its own; say so if even that fails."""
    import tempfile
    import traceback

    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="burnish-traceback-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write("".join(traceback.format_exception(error)))
    except OSError as problem:
        return f"could not be saved: {problem}"
    return file.name


if __name__ == "__main__":
    main()
