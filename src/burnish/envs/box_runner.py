"""Runs inside the box, alone: executes untrusted code on inputs and reports what it returned.

It knows no expected values, so whatever the code does to this process, it cannot make a wrong
answer look right. Reads {"code", "inputs"} from stdin; writes one JSON object to the real stdout,
while the code's own prints go nowhere.
"""

import ast
import json
import os
import sys


def plain(value: object, depth: int = 0) -> object:
    """The value if it is built of exact JSON types (no subclasses, no spoofs), else a marker."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth < 8 and type(value) in (list, tuple):
        return [plain(part, depth + 1) for part in value]  # type: ignore[attr-defined]
    return {"not_plain": True}


def call(function: object, arguments: list[object]) -> object:
    """One result, or a marker for whatever was raised."""
    try:
        return plain(function(*arguments))  # type: ignore[operator]
    except BaseException:  # noqa: BLE001 (anything, SystemExit too, is just a failed test)
        return {"raised": True}


def main() -> None:
    """Answer one request."""
    report = os.fdopen(os.dup(1), "w")
    request = json.loads(sys.stdin.read())
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    answer = {"defined": False, "only_function": False, "results": []}
    try:
        tree = ast.parse(request["code"])
        answer["only_function"] = [type(node) for node in tree.body] == [ast.FunctionDef]
        scope: dict[str, object] = {"__name__": "solution"}
        exec(compile(tree, "solution.py", "exec"), scope)
        function = scope.get("f")
        answer["defined"] = callable(function)
        if callable(function):
            answer["results"] = [call(function, arguments) for arguments in request["inputs"]]
    except BaseException:  # noqa: BLE001 (broken or hostile code is a failed test, not an error)
        pass
    report.write(json.dumps(answer))
    report.close()
    # Skips exit handlers that the code may have registered to add output of its own.
    os._exit(0)


if __name__ == "__main__":
    main()
