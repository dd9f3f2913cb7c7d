"""The verbs, by name. Their modules are imported only when they are called."""

from typing import Any

from cyclopts import App, Parameter

from burnish import __version__

_HELP = """Post-train language models with reinforcement learning, from a laptop CPU up.

Files describe runs, flags describe actions. Every verb takes --json. --debug keeps tracebacks.
"""

_SANDBOX_HELP = """Boxes for code that nobody trusts: no network, no privileges, hard limits.

A daemon of yours holds them from one command to the next. It starts with
the first box and ends by itself ten minutes after the last.
"""

_EXEC_HELP = """Run a command in a box: burnish sandbox exec ID [options] -- CMD...

Standard input is passed on, to its end; < /dev/null gives none. Files stay
for the next command, processes end. Exit status: the command's; 124 after
the time limit, 125 if the box failed, 128+n for signal n, 137 for other
limits, 2 for a mistake in the line.
"""

_CONTROL = {
    "status": "How it is doing.",
    "pause": "Stand still.",
    "resume": "Go on.",
    "stop": "End with a checkpoint.",
    "add": "Train a further domain.",
    "remove": "Stop training a domain.",
    "share": "Change a domain's priority or bounds.",
}

_JOBS = {
    "serve": ("serve", "Run jobs, until stopped."),
    "submit": ("submit", "Queue a run."),
    "list": ("list_jobs", "What runs and waits."),
    "cancel": ("cancel", "Give a job up."),
    "stop": ("stop", "End the daemon; jobs go on when it is served again."),
}


def _default(value: object) -> str | None:
    """Of an option, in its help; that a switch is off and a text absent need not be said."""
    if value is None or value is False or value == "" or value == ():
        return None
    return str(value)


def build_app() -> App:
    """The command line. Help texts of the verbs stand here so that --help imports none of them."""
    options: dict[str, Any] = {
        "help_format": "plaintext",
        "default_parameter": Parameter(negative=(), show_default=_default),
        "version": __version__,
        # An interrupt carries how to go on with the run; cyclopts would swallow it and exit.
        "suppress_keyboard_interrupt": False,
    }
    app = App(name="burnish", help=_HELP, **options)
    _single(app)
    env = App(name="env", help="List environments, or play one by hand.", **options)
    env.command("burnish.cli.env:list_envs", name="list", help="List the environments.")
    env.command("burnish.cli.play:play", name="play", help="Play an episode in the terminal.")
    app.command(env)
    bench = App(name="bench", help="Measure this machine.", **options)
    bench.command(
        "burnish.cli.bench:engine", name="engine", help="How fast it samples from a model."
    )
    app.command(bench)
    config = App(name="config", help="Look into a configuration.", **options)
    config.command(
        "burnish.cli.config:explain", name="explain", help="Value, origin and meaning of a key."
    )
    app.command(config)
    control = App(name="control", help="Look at a live run, and change it.", **options)
    for name, text in _CONTROL.items():
        control.command(f"burnish.cli.control:{name}", name=name, help=text)
    app.command(control)
    jobs = App(name="jobs", help="Several runs share this machine.", **options)
    for name, (target, text) in _JOBS.items():
        jobs.command(f"burnish.cli.jobs:{target}", name=name, help=text)
    app.command(jobs)
    app.command(_sandbox(options))
    return app


def _single(app: App) -> None:
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
    app.command(
        "burnish.cli.simulate:simulate",
        name="simulate",
        help="What a scheduling policy would do, without a machine.",
    )
    app.command(
        "burnish.cli.top:top", name="top", help="What a run is doing, domain by domain, and why."
    )


def _sandbox(options: dict[str, Any]) -> App:
    sandbox = App(name="sandbox", help=_SANDBOX_HELP, **options)
    verbs = {
        "create": ("burnish.cli.sandbox:create", "Make a box and print its id."),
        "exec": ("burnish.cli.sandbox_exec:execute", _EXEC_HELP),
        "allow": ("burnish.cli.sandbox:allow", "Change what a box may reach."),
        "list": ("burnish.cli.sandbox:list_boxes", "List the boxes."),
        "destroy": ("burnish.cli.sandbox:destroy", "End boxes."),
        "snapshot": ("burnish.cli.sandbox_state:snapshot", "Freeze the files of a box."),
        "rollback": ("burnish.cli.sandbox_state:rollback", "Back to a snapshot."),
        "forget": ("burnish.cli.sandbox_state:forget", "Free what snapshots hold."),
        "fork": ("burnish.cli.sandbox_state:fork", "Make boxes with the files of another."),
        "export": ("burnish.cli.sandbox_state:export", "Write what a box changed to a tar."),
        "import": ("burnish.cli.sandbox_state:import_", "Put the files of a tar into a box."),
        "stats": ("burnish.cli.sandbox:stats", "How the daemon of the boxes is doing."),
        "stop": ("burnish.cli.sandbox:stop", "End the daemon and all boxes."),
        "sweep": ("burnish.cli.sandbox:sweep", "Remove what killed processes left behind."),
        "serve": ("burnish.cli.sandbox_serve:serve", "Lend boxes of this machine to others."),
    }
    for name, (target, text) in verbs.items():
        sandbox.command(target, name=name, help=text)
    audit = App(name="audit", help="What was done in boxes, by their logs.", **options)
    audit.command(
        "burnish.cli.sandbox_audit:verify", name="verify", help="Find what was done to logs."
    )
    audit.command("burnish.cli.sandbox_audit:show", name="show", help="Print a log.")
    sandbox.command(audit)
    image = App(name="image", help="Root file systems for boxes.", **options)
    image.command("burnish.cli.sandbox_image:add", name="add", help="Add an image.")
    image.command("burnish.cli.sandbox_image:list_images", name="list", help="List the images.")
    image.command("burnish.cli.sandbox_image:remove", name="remove", help="Forget images.")
    image.command("burnish.cli.sandbox_image:verify", name="verify", help="Was it changed?")
    sandbox.command(image)
    return sandbox
