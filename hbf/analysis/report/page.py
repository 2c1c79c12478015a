"""An HTML page that loads no other file: classes for its sections and their parts, and the function `render`."""

import dataclasses
import itertools
import pathlib
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from matplotlib.figure import Figure

from hbf.analysis.report.drawing import svg

ROWS_TO_SORT = 5  # tables of at least so many rows can be sorted and filtered


class MissingPart(Exception):
  """The error if a model or its data lack a part that a section describes. The section then shows the message."""


@dataclasses.dataclass(frozen=True)
class Paragraph:
  """A paragraph of plain text."""

  text: str


@dataclasses.dataclass(frozen=True)
class PageTable:
  """A table whose cells are text or images as data URLs (`hbf.analysis.report.drawing.png`).

  Attributes:
    header: titles of the columns.
    rows: cells. A cell that begins with 'data:' is an image. A cell may be a `Link`.
    caption: text above the table.
  """

  header: Sequence[str]
  rows: Sequence[Sequence[str]]
  caption: str = ''


@dataclasses.dataclass(frozen=True)
class Drawing:
  """Figures side by side, with a caption. On a narrow screen they continue in the next row."""

  figures: Sequence[Figure]
  caption: str


@dataclasses.dataclass(frozen=True)
class Gallery:
  """Images with a line of text below each.

  Attributes:
    images: a data URL and the text below it, for each image.
    caption: text below the gallery.
    width: width of an image in CSS pixels. On a narrow screen, images may be smaller.
  """

  images: Sequence[tuple[str, str]]
  caption: str
  width: int = 96


@dataclasses.dataclass(frozen=True)
class Details:
  """Parts that are hidden until a reader clicks on the title, or follows a `Link`.

  Attributes:
    title: the title.
    parts: the parts.
    image: a data URL of a picture above the title. '': there is no picture.
  """

  title: str
  parts: Sequence[Any]
  image: str = ''


class Link(str):
  """A cell's text with a link. A click on it opens details elsewhere on the page.

  Attributes:
    target: the details.
  """

  target: Details

  def __new__(cls, text: str, target: Details) -> 'Link':
    """Return the text with its target."""
    link = super().__new__(cls, text)
    link.target = target
    return link


@dataclasses.dataclass(frozen=True)
class Choices:
  """Details with pictures, side by side. If one of them is opened, its parts fill the width of the page."""

  choices: Sequence[Details]


@dataclasses.dataclass(frozen=True)
class Columns:
  """Columns side by side, each with a name and parts. On a narrow screen they are one below the other."""

  columns: Sequence[tuple[str, Sequence[Any]]]


Part = Paragraph | PageTable | Drawing | Gallery | Details | Choices | Columns


@dataclasses.dataclass(frozen=True)
class Section:
  """A section of the page.

  Attributes:
    name: key of the section's numbers in the JSON file, and the anchor of the section on the page.
    title: heading of the section.
    parts: content of the section, from top to bottom.
    numbers: the measured values, which go to the JSON file.
    command: Python code or a shell command that computes these values.
  """

  name: str
  title: str
  parts: Sequence[Part]
  numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  command: str = ''


def render(title: str, subtitle: str, sections: Sequence[Section]) -> str:
  """Return the page as an HTML document that loads no other file."""
  folder = pathlib.Path(__file__).parent
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(folder),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
  )
  numbers = itertools.count()
  anchors: dict[int, str] = {}
  environment.filters['anchor'] = lambda part: anchors.setdefault(id(part), f'details{len(anchors)}')
  environment.filters['svg'] = lambda figure: jinja2.utils.markupsafe.Markup(svg(figure, f'drawing{next(numbers)}'))
  environment.filters['firsttext'] = _first_text
  environment.tests['link'] = _is(Link)
  environment.tests |= {kind.__name__.lower(): _is(kind) for kind in typing.get_args(Part)}
  return environment.get_template('page.html').render(
    title=title, subtitle=subtitle, sections=sections, rows_to_sort=ROWS_TO_SORT
  )


def _first_text(row: Sequence[str]) -> str:
  """Return the first cell of a row that is text and not an image. The page uses it as the row's name."""
  return next((cell for cell in row if not cell.startswith('data:')), '')


def _is(kind: type) -> Any:
  return lambda part: isinstance(part, kind)
