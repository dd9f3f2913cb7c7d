"""`burnish env list`: which environments there are."""

from typing import Annotated

from cyclopts import Parameter


def list_envs(*, as_json: Annotated[bool, Parameter(name="--json")] = False) -> None:
    """List the shipped environments: name, what it asks for, tools, digest.

    Args:
        as_json: one JSON array.
    """
    from burnish.cli.console import people, table, write_json
    from burnish.envs import registry

    found = [registry.get(name) for name in registry.names()]
    if as_json:
        write_json(
            [
                {
                    "name": env.name,
                    "description": env.description,
                    "tools": [tool.name for tool in env.tools],
                    "digest": env.digest,
                }
                for env in found
            ]
        )
        return
    rows = [
        (env.name, env.description, ", ".join(t.name for t in env.tools) or "-", env.digest[:19])
        for env in found
    ]
    people().print(table(("name", "description", "tools", "digest"), rows))
