"""`evermoe report`: a page of a real session's events and of a failure's, parsed as XML; names cannot become markup."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from evermoe import Checkpoints, ElasticSampler, Session
from evermoe.cli.main import main
from evermoe.cli.run_events import read_run
from evermoe.cli.svg_chart import MAX_POINTS, chart
from evermoe.events import Commit, CorruptionFound, Joined, Measured, MemberLost, Recovered, SlowMember
from evermoe.observe import JsonLines
from support.worker import SAMPLES, Model, dataset

HOSTILE = '<script>alert("1")</script>&'
LOST = MemberLost("k", "job", HOSTILE, "n", "", "train", "host", 3, 2, "gone", 1, 2, 1)


def write(path: Path, pid, events):
    """Write events as a member would, a second apart."""
    lines = (
        json.dumps({"event": event.name, "time": 1000.0 + at, "pid": pid} | event.fields()) for at, event in events
    )
    path.write_text("".join(f"{line}\n" for line in lines))


def recovered(seconds, reason="lost"):
    return Recovered(
        0.0, {"agree": 1.0, "fetch": seconds}, 3, 1, 1, reason, 9, 1, {"peer": 1}, 1, 0, [], failure="host"
    )


def parsed(folder, *sources):
    """Write the report, and return its text and its elements."""
    out = folder / "report.html"
    assert main(["report", *map(str, sources), "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    body = text[text.index("<body>") : text.index("</html>")]
    return text, ET.fromstring(body)


def cells(body, heading):
    """Return the rows of the table below a heading."""
    elements = list(body)
    at = next(i for i, each in enumerate(elements) if each.tag == "h2" and each.text == heading)
    return [[cell.text or "" for cell in row] for row in elements[at + 1]][1:]


def test_a_report_of_a_session(tmp_path):
    model, seen = Model(), []
    session = Session(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        ElasticSampler(SAMPLES, 4),
        on_event=[JsonLines(tmp_path / "events" / "member.jsonl"), seen.append],
        checkpoints=Checkpoints(tmp_path / "saved", interval=2),
    )
    for step in session.steps(5):
        with step:
            step.backward(model(dataset()[step.indices]))
    text, body = parsed(tmp_path, tmp_path / "events")
    curves = [line.get("points").split() for line in body.iter("polyline")]
    assert [len(points) for points in curves] == [5, 5]
    heights = [float(point.split(",")[1]) for point in curves[0]]
    losses = [event.loss for event in seen if isinstance(event, Commit)]
    assert heights.index(min(heights)) == losses.index(max(losses))
    (member,) = cells(body, "Members")
    joined = next(event for event in seen if isinstance(event, Joined))
    assert member[:4] == [joined.member, joined.node, "0", "train"]
    assert member[6] == "5"
    named = [row[1] for row in cells(body, "Events")]
    assert named.count("recovered") == named.count("joined") == 1
    assert "checkpoint" in named
    assert "5 steps committed" in text


def test_an_event_of_several_members_is_one_row_and_names_are_text(tmp_path):
    for rank, seconds in enumerate((0.25, 2.0)):
        joined = Joined(HOSTILE, f"{HOSTILE}{rank}", HOSTILE, rank, "train", 2, ["n"])
        events = [joined, LOST, recovered(seconds, HOSTILE), Commit(3, float("nan"), 1, 2), Commit(4, 0.5, 1, 2)]
        events += [
            Measured(4, 0.5, 1, None, None, {}, {}),
            CorruptionFound(5, [HOSTILE], [1], ["n"], "repair"),
            SlowMember(6, HOSTILE, "n", 0, "compute", 0.5, 0.25, 2.0),
        ]
        write(tmp_path / f"{rank}.jsonl", 7, enumerate(events))
    text, body = parsed(tmp_path, tmp_path / "0.jsonl", tmp_path / "1.jsonl")
    assert not list(body.iter("script"))
    assert "<script" not in text
    rows = cells(body, "Events")
    kinds = ["joined", "joined", "member_lost", "recovered", "corruption_found", "slow_member"]
    assert sorted(row[1] for row in rows) == sorted(kinds)
    (longest,) = [row for row in rows if row[1] == "recovered"]
    assert longest[2] == f"{HOSTILE}1"
    marks = [mark.find("title").text for mark in body.iter("rect")]
    assert f"fetch: 2 s. {HOSTILE}" in marks
    assert f"{HOSTILE} was lost: host" in marks
    assert "src=" not in text and "href=" not in text


def test_long_curves_keep_their_extremes():
    values = [(float(at), float(at == 4321)) for at in range(20 * MAX_POINTS)]
    drawn = (
        ET.fromstring(f"<div>{chart('t', {'a': values}, [], 20000.0)}</div>").find(".//polyline").get("points").split()
    )
    assert len(drawn) <= MAX_POINTS
    assert sum(float(point.split(",")[1]) == 4 for point in drawn) == 1


def test_files_without_events_are_an_error(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("no event\n")
    assert main(["report", str(tmp_path)]) == 2
    assert "got none" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        read_run([str(tmp_path / "missing.jsonl")])
