"""Files that hold tokens: of a server, those of its users; of a client, its own."""

import os
import stat
from pathlib import Path

from burnish.core.errors import UserError

_MIN_TOKEN_CHARS = 16
_MAX_BYTES = 2**20
TOKEN_FIX = "umask 077; openssl rand -hex 32 > FILE; then --token-file FILE"
_CLIENT_FIX = "set sandbox.token_file to a file with one word, the token of this user"


def read_tokens(path: Path) -> dict[str, str]:
    """The secrets in a file that only its owner may read, with the names of their users.

    One word is the token of everybody, with the name "". Or each line is NAME TOKEN.

    Raises:
        UserError: absent, readable by others, or not such a file.
    """
    data, mode = _read(path, TOKEN_FIX)
    if mode & 0o077:
        raise UserError(f"others can read the token file {path}.", fix=f"chmod 600 {path}")
    numbered = [(n, line.split()) for n, line in enumerate(data.splitlines(), 1) if line.strip()]
    if not numbered:
        raise _no_token(str(path))
    if len(numbered) == 1 and len(numbered[0][1]) == 1:
        numbered = [(numbered[0][0], [b"", *numbered[0][1]])]
    for number, words in numbered:
        if len(words) != 2 or len(words[1]) < _MIN_TOKEN_CHARS or not b"".join(words).isascii():
            raise _no_token(f"line {number} of {path}")
    lines = [(name.decode(), token.decode()) for _, (name, token) in numbered]
    tokens = {token: name for name, token in lines}
    if len(tokens) != len(lines) or len(set(tokens.values())) != len(lines):
        raise UserError(
            f"{path} has a name or a token twice.", fix="give each user one line of NAME TOKEN"
        )
    return tokens


def read_token(path: Path) -> str:
    """What a client sends.

    Raises:
        UserError: absent, or not a file with one word.
    """
    words = _read(path, _CLIENT_FIX)[0].split()
    if len(words) != 1 or not words[0].isascii():
        what = f"the token file {path} holds {len(words)} words of ASCII, not one."
        if len(words) == 1:
            what = f"the token file {path} holds more than ASCII."
        raise UserError(what, fix=_CLIENT_FIX)
    return words[0].decode()


def _read(path: Path, fix: str) -> tuple[bytes, int]:
    """Content and mode of one file, wherever the path leads meanwhile; never waits."""
    try:
        # Opening a pipe without O_NONBLOCK would wait for somebody who writes.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise UserError(f"the token file {path} is no regular file.", fix=fix)
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(_MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        what = f"the token file {path} cannot be read: {error.strerror}."
        raise UserError(what, fix=fix) from error
    if len(data) > _MAX_BYTES:
        raise UserError(f"the token file {path} has more than {_MAX_BYTES} bytes.", fix=fix)
    return data, mode


def _no_token(where: str) -> UserError:
    what = f"{where} holds no token: one word of {_MIN_TOKEN_CHARS} or more ASCII characters, "
    return UserError(what + "or lines of NAME and such a word.", fix=TOKEN_FIX)
