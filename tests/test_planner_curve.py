"""`mstpass plan --plot`: the points of curves, the picture, and refused files."""

from __future__ import annotations

import itertools
import json

import pytest

from mstpass.cli.main import main
from mstpass.planner.lengths import curve, length_within
from mstpass.planner.request import CHECKPOINT, EAGER, MST, Parts, Point, Request, Row, TrainingPlan
from mstpass.planner.training import Fixed, Sizes, Training

GIB = 2**30


def test_a_curve_passes_through_the_row_and_ends_at_twice_the_device():
    step_bytes = lambda length: max(1000, 10 * length - 200)
    points = curve(step_bytes, 320, most_bytes=8000, fixed_bytes=500)
    assert list(points) == sorted(points, key=lambda point: point.length)
    assert Point(320, 500 + step_bytes(320)) in points
    assert points[-1].total_bytes == pytest.approx(8500, rel=0.03)
    # the bend, at 120 tokens, is among them: lines between the points are the curve itself
    for length in (130, 200, 500):
        found = length_within(points, 500 + step_bytes(length))
        assert found == pytest.approx(length, abs=16)


def test_a_curve_never_falls():
    noisy = lambda length: 1000 + 10 * (length if length != 160 else 100)
    sizes = [point.total_bytes for point in curve(noisy, 320, 8000, 0)]
    assert sizes == sorted(sizes)


def test_a_way_that_does_not_fit_has_a_curve_all_the_same():
    assert curve(lambda length: 10**6 + length, 0, 10**6, 0)


def test_no_length_is_known_beyond_the_points():
    points = (Point(16, 100), Point(32, 100), Point(48, 200))
    assert length_within(points, 99) is None and length_within(points, 201) is None
    assert length_within(points, 100) == 32 and length_within(points, 150) == 40
    assert length_within((), 100) is None


# ---- the picture -------------------------------------------------------------------------------
@pytest.fixture
def planned():
    request = Request("tiny", Training(), 80 * GIB, GIB, curves=True)

    def row(name, length):
        points = tuple(Point(length * i // 4, (20 + 15 * i) * GIB) for i in range(1, 9))
        return Row(name, "", length, True, Parts(), 80 * GIB, curve=points)

    rows = tuple(row(name, n) for name, n in ((EAGER, 640), (CHECKPOINT, 700), (MST, 40960)))
    return TrainingPlan(request, Sizes(1000, 300, 100), Fixed(10, 10, 0), rows, ())


@pytest.mark.parametrize(("suffix", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_picture_is_written_beside_json(planned, tmp_path, capsys, monkeypatch, suffix, begins):
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    asked = []
    monkeypatch.setattr(
        "mstpass.planner.plan.plan", lambda request, *_, **__: asked.append(request) or planned
    )
    path = tmp_path / f"lengths.{suffix}"
    given = ["plan", "--model", "gpt2", "--device-memory", "80GiB", "--json", "--plot", str(path)]
    assert main(given) == 0
    assert asked[0].curves and path.read_bytes().startswith(begins)
    found = json.loads(capsys.readouterr().out)
    assert found["rows"][0]["curve"][0] == {"length": 160, "total_bytes": 35 * GIB}


def test_labels_do_not_overlap(planned):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from mstpass.planner import picture

    axes = Figure().add_subplot()
    picture._frame(axes, planned, planned.rows)
    picture._label_ends(axes, planned.rows)
    heights = sorted(text.get_position()[1] for text in axes.texts)
    assert {text.get_text() for text in axes.texts} == {EAGER, CHECKPOINT, MST}
    assert all(b - a > 0.99 * picture._APART for a, b in itertools.pairwise(heights))


@pytest.mark.parametrize(
    ("name", "rest", "message"),
    [
        ("lengths.jpg", [], "ends in one of .png, .svg, .pdf"),
        ("lengths", [], "ends in one of"),
        ("nowhere/lengths.png", [], "cannot write this file: No such file"),
        ("folder.png", [], "cannot write this file: Is a directory"),
        ("lengths.png", ["--sequence", "512"], "leave out --sequence"),
    ],
)
def test_refused_before_any_work(tmp_path, capsys, name, rest, message):
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    given = ["plan", "--model", "gpt2", "--device-memory", "1GiB", "--plot", str(tmp_path / name)]
    with pytest.raises(SystemExit) as stop:
        main([*given, *rest])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]
