"""The verbs, by name. Their modules are imported only when they are called."""

from typing import Any

from cyclopts import App, Parameter

from burnish import __version__

_HELP = """Post-train language models with reinforcement learning, from a laptop CPU up.

Files describe runs, flags describe actions. Every verb takes --json. --debug keeps tracebacks.
"""


def build_app() -> App:
    """The command line. Help texts of the verbs stand here so that --help imports none of them."""
    options: dict[str, Any] = {
        "help_format": "plaintext",
        "default_parameter": Parameter(negative=(), show_default=False),
        "version": __version__,
        # An interrupt carries how to go on with the run; cyclopts would swallow it and exit.
        "suppress_keyboard_interrupt": False,
    }
    app = App(name="burnish", help=_HELP, **options)
    app.command(
        "burnish.cli.run:run", name="run", help="Train a model as a configuration file describes."
    )
    app.command(
        "burnish.cli.check:check", name="check", help="Audit environments before they may teach."
    )
    app.command(
        "burnish.cli.report:report", name="report", help="Render a run's report.html again."
    )
    app.command(
        "burnish.cli.doctor:doctor", name="doctor", help="What this machine lacks, and the fix."
    )
    env = App(name="env", help="List environments, or play one by hand.", **options)
    env.command("burnish.cli.env:list_envs", name="list", help="List the environments.")
    env.command("burnish.cli.play:play", name="play", help="Play an episode in the terminal.")
    app.command(env)
    config = App(name="config", help="Look into a configuration.", **options)
    config.command(
        "burnish.cli.config:explain", name="explain", help="Value, origin and meaning of a key."
    )
    app.command(config)
    return app
