"""What one box may use of the proxy."""

from burnish.core.records import Record


class ProxyBounds(Record, frozen=True, kw_only=True):
    """Bounds that keep a hostile box from hurting more than itself."""

    num_connections: int = 64
    """Served at once, fewer where many boxes share (`shares.py`); more wait in the queue of the
    box's own socket."""
    num_lookups: int = 4
    """Names of one box resolved at once."""
    num_denials: int = 10_000
    """Refusals in the life of a box; then its proxy stops, so that the log stays bounded."""
    head_s: float = 30.0
    """To say what is wanted; and once more for a TLS hello."""
    lookup_s: float = 10.0
    """To resolve a name."""
    connect_s: float = 15.0
    """To reach a server, over all addresses."""
    idle_s: float = 300.0
    """Without a byte in either direction."""
    linger_s: float = 2.0
    """For the slower side to take what is left when the other is done."""
    linger_bytes: int = 256 * 2**10
    """Read and dropped after a refusal, so that the client gets to see it."""
