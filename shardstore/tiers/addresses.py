"""What a root is called: an absolute path, or the URL of remote storage, in one spelling."""

from __future__ import annotations

import os
import re
from typing import Final

_URL: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://(.*)", re.DOTALL)
_CHAIN: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*(?:://[^:]*)?::.*://", re.DOTALL)
_LOCAL: Final = ("file", "local")


def is_url(location: str) -> bool:
    """Whether a resolved root is on remote storage."""
    return _URL.match(location) is not None


def split_url(location: str) -> tuple[str, str]:
    """Protocol and what comes after `://` of a resolved URL."""
    match = _URL.match(location)
    assert match is not None
    return match[1], match[2]


def resolve_address(text: str, *, what: str = "root") -> str:
    """The absolute path, or the URL, that `text` means; every character of it is literal.

    Raises:
        ValueError: It could be taken for several places, or holds a password.
    """
    if _CHAIN.match(text):
        raise ValueError(
            f"{what}={text!r}: chained URLs (with ::) are not supported: give the last one alone"
        )
    match = _URL.match(text)
    if match is None:
        return os.path.abspath(os.path.expanduser(text))
    protocol, rest = match[1].lower(), match[2]
    if protocol in _LOCAL:
        return os.path.abspath(os.path.expanduser(rest))
    return f"{protocol}://{_checked(rest.rstrip('/'), text, what)}"


def _checked(rest: str, text: str, what: str) -> str:
    authority = rest.partition("/")[0]
    problem = None
    try:
        rest.encode()
    except UnicodeEncodeError:
        problem = "it is no text that UTF-8 can hold"
    parts = rest.split("/")
    if ":" in authority.rpartition("@")[0]:
        raise ValueError(
            f"{what}=: a password in a URL would be shown in logs: give it as "
            'storage_options={"password": ...}, or use a key'
        )
    if not rest:
        problem = "nothing follows ://"
    elif "" in parts[1:]:
        problem = "it has an empty folder name (//), which not every client keeps"
    elif {".", ".."} & {*parts}:
        problem = "it has a folder named . or .., which clients take for another one"
    elif any(ord(character) < 32 or ord(character) == 127 for character in rest):
        problem = "it has a control character"
    if problem is not None:
        raise ValueError(f"{what}={text!r} is no URL that can be used: {problem}")
    return rest
