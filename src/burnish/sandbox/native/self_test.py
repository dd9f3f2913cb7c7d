"""One box, before anybody relies on them; and what it means if there is none."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from burnish.core.boxes import ExecResult, Policy
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.sandbox.host_view import namespace_fix
from burnish.sandbox.native.capabilities import SELF_TEST, check_self_test
from burnish.sandbox.native.loans import Lender


@contextlib.contextmanager
def as_users_problem() -> Iterator[None]:
    """Whatever fails at the start of a pool is a matter of this machine.

    Raises:
        UserError: says what to do.
    """
    try:
        yield
    except ClassifiedFailure as error:
        cause = error.__cause__
        number = cause.errno if isinstance(cause, OSError) else None
        raise _problem(error.failure.message, number) from error
    except OSError as error:
        raise _problem(str(error), error.errno) from error


def _problem(what: str, number: int | None) -> UserError:
    return UserError(
        f"the native sandbox cannot make a box here: {what}.", fix=namespace_fix(number or 0)
    )


def try_a_box(pool: Lender) -> None:
    """Run one command in a box of the host's programs. Blocks.

    Raises:
        OSError: the host is out of something.
        ClassifiedFailure: there is no box.
        UserError: it would not hold.
    """
    outcome: list[ExecResult | Exception] = []

    async def run() -> ExecResult:
        box = await pool.take(None, Policy())
        try:
            return await box.exec(SELF_TEST)
        finally:
            await pool.give_back(box)

    def main() -> None:
        try:
            outcome.append(asyncio.run(run()))
        except (OSError, ClassifiedFailure, UserError) as error:
            outcome.append(error)

    # In a loop of its own: the caller may be in one.
    thread = threading.Thread(target=main, name="sandbox-self-test")
    thread.start()
    thread.join()
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    check_self_test(outcome[0])
