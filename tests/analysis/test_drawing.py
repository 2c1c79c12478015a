"""Tests of pictures for a page."""

import base64
import io
import re

import numpy as np
from PIL import Image

from hbf.analysis.report import drawing


def test_text_and_axes_take_the_pages_color():
  figure, axis = drawing.panel()
  axis.plot([0, 1], [0, 1], label='a line')
  axis.set(xlabel='across', ylabel='up', title='over it')
  drawing.legend(axis)
  svg = drawing.svg(figure, 'one')
  assert svg.startswith('<svg') and drawing.INK not in svg
  texts = re.findall(r'<text[^>]*>([^<]*)</text>', svg)
  assert {'across', 'up', 'over it', 'a line'} <= set(texts)
  assert len(re.findall(r'<text[^>]*currentColor[^>]*>', svg)) == len(texts)
  assert drawing.COLORS[0].lower() in svg
  assert 'aria-label="Drawing. over it: up by across"' in svg


def test_drawings_of_a_page_share_no_id_and_keep_their_references():
  def drawn(name):
    figure, axis = drawing.panel()
    axis.scatter([0, 1], [1, 0])
    return drawing.svg(figure, name)

  one, two = drawn('one'), drawn('two')
  ids = re.findall(r'\bid="([^"]*)"', one + two)
  assert len(set(ids)) == len(ids) > 4
  used = set(re.findall(r'(?:href="#|url\(#)([^")]*)', one + two))
  assert used and used <= set(ids)


def test_a_name_is_no_formula():
  """Matplotlib would take a text between two dollar signs for a formula. This formula would be an error."""
  names = ('$5_to_$10', r'$\\frac$')
  figure, axis = drawing.panel()
  axis.plot([0, 1], [0, 1], label=names[0])
  axis.set_xticks([0, 1], names)
  axis.set_title(names[1])
  drawing.legend(axis)
  texts = re.findall(r'<text[^>]*>([^<]*)</text>', drawing.svg(figure, 'one'))
  assert sorted(text for text in texts if '$' in text) == sorted(2 * names)


def test_the_same_picture_is_the_same_file():
  def drawn():
    figure, axis = drawing.panel()
    axis.scatter([0, 1], [1, 0])
    return drawing.svg(figure, 'one')

  assert drawn() == drawn()


def test_images_are_all_in_their_address():
  image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
  address = drawing.png(image)
  stored = Image.open(io.BytesIO(base64.b64decode(address.removeprefix('data:image/png;base64,'))))
  np.testing.assert_array_equal(np.asarray(stored), image)


def test_a_frame_is_around_its_square_even_in_a_corner():
  image = np.full((8, 8, 3), 200, np.uint8)
  for row, column in ((0, 0), (4, 4), (2, 3)):
    framed = drawing.framed(image, row, column, 4, width=2)
    assert framed.shape == (12, 12, 3)
    assert (framed == drawing.FRAME).all(axis=-1).sum() == 8 * 8 - 4 * 4
    np.testing.assert_array_equal(framed[row + 2 : row + 6, column + 2 : column + 6], image[:4, :4])


def test_images_stand_in_rows():
  images = np.arange(5, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 3, 3), np.uint8)
  sheet = drawing.in_rows(images, 3, gap=1)
  assert sheet.shape == (5, 11, 3)
  np.testing.assert_array_equal(sheet[0, ::4, 0], [0, 1, 2])
  np.testing.assert_array_equal(sheet[3, ::4, 0], [3, 4, drawing.GRAY])
  assert (sheet[2] == drawing.GRAY).all()


def test_colors_run_from_dark_to_light():
  drawn = drawing.colored(np.array([[0.0, 0.5, 1.0, 7.0]]), 0, 1).astype(int).sum(-1)[0]
  assert (np.diff(drawn[:3]) > 0).all() and drawn[3] == drawn[2]
  assert drawing.enlarged(np.zeros((2, 3, 1)), 4).shape == (8, 12, 1)
  assert drawing.fitted(np.zeros((200, 100, 3), np.uint8), 50).shape == (50, 25, 3)
  assert drawing.rgb(np.zeros((2, 3, 1))).shape == (2, 3, 3)
