"""How boxes are served."""

from pathlib import Path

from pydantic import Field

from burnish.core.config import Config


class ServeConfig(Config):
    """Where a server listens and what it grants its clients."""

    listen: str | None = None
    """HOST:PORT; port 0 takes a free one."""
    socket: Path | None = None
    """Or a Unix socket, for this user only."""
    token_file: Path | None = None
    """Holds what clients must send: a token, or lines of NAME TOKEN. Needed beyond this machine."""
    tls_cert: Path | None = None
    """PEM chain; with `tls_key` the server speaks HTTPS."""
    tls_key: Path | None = None
    """Its private key."""
    lease_s: float = Field(default=60.0, gt=0)
    """A session that is not heard of for so long loses its boxes."""
    poll_s: float = Field(default=20.0, gt=0)
    """The longest that one answer is held back; then the client asks again."""
    grace_s: float = Field(default=10.0, gt=0)
    """A job for which nobody waits is ended after so long: time to connect again."""
    hang_up_ends: bool = False
    """Where no connection breaks while its client lives, as on one machine: a job ends at once
    when its client hangs up."""
    keep_s: float = Field(default=60.0, gt=0)
    """An answer is kept for so long after it was ready."""
    keep_bytes: int = Field(default=64 * 2**20, ge=0)
    """All kept answers together; beyond, the oldest are forgotten."""
    max_request_bytes: int = Field(default=128 * 2**20, ge=2**10)
    """One message."""
    max_bodies_bytes: int = Field(default=2 * 2**30, ge=2**10)
    """All messages that come or are worked on, half of it of one named user; beyond, clients are
    turned away, and come back."""
    max_stdout_bytes: int = Field(default=64 * 2**20, ge=2**10)
    """The most that a command may ask to be kept of each of stdout and stderr."""
    max_outputs_bytes: int = Field(default=2 * 2**30, ge=2**12)
    """Both streams of all commands that run, by their limits, half of it of one named user; what
    does not fit waits."""
    max_file_bytes: int = Field(default=8 * 2**30, ge=2**10)
    """One tar, imported or exported."""
    max_files_bytes: int = Field(default=32 * 2**30, ge=2**10)
    """All files that are on their way between clients and boxes, half of it of one named user."""
    head_s: float = Field(default=10.0, gt=0)
    """A connection on which no whole head of a request comes for so long is closed; one whose
    client has shown its token may idle between requests."""
    stall_s: float = Field(default=30.0, gt=0)
    """So is one on which nothing more of a body comes."""
    max_connections: int | None = Field(default=None, ge=2)
    """At once, half of them of one named user; None: what the limit of open files leaves beside
    the boxes."""
    max_waiting: int = Field(default=1000, ge=1)
    """Requests for boxes that may wait; more are turned away, and come back."""
    max_waiting_per_client: int = Field(default=500, ge=1)
    """Of one client: so many leave room for the others."""
    allow_detached: bool = False
    """Boxes without a lease: for the daemon of one user."""
    idle_exit_s: float | None = None
    """End after so long without boxes."""
