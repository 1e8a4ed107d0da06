"""Reasons for the failure of a collective, in words for users."""

from __future__ import annotations

import logging
import re

logger = logging.getLogger(__name__)

SOURCE_LINE = re.compile(r"\[[^\]\s]*\.(?:cc|cpp|cu|h):\d+\]\s*")
"""Location in the source of gloo or NCCL at the head of an error's text."""
PLAIN = (
    (
        re.compile(r"connection (?:closed|reset)|broken pipe|(?:read|write) error", re.I),
        "a member closed its connection",
    ),
    (re.compile(r"timed out waiting (\d+)ms", re.I), "timed out: a member sent and received nothing for {} s"),
    (re.compile(r"connect|no route|unreachable", re.I), "a member could not be reached"),
)
"""Errors of gloo, and their meaning."""


def plain_reason(error: Exception) -> str:
    """Return the reason for a collective's failure, in words for users. The library's own text is logged at DEBUG.

    >>> plain_reason(RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4711"))
    'a member closed its connection'
    >>> plain_reason(RuntimeError("[/gloo/unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation"))
    'timed out: a member sent and received nothing for 3 s'
    """
    text = str(error)
    logger.debug("a collective failed: %s", text)
    first = text.split("\n", 1)[0]
    stripped = SOURCE_LINE.sub("", first)
    if stripped != first:
        for pattern, plain in PLAIN:
            if found := pattern.search(stripped):
                return plain.format(*(f"{int(number) / 1000:g}" for number in found.groups()))
    return stripped or "the group was aborted"
