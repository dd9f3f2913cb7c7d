"""`burnish sandbox serve`: lend the boxes of this machine to others."""

import asyncio
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from burnish.core.errors import UserError

if TYPE_CHECKING:
    from burnish.sandbox.config import SandboxConfig
    from burnish.sandbox.remote.config import ServeConfig


def serve(
    *,
    listen: str | None = None,
    socket: Path | None = None,
    token_file: Path | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    backend: str = "auto",
    max_boxes: int = 64,
    storage: str = "memory",
    storage_directory: Path | None = None,
    lease: float = 60.0,
    audit: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Serve boxes over HTTP until Ctrl-C; then all of them are destroyed.

    Args:
        listen: HOST:PORT; beyond this machine it takes a token, and should take TLS.
        socket: a Unix socket for this user instead.
        token_file: holds the secret that clients must send; or lines of NAME SECRET, and users
            share the boxes by name.
        tls_cert: PEM chain of the server.
        tls_key: its private key.
        backend: what runs the boxes; `burnish doctor` lists them.
        max_boxes: boxes alive at once; more callers wait.
        storage: where what boxes write lies, `memory` or `disk`.
        storage_directory: with `--storage disk`: on which disk; /var/tmp if not given.
        lease: seconds; a client that is not heard of for so long loses its boxes.
        audit: directory for a log of each box.
        as_json: where it listens, as one JSON object.
    """
    if not 1 <= lease < math.inf:
        raise UserError(f"--lease {lease:g} is not 1 s or more.", fix="as in --lease 60")
    config = _serve_config(listen, socket, token_file, (tls_cert, tls_key), lease)
    boxes = _pool_config(backend, max_boxes, audit, storage, storage_directory)
    asyncio.run(_serve(config, boxes, as_json=as_json))


async def _serve(config: "ServeConfig", boxes: "SandboxConfig", *, as_json: bool) -> None:
    import os

    from burnish.cli.console import write_json
    from burnish.sandbox.remote.serving import serve
    from burnish.sandbox.start import open_pool

    pool = open_pool(boxes)
    backend = pool.capabilities.backend

    def ready(url: str) -> None:
        if as_json:
            write_json({"url": url, "pid": os.getpid(), "backend": backend})
            return
        sys.stdout.write(f"{boxes.max_boxes} {backend} boxes at {url}; Ctrl-C ends them\n")
        if config.listen is not None and url.startswith("http:") and config.token_file:
            sys.stderr.write("burnish: without TLS the token and all files travel readable\n")
        sys.stdout.flush()

    await serve(pool, config, max_boxes=boxes.max_boxes, ready=ready)


def _serve_config(
    listen: str | None,
    socket: Path | None,
    token_file: Path | None,
    tls: tuple[Path | None, Path | None],
    lease_s: float,
) -> "ServeConfig":
    from burnish.sandbox.remote.config import ServeConfig

    return ServeConfig(
        listen=listen,
        socket=socket,
        token_file=token_file,
        tls_cert=tls[0],
        tls_key=tls[1],
        lease_s=lease_s,
    )


def _pool_config(
    backend: str, max_boxes: int, audit: Path | None, storage: str, directory: Path | None
) -> "SandboxConfig":
    from pydantic import ValidationError

    from burnish.sandbox.config import SandboxConfig

    try:
        return SandboxConfig.model_validate(
            {
                "backend": backend,
                "max_boxes": max_boxes,
                "audit": audit,
                "storage": storage,
                "storage_directory": directory,
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        flag = f"--{first['loc'][0]}".replace("_", "-")
        raise UserError(
            f"{flag} {first['input']}: {first['msg']}.", fix="burnish sandbox serve --help"
        ) from error
