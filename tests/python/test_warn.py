"""Warnings show the user's line, or none."""

import threading
import warnings
from contextlib import contextmanager

import torch

from evermoe.options import checked
from evermoe.process.warn import warn


@contextmanager
def library():
    """Between the user and the warning: contexts and torch."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield told


def test_the_line_is_the_users():
    with library() as told:
        torch.utils._pytree.tree_map(lambda _: warn("look"), [1])  # this line, though torch calls it
    assert told[0].filename == __file__
    assert "this line" in warnings.formatwarning("look", UserWarning, told[0].filename, told[0].lineno)


def test_a_thread_of_evermoes_own_shows_no_line():
    with library() as told:
        code = compile("def look():\n    warn('look')\n", checked.__code__.co_filename, "exec")
        place = {"warn": warn, "__name__": "evermoe.look"}
        exec(code, place)
        thread = threading.Thread(target=place["look"])
        thread.start()
        thread.join()
    assert (told[0].filename, told[0].lineno) == ("evermoe", 0)
    assert warnings.formatwarning("look", UserWarning, "evermoe", 0) == "evermoe:0: UserWarning: look\n"
