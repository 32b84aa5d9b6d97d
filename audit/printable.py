"""Names from a store made harmless: they may hold anything, and go to terminals and Markdown."""

from __future__ import annotations


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
