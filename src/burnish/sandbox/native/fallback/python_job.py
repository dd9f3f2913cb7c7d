"""Python jobs in an interpreter that is already warm: what `python -c`, a script or `-m` would do.

The process is a fork of the template, so its modules are imported. What makes it a fresh
interpreter as far as a program can tell: random state is new, standard streams, arguments,
environment, signals and `__main__` are its own. What stays the template's: the hash seed,
`sys.flags`, the locale, the `site` configuration.
"""

from __future__ import annotations

import atexit
import gc
import io
import itertools
import os
import signal
import sys
import threading
import time
import traceback
import types
from typing import Any, Callable, NamedTuple, NoReturn

from ..protocol import PythonKind, PythonOption
from . import kernel

_OWN_PACKAGE = __name__.partition(".")[0]
_SOFTWARE_ERROR, _USAGE_ERROR, _FLUSH_ERROR = 1, 2, 120


class PythonJob(NamedTuple):
    """What PYTHON adds to EXEC."""

    kind: int
    options: int
    source: bytes


class Importing(NamedTuple):
    """What imports need; the init itself does without, see `box`."""

    path: list[str]
    finders: list[Any]
    own: list[str]
    """Names of our own modules, which no job shall see."""
    num_modules: int
    """How many the template has imported, without ours.

    Jobs never walk through all names: that would touch, and so copy, the pages of each.
    """


def importing_now() -> Importing:
    """What this process can import, for the jobs of its forks."""
    own = [name for name in sys.modules if name.partition(".")[0] == _OWN_PACKAGE]
    return Importing(sys.path[:], sys.meta_path[:], own, len(sys.modules) - len(own))


def run_python(
    job: PythonJob, argv: list[bytes], env: dict[bytes, bytes], importing: Importing
) -> NoReturn:
    """Become the program, and end as `python` ends."""
    kernel.close_from(3)
    kernel.set_dumpable(True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    os.environb.clear()
    os.environb.update(env)
    time.tzset()
    isolated = bool(job.options & PythonOption.ISOLATED)
    _open_streams(unbuffered=not isolated and bool(env.get(b"PYTHONUNBUFFERED")))
    _reseed()
    main = _prepare_modules(importing)
    gc.enable()
    run = _prepare_program(job, argv, main, isolated)
    status = _run(run)
    os._exit(_end(status, main, importing.num_modules))


def _prepare_modules(importing: Importing) -> types.ModuleType:
    """Forget our own modules, restore imports, and start with an empty `__main__`."""
    sys.path[:] = importing.path
    sys.meta_path[:] = importing.finders
    for name in importing.own:
        del sys.modules[name]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    main.__dict__["__loader__"] = sys.modules["_frozen_importlib"].__dict__["BuiltinImporter"]
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    return main


# Streams


def _open_streams(unbuffered: bool) -> None:
    """Streams on the new descriptors, made as the interpreter makes them at start."""
    sys.stdin = sys.__stdin__ = _stream(0, "<stdin>", sys.stdin, unbuffered)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(1, "<stdout>", sys.stdout, unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "<stderr>", sys.stderr, unbuffered)  # type: ignore[misc]


def _stream(descriptor: int, name: str, old: Any, unbuffered: bool) -> io.TextIOWrapper:
    mode = "r" if descriptor == 0 else "w"
    unbuffered = unbuffered and descriptor != 0
    raw: Any = io.FileIO(descriptor, mode, closefd=False)
    raw.name = name
    buffer: Any = raw
    if descriptor == 0:
        buffer = io.BufferedReader(raw)
    elif not unbuffered:
        buffer = io.BufferedWriter(raw)
    stream = io.TextIOWrapper(
        buffer,
        encoding=old.encoding,
        errors=old.errors,
        newline="\n",
        line_buffering=descriptor == 2 or raw.isatty(),
        write_through=unbuffered,
    )
    stream.mode = mode  # type: ignore[misc]
    return stream


# Random state


def _reseed() -> None:
    """New state for every generator that a module keeps, from the kernel's.

    `os.urandom`, `secrets` and `uuid4` keep none. `random` has a fork hook of its own. OpenSSL
    reseeds when the process id has changed: the template's is 1 and no job's is. Telling it again
    would cost 1.4 ms.
    """
    loaded = sys.modules
    if "tempfile" in loaded:
        loaded["tempfile"].__dict__["_name_sequence"] = None
    if "uuid" in loaded:
        loaded["uuid"].__dict__["_last_timestamp"] = None
        loaded["uuid"].__dict__["_node"] = None
    if "numpy.random" in loaded:
        loaded["numpy.random"].seed()


# The program


def _prepare_program(
    job: PythonJob, argv: list[bytes], main: types.ModuleType, isolated: bool
) -> Callable[[], None]:
    """Set arguments and path, and return what to call."""
    source = job.source
    arguments = [os.fsdecode(argument) for argument in argv]
    if not isolated:
        extra = os.environ.get("PYTHONPATH", "")
        sys.path[:0] = [entry for entry in extra.split(os.pathsep) if entry]
    if job.kind == PythonKind.CODE:
        _set_argv("-c", arguments, ["-c", source.decode("utf-8", "surrogateescape")])
        first, run = "", _code_runner(source, main)
    elif job.kind == PythonKind.MODULE:
        name = os.fsdecode(source)
        _set_argv("-m", arguments, ["-m", name])
        first, run = os.getcwd(), _module_runner(name)
    else:
        path = os.fsdecode(source)
        _set_argv(path, arguments, [path])
        if os.path.isdir(path) or _is_zip(path):
            sys.path.insert(0, _shown(path))
            return _module_runner("__main__", alter_argv=False)
        first = os.path.dirname(os.path.realpath(path))
        run = _script_runner(path, main)
    if not isolated:
        sys.path.insert(0, first)
    return run


def _set_argv(first: str, arguments: list[str], command: list[str]) -> None:
    sys.argv[:] = [first, *arguments]
    if sys.version_info >= (3, 10):
        sys.orig_argv[:] = [sys.executable, *command, *arguments]


def _shown(path: str) -> str:
    """How the interpreter names a script: absolute since 3.9, but not normalized."""
    return os.path.join(os.getcwd(), path) if sys.version_info >= (3, 9) else path


def _is_zip(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"PK\3\4"
    except OSError:
        return False


def _code_runner(source: bytes, main: types.ModuleType) -> Callable[[], None]:
    text = source.decode("utf-8", "surrogateescape")

    def run() -> None:
        if sys.version_info >= (3, 13):
            import linecache

            lines = text.splitlines(keepends=True)
            linecache.cache["<string>"] = (len(text), None, lines, "<string>")
        exec(compile(text, "<string>", "exec", 0, True), main.__dict__)

    return run


def _script_runner(path: str, main: types.ModuleType) -> Callable[[], None]:
    from importlib.machinery import SourceFileLoader

    def run() -> None:
        try:
            with open(path, "rb") as file:
                source = file.read()
        except OSError as error:
            reason = f"[Errno {error.errno}] {error.strerror}"
            sys.stderr.write(f"{sys.executable}: can't open file {_shown(path)!r}: {reason}\n")
            raise SystemExit(_USAGE_ERROR) from None
        shown = _shown(path)
        main.__dict__.update(
            __file__=shown, __cached__=None, __loader__=SourceFileLoader("__main__", shown)
        )
        exec(compile(source, shown, "exec", 0, True), main.__dict__)

    return run


def _module_runner(name: str, alter_argv: bool = True) -> Callable[[], None]:
    import runpy

    run_module: Callable[[str, bool], object] = runpy.__dict__["_run_module_as_main"]

    def run() -> None:
        run_module(name, alter_argv)

    return run


# The end


def _run(run: Callable[[], None]) -> int:
    """Exit status of the program, after what `python` would say about it."""
    ended: BaseException | None = None
    try:
        run()
    except BaseException as error:  # noqa: BLE001 - this is the program's last frame
        ended = error
    # Outside of the handler: what goes wrong from here on has no context, as in plain Python.
    if ended is None:
        return 0
    if isinstance(ended, SystemExit):
        return _exit_status(ended)
    # Two frames are ours: this one, and that of the runner.
    frames = ended.__traceback__
    for _ in range(2):
        frames = frames.tb_next if frames else None
    return _report(ended.with_traceback(frames))


def _exit_status(error: SystemExit) -> int:
    code = error.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF if -(2**63) <= code < 2**63 else 0xFF
    _flush(sys.stdout)
    for part in (code, "\n"):
        try:
            sys.stderr.write(str(part))
        except Exception:  # noqa: BLE001 - of the program: it is ending anyway
            continue
    return _SOFTWARE_ERROR


def _report(error: BaseException) -> int:
    sys.last_type, sys.last_value = type(error), error
    sys.last_traceback = error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    _flush(sys.stdout)
    broken: BaseException | None = None
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as raised:  # noqa: BLE001 - the program's own hook
        broken = raised
    if isinstance(broken, SystemExit):
        return _exit_status(broken)
    if broken is not None:
        sys.stderr.write("Error in sys.excepthook:\n")
        own = broken.__traceback__.tb_next if broken.__traceback__ else None
        sys.__excepthook__(type(broken), broken.with_traceback(own), own)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        _flush(sys.stderr)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return _SOFTWARE_ERROR


def _end(status: int, main: types.ModuleType, num_old_modules: int) -> int:
    """What finalization does that a program can see, without freeing the template's objects.

    Freeing them would touch, and so copy, every page that is shared with the template: 8 ms.
    """
    threading.__dict__["_shutdown"]()
    try:
        atexit.__dict__["_run_exitfuncs"]()
    except BaseException:  # noqa: BLE001 - before 3.10 it raises what it has printed
        pass
    status = _flush_standard(status)
    _clear(main)
    num_new = max(0, len(sys.modules) - num_old_modules)
    for name in list(itertools.islice(reversed(sys.modules), num_new)):
        module = sys.modules.pop(name)
        if isinstance(module, types.ModuleType):
            _clear(module)
    gc.collect()
    # Files that something still holds, such as a cycle through a frozen object.
    for item in gc.get_objects():
        if isinstance(item, (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            _flush(item)
    return _flush_standard(status)


def _clear(module: types.ModuleType) -> None:
    """As `_PyModule_Clear`: first names with one underscore, then the others."""
    namespace = module.__dict__
    for private in (True, False):
        for name in list(namespace):
            if (name[:1] == "_" and name[1:2] != "_") is private and name != "__builtins__":
                namespace[name] = None


def _flush_standard(status: int) -> int:
    for stream in (sys.stdout, sys.stderr):
        if stream is None or getattr(stream, "closed", False):
            continue
        try:
            stream.flush()
        except BaseException as error:  # noqa: BLE001 - any object may be in its place
            if stream is sys.stdout:
                frames = error.__traceback__.tb_next if error.__traceback__ else None
                what = traceback.format_exception(type(error), error, frames)
                sys.stdout = None
                sys.stderr.write(f"Exception ignored in: {stream!r}\n{''.join(what)}")
                status = _FLUSH_ERROR
    return status


def _flush(stream: Any) -> None:
    try:
        stream.flush()
    except (OSError, ValueError, AttributeError):
        return
