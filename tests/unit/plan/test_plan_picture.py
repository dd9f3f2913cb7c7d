"""Pictures: the same drawing in every kind of file."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from burnish.cli.main import main
from burnish.core.errors import UserError
from burnish.plan.canvas import Anchor
from burnish.plan.picture import check_target
from burnish.plan.png_canvas import PngCanvas
from burnish.plan.svg_canvas import SvgCanvas


def pixels_of(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        assert (image.format, image.mode) == ("PNG", "RGB")
        return np.asarray(image)


def test_a_line_colours_what_it_covers_and_nothing_else():
    canvas = PngCanvas(20, 10)
    canvas.line([(2, 5), (18, 5)], "#ff0000", 2)
    pixels = pixels_of(canvas.png())
    assert pixels.shape == (20, 40, 3)
    assert (pixels[9:11, 8:32] == (255, 0, 0)).all()
    assert (pixels[:7] == 255).all()
    assert (pixels[13:] == 255).all()


def test_dashes_leave_gaps_of_their_length():
    canvas = PngCanvas(40, 10)
    canvas.line([(0, 5), (40, 5)], "#000000", 2, (10.0, 10.0))
    row = pixels_of(canvas.png())[10, :, 0]
    assert (row[2:18] == 0).all()
    assert (row[24:36] == 255).all()
    assert (row[44:56] == 0).all()


@given(
    points=st.lists(st.tuples(*[st.floats(-50, 150)] * 2), min_size=1, max_size=5),
    dash=st.sampled_from(((), (6.0, 3.0), (2.0, 3.0))),
)
def test_lines_that_lead_off_the_page_are_cut_there(points, dash):
    canvas = PngCanvas(30, 30)
    canvas.line(points, "#123456", 1.8, dash)
    assert pixels_of(canvas.png()).shape == (60, 60, 3)


def test_letters_stand_on_their_line_and_on_the_side_that_was_asked_for():
    inked = {}
    for anchor in Anchor:
        canvas = PngCanvas(100, 20)
        canvas.text((50, 15), "HE", anchor=anchor)
        inked[anchor] = np.argwhere(pixels_of(canvas.png())[..., 0] < 128)
    assert inked[Anchor.START][:, 1].min() >= 98
    assert inked[Anchor.END][:, 1].max() <= 100
    middle = inked[Anchor.MIDDLE][:, 1]
    assert middle.min() < 100 < middle.max()
    assert all(where[:, 0].max() <= 32 for where in inked.values())


def test_words_are_no_markup():
    canvas = SvgCanvas(10, 10)
    canvas.text((1, 1), "<b>&amp;")
    assert "&lt;b&gt;&amp;amp;" in canvas.svg()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a.gif", "PNG, SVG or HTML"),
        ("a", "PNG, SVG or HTML"),
        ("", "PNG, SVG or HTML"),
        ("missing/a.png", "no directory"),
        ("file/a.png", "no directory"),
        ("folder.png", "is a directory"),
        ("pipe.png", "no regular file"),
        ("nul\0.png", "cannot be written"),
        ("x" * 300 + ".png", "cannot be written"),
        ("../../../../../../../../proc/a.png", "cannot be written"),
    ],
)
def test_a_picture_that_cannot_be_is_refused_before_anything_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, says: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    path = f"{tmp_path}/{name}" if name else ""
    with pytest.raises(UserError, match=says) as refused:
        check_target(Path(path))
    assert "Fix:" in str(refused.value)
    # More seeds than there may be, which would be told next.
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "clean", "--seeds", "100000000", "--plot", path])
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("root may write everywhere")
    with pytest.raises(UserError, match="Permission denied"):
        check_target(tmp_path / "a.png")
