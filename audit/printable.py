"""What a store holds made harmless: names may be anything, numbers undefined, and both are written out."""

from __future__ import annotations

import math
from typing import Any


def printable(text: str) -> str:
    """The text on one line, each control character as a question mark.

    >>> printable("a\\x1b[31mb\\nc")
    'a?[31mb?c'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def markdown(text: str) -> str:
    """`printable`, with the signs that mean something in Markdown escaped.

    >>> print(markdown("a|b"))
    a\\|b
    """
    return "".join("\\" + c if c in "\\`*_[]<>|#" else c for c in printable(text))


def finite(value: Any) -> Any:
    """Plain data with None for each number that JSON has no word for.

    >>> finite({"a": [1.0, float("nan")]})
    {'a': [1.0, None]}
    """
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
