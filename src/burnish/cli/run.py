"""`burnish run`: train a model as a configuration file describes."""

import sys
import tomllib
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from burnish.core.errors import UserError
from burnish.core.observer import RunObserver, SilentObserver
from burnish.observe.live import LiveObserver, PlainObserver


def run(
    config: Path | None = None,
    /,
    *,
    overlay: Annotated[list[Path] | None, Parameter(name=["-c", "--config"])] = None,
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None,
    dry_run: bool = False,
    resume: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Train a model as a configuration file describes.

    Args:
        config: TOML file of the run, such as recipes/quickstart.toml.
        overlay: another TOML file whose values win over those before it; may be repeated.
        set_: one value, as KEY=VALUE; wins over all files; may be repeated.
        dry_run: check everything, show the resolved configuration, train nothing.
        resume: run directory to go on with; its configuration is used.
        as_json: no progress; the result as JSON, last line of stdout.
    """
    from burnish.cli.console import write_json
    from burnish.cli.summary import show_result
    from burnish.run.local import start

    if config is None and resume is None:
        raise UserError("There is no configuration.", fix="burnish run recipes/quickstart.toml")
    files = [file for file in (config, *(overlay or ())) if file is not None]
    with ExitStack() as stack:
        observer: RunObserver = SilentObserver()
        if not as_json:
            observer = stack.enter_context(_shown())
        result = start(files, set_ or [], dry_run=dry_run, resume=resume, observer=observer)
    if dry_run:
        _show_config(result.resolved, as_json=as_json)
    elif as_json:
        write_json(result.result)
    else:
        show_result(result.result)


def _show_config(resolved: str, *, as_json: bool) -> None:
    from burnish.cli.console import write_json
    from burnish.observe.gather import config_origins

    if not as_json:
        sys.stdout.write(resolved)
        return
    origins = {row.key: row.origin for row in config_origins(resolved)}
    write_json({"config": tomllib.loads(resolved), "origins": origins})


def _shown() -> AbstractContextManager[RunObserver]:
    """Progress goes to stderr, so that stdout holds the result and nothing else."""
    from burnish.cli.console import people

    return LiveObserver(people(sys.stderr)) if sys.stderr.isatty() else PlainObserver()
