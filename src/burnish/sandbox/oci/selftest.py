"""What a box of a container says of itself, when a keeper tries its first."""

from burnish.core.boxes import ExecResult, ExecStatus
from burnish.core.errors import UserError

# A namespace for oneself is what any user may have unless the filter is there.
SELF_TEST = (
    "sh",
    "-c",
    "cat /proc/self/status; unshare -U true 2>/dev/null && echo Unshared: yes",
)
_LINES = {"Seccomp:": "2", "NoNewPrivs:": "1", "CapEff:": "0" * 16, "CapBnd:": "0" * 16}


def check_self_test(result: ExecResult, name: str, *, whole: bool, fix: str) -> None:
    """Refuse what would not hold.

    Args:
        result: of `SELF_TEST`.
        name: of the runtime, with its version.
        whole: it has a kernel of its own.
        fix: for one that does not run.

    Raises:
        UserError: says what is missing.
    """
    if result.status not in (ExecStatus.OK, ExecStatus.EXIT) or not result.stdout:
        said = result.message or result.stderr.decode("utf-8", "replace").strip()[:300]
        raise UserError(f"{name} cannot run a box here: {said or result.status}.", fix=fix)
    seen = dict(
        line.split(None, 1) for line in result.stdout.decode().splitlines() if len(line.split()) > 1
    )
    wanted_lines = {**_LINES, "Unshared:": None}
    if whole and "NoNewPrivs:" not in seen:
        # gVisor does not say; it runs no program with the rights of its file's owner anyway.
        del wanted_lines["NoNewPrivs:"]
    for line, wanted in wanted_lines.items():
        if seen.get(line) != wanted:
            raise UserError(
                f"a box of {name} runs with {line} {seen.get(line)} instead of {wanted}: it would "
                "not hold.",
                fix="install another version, or choose another backend",
            )
