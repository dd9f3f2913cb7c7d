"""Boxes in which Python jobs start warm: forks of an interpreter that has imported its modules."""

from burnish.core.boxes import ExecResult, Limits
from burnish.sandbox.native.protocol import PythonKind, PythonOption
from burnish.sandbox.native.stateful import NativeBox
from burnish.sandbox.native.wire import PythonPart

_MAX_SOURCE_BYTES = 8 * 2**20


class WarmBox(NativeBox):
    """A box of a template (`NativePool.acquire_python`). Other commands run in it as in any box."""

    async def python(
        self,
        source: str,
        *,
        kind: PythonKind = PythonKind.CODE,
        argv: tuple[str, ...] = (),
        stdin: bytes = b"",
        limits: Limits | None = None,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        keep: bool = False,
        isolated: bool = True,
    ) -> ExecResult:
        """Run a program as `python` would, without its start and without its imports.

        Exit status, output, tracebacks and files are those of `python -B`. Different are: the hash
        seed, `sys.flags`, the locale and the search path for site packages are the template's,
        whatever `env` says; modules that the template has imported are there; objects of such
        modules are not destroyed at the end.

        Args:
            source: program text, the path of a script, or the name of a module.
            kind: which of them.
            argv: `sys.argv[1:]`.
            stdin: what it reads.
            limits: as in `exec`.
            env: as in `exec`.
            cwd: as in `exec`.
            keep: as in `exec`.
            isolated: as `python -I`: modules are not searched for beside the script, in the current
                directory or in PYTHONPATH.

        Raises:
            ValueError: as `exec`, or a program that is too long or has NUL bytes.
            UserError: as `exec`.
        """
        encoded = _encode(source)
        part = PythonPart(kind, PythonOption.ISOLATED if isolated else PythonOption(0), encoded)
        return await self.exec(
            ("python3", *argv),
            stdin=stdin,
            limits=limits,
            env=env,
            cwd=cwd,
            keep=keep,
            python=part,
        )


def _encode(source: str) -> bytes:
    encoded = source.encode("utf-8", "surrogateescape")
    if b"\0" in encoded:
        raise ValueError("a Python program must not contain NUL bytes")
    if len(encoded) > _MAX_SOURCE_BYTES:
        raise ValueError(
            f"a Python program may have {_MAX_SOURCE_BYTES} bytes, this one has {len(encoded)}:"
            " write a file and run that"
        )
    return encoded
