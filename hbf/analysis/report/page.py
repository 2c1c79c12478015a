"""A page in one file: what its sections are made of, and how they become HTML."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from matplotlib.figure import Figure

from hbf.analysis.report.drawing import svg


class Lacks(Exception):
  """A model, or what is known of it, lacks what a section is about; says what."""


@dataclasses.dataclass(frozen=True)
class Text:
  """A paragraph."""

  text: str


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows of cells, of text or of images' addresses (`hbf.analysis.report.drawing.png`).

  Attributes:
    header: of the columns.
    rows: cells; what begins with 'data:' is an image.
    caption: what it shows.
  """

  header: Sequence[str]
  rows: Sequence[Sequence[str]]
  caption: str = ''


@dataclasses.dataclass(frozen=True)
class Drawing:
  """Figures beside each other, or below where there is no room, with their caption."""

  figures: Sequence[Figure]
  caption: str


@dataclasses.dataclass(frozen=True)
class Shown:
  """Images with a line of text each.

  Attributes:
    images: addresses, and what is written below each.
    caption: what they are.
    width: of one, in pixels of the page; a small screen may have less.
  """

  images: Sequence[tuple[str, str]]
  caption: str
  width: int = 96


@dataclasses.dataclass(frozen=True)
class Folded:
  """Parts that a reader opens."""

  title: str
  parts: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Beside:
  """Parts beside others, or below them where there is no room; each column has a name."""

  columns: Sequence[tuple[str, Sequence[Any]]]


Part = Text | Table | Drawing | Shown | Folded | Beside


@dataclasses.dataclass(frozen=True)
class Section:
  """A part of the page.

  Attributes:
    name: key of its numbers in the JSON, and anchor.
    title: shown.
    parts: in order.
    numbers: for JSON.
    command: what gives the same in Python.
  """

  name: str
  title: str
  parts: Sequence[Part]
  numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  command: str = ''


def render(title: str, subtitle: str, sections: Sequence[Section]) -> str:
  """The page, an HTML document that needs nothing beside it."""
  folder = pathlib.Path(__file__).parent
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(folder),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
  )
  environment.filters['svg'] = lambda figure: jinja2.utils.markupsafe.Markup(svg(figure))
  environment.tests |= {kind.__name__.lower(): _is(kind) for kind in (Text, Table, Drawing, Shown, Folded, Beside)}
  return environment.get_template('page.html').render(title=title, subtitle=subtitle, sections=sections)


def _is(kind: type) -> Any:
  return lambda part: isinstance(part, kind)
