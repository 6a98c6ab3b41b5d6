"""The key of control endpoints: of this project's engine, and of the pages of `spectrain follow`.

It is that of the environment variable SPECTRAIN_CONTROL_KEY or, without one, that of a file in this
user's cache, which is made when it is first needed and which this user alone can read. So all
processes of one user on one machine have the same key.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from spectrain.config.plain_files import parse_file
from spectrain.errors import UserError
from spectrain.models.published import cache_directory

VARIABLE = "SPECTRAIN_CONTROL_KEY"
KEY = re.compile(r"[A-Za-z0-9_.~+/=-]{16,512}")
REMEDY = "delete it, and start what uses it again"


def key_path() -> Path:
    """Return the file of the key."""
    return cache_directory() / "control-key"


def read_control_key() -> str:
    """Return the key; a UserError says that it is malformed or that other users can read it."""
    key = os.environ.get(VARIABLE)
    if key is not None:
        return check_key(key, VARIABLE, "give another one")
    path = key_path()
    if not path.exists():
        write_key(path)
    key = str(parse_file(path, str.strip, "a key", REMEDY))
    if path.stat().st_mode & 0o077:
        raise UserError(f"{path}: other users can read this key; {REMEDY}")
    return check_key(key, str(path), REMEDY)


def check_key(key: str, name: str, remedy: str) -> str:
    """Return a key; a UserError says that it is none."""
    if not KEY.fullmatch(key):
        raise UserError(
            f"{name}: this is no key of 16 to 512 letters, digits and signs of base64; {remedy}"
        )
    return key


def write_key(path: Path) -> None:
    """Write a new key, unless another process has just written one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        # Unlike a rename, this leaves the key of another process.
        with suppress(FileExistsError):
            os.link(scratch, path)
    finally:
        scratch.unlink()


def bearer_header(key: str) -> dict[str, str]:
    """Return the header that a request to a control endpoint carries."""
    return {"Authorization": f"Bearer {key}"}
