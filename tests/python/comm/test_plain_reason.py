"""A failed collective's error from gloo, in words for users."""

import logging

import pytest

from evermoe.comm.plain_reason import plain_reason

GLOO = "/pytorch/third_party/gloo/gloo/transport/tcp"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"[{GLOO}/pair.cc:547] Connection closed by peer [127.0.0.1]:1234", "a member closed its connection"),
        (f"[{GLOO}/pair.cc:538] Read error [::1]:4: Connection reset by peer", "a member closed its connection"),
        (
            f"[{GLOO}/unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation to complete",
            "timed out: a member sent and received nothing for 10 s",
        ),
        (f"Gloo connectFullMesh failed with [{GLOO}/x.cc:1] timeout\nmore", "a member could not be reached"),
        (f"[{GLOO}/x.cc:1] what nobody knows", "what nobody knows"),
        ("NCCL has failed", "NCCL has failed"),
        ("", "the group was aborted"),
    ],
)
def test_reasons_are_plain_and_the_librarys_text_is_in_the_log(text, expected, caplog):
    with caplog.at_level(logging.DEBUG, logger="evermoe"):
        assert plain_reason(RuntimeError(text)) == expected
    assert text in caplog.text
