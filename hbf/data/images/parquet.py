"""Images in Parquet files, in the layout of the library `datasets` of Hugging Face.

A Parquet file consists of row groups. A column of a row group is the smallest part of a file that can be read.
"""

import collections
import contextlib
import dataclasses
import json
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from hbf.data.images import codec
from hbf.data.images.dataset import Dataset
from hbf.data.images.encoded import EncodedSource, labeled_dataset
from hbf.data.images.splits import find_shards
from hbf.data.registry import DataRequest
from hbf.errors import UserError

_KEPT_BYTES = 512 << 20  # bytes of encoded images that a process keeps in memory
# The usual names of columns, if the files do not name their types.
_IMAGES = ('image', 'img', 'picture', 'pixel_values')
_LABELS = ('label', 'labels', 'fine_label', 'class', 'target')


class RowGroups:
  """A cache of columns of the row groups of Parquet files. It reads a column when the column is needed.

  If the columns take too many bytes, those that were not used for the longest time are dropped.
  """

  def __init__(self) -> None:
    """Start with an empty cache."""
    self._kept: collections.OrderedDict[tuple[str, int, str], Any] = collections.OrderedDict()
    self._lock = threading.Lock()

  def __reduce__(self) -> tuple[type, tuple[()]]:
    """Pickle no columns. Another process starts with an empty cache."""
    return RowGroups, ()

  def read(self, path: str, group: int, column: str) -> Any:
    """Return a column of the row group with index `group` in a file, as an array of pyarrow.

    One thread reads at a time.
    """
    key = path, group, column
    with self._lock:
      if key not in self._kept:
        with _import_pyarrow().ParquetFile(path) as file:
          self._kept[key] = file.read_row_group(group, columns=[column]).column(0)
        while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept.values()) > _KEPT_BYTES:
          self._kept.popitem(last=False)
      self._kept.move_to_end(key)
      return self._kept[key]


@dataclasses.dataclass(frozen=True, eq=False)
class ParquetSource(EncodedSource):
  """A `Source` of images in Parquet files.

  To return one image, a source reads all images of its row group. So a stream in shuffled order reads more than it
  uses, unless all encoded images fit into `memory`.

  Attributes:
    groups: for each of g row groups, the path of its file and its index in the file.
    starts: index of the first example of each row group, then the number of all examples, int [g + 1].
    column: name of the column of images.
    memory: the cache of encoded images.
    sizes: for each row group, the number of bytes of its encoded images in the file, int [g].
    labels: class of each image, int [n].
    size: as in `EncodedSource`.
    shape: as in `EncodedSource`.
  """

  groups: tuple[tuple[str, int], ...]
  starts: np.ndarray
  column: str
  memory: RowGroups
  sizes: np.ndarray
  labels: np.ndarray
  size: int | None = None
  shape: tuple[int, int] | None = None

  def name(self, index: int) -> str:
    """Return the path of the example's file, its row in the row group, and the index of the row group."""
    (path, group), row = self._place(index)
    return f'{path}: row {row} of row group {group}'

  @override
  def content(self, index: int) -> bytes:
    place, row = self._place(index)
    with codec.explain_errors(self.name(index)):
      value = self.memory.read(*place, self.column)[row].as_py()
      content = value.get('bytes') if isinstance(value, Mapping) else value
      if not content:
        raise ValueError('the file has no bytes of it, perhaps a path only')
      return content

  @override
  def facts(self) -> Iterator[bytes]:
    yield np.asarray(self.labels, '<i8').tobytes()

  def stamp(self) -> bytes:
    """Return the sizes of all row groups, which change with their images; see `hbf.data.images.sources.Stamped`."""
    return self.sizes.astype('<i8').tobytes()

  def _place(self, index: int) -> tuple[tuple[str, int], int]:
    group = int(np.searchsorted(self.starts, index, 'right')) - 1
    return self.groups[group], int(index - self.starts[group])


def open_parquet(request: DataRequest) -> Dataset:
  """Open the images in train-*.parquet and in the files of the other splits, and read the classes of all images.

  Raises:
    UserError: pyarrow is not installed, a file is missing or damaged, a column is not found or of a wrong type, or a
      class is wrong.
  """
  shards = find_shards(request, 'parquet')
  first = shards['train'][0]
  with _open(first) as file:
    schema = file.schema_arrow
  features = _features(schema)
  image, label = _columns(first, schema.names, features, request.columns)
  memory = RowGroups()
  read = {split: _read_split(paths, image, label, memory) for split, paths in shards.items()}
  sources = {split: source for split, (source, _) in read.items()}
  stored = {split: labels for split, (_, labels) in read.items()}
  return labeled_dataset(request, sources, stored, features.get(label, {}).get('names'))


def _features(schema: Any) -> dict[str, dict[str, Any]]:
  """Return the descriptions of columns that the library `datasets` has stored in a file. {} if there are none."""
  with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, RecursionError):
    features = json.loads(schema.metadata[b'huggingface'])['info']['features']
    return {name: about for name, about in features.items() if isinstance(about, dict)}
  return {}


def _columns(path: str, known: Sequence[str], features: Mapping[str, Mapping[str, Any]], chosen: str) -> list[str]:
  """Return the names of two columns: the column of images and the column of classes.

  They are those of `chosen`. If `chosen` is empty, they are the columns of type Image and ClassLabel, or else columns
  with usual names.

  Args:
    path: path of the file, for messages.
    known: names of all columns of the file.
    features: descriptions of columns, from `_features`.
    chosen: the value of `data.columns`, 'IMAGE,LABEL' or ''.
  """
  if chosen:
    names = [name.strip() for name in chosen.split(',')]
    if len(names) != 2 or not set(names) <= set(known):
      raise UserError(
        f'data.columns is {chosen!r}; expected two columns of {path} as IMAGE,LABEL: it has {", ".join(known)}'
      )
    return names
  found = []
  for kind, usual in (('Image', _IMAGES), ('ClassLabel', _LABELS)):
    typed = [name for name, about in features.items() if about.get('_type') == kind and name in known]
    fitting = typed or [name for name in usual if name in known][:1]
    if len(fitting) != 1:
      raise UserError(
        f'{path} has {" and ".join(fitting) or f"no column {usual[0]}"} among its columns {", ".join(known)}; '
        'expected one column of images and one of labels: set data.columns=IMAGE,LABEL'
      )
    found += fitting
  return found


def _read_split(
  paths: Sequence[str], image: str, label: str, memory: RowGroups
) -> tuple[ParquetSource, list[int | str]]:
  """Return the source of a split, and the class of each image as the files store it, a number or a name.

  The source's own `labels` are −1, until `labeled_dataset` replaces them.

  Args:
    paths: the files of the split.
    image: name of the column of images.
    label: name of the column of classes.
    memory: the cache of encoded images.
  """
  groups: list[tuple[str, int]] = []
  labels: list[int | str] = []
  starts, sizes = [0], []
  for path in paths:
    with _open(path) as file:
      _require_type(path, file.schema_arrow, image, _is_image, 'encoded images (struct of bytes and path, or bytes)')
      _require_type(path, file.schema_arrow, label, _is_label, 'whole numbers or names of classes')
      for group in range(file.num_row_groups):
        about = file.metadata.row_group(group)
        groups.append((path, group))
        starts.append(starts[-1] + about.num_rows)
        sizes.append(_stored_bytes(about, image))
      labels += file.read([label]).column(0).to_pylist()
  if not labels:
    raise UserError(f'{paths[0]} has no row; expected at least one image: write it again')
  unlabeled = np.full(len(labels), -1)
  return ParquetSource(tuple(groups), np.array(starts), image, memory, np.array(sizes), unlabeled), labels


def _stored_bytes(group: Any, column: str) -> int:
  """Return the number of bytes of a column in a file, from pyarrow's description of a row group."""
  parts = [group.column(index) for index in range(group.num_columns)]
  return sum(part.total_compressed_size for part in parts if part.path_in_schema.split('.')[0] == column)


def _require_type(path: str, schema: Any, column: str, fits: Any, expected: str) -> None:
  kind = schema.field(column).type if column in schema.names else 'nothing'
  if not fits(str(kind)):
    raise UserError(f'{path} has {kind} in column {column}; expected {expected}: set data.columns=IMAGE,LABEL')


def _is_image(kind: str) -> bool:
  return kind in ('binary', 'large_binary') or (
    kind.startswith('struct<') and 'bytes: binary' in kind.replace('large_', '')
  )


def _is_label(kind: str) -> bool:
  return kind.startswith(('int', 'uint', 'string', 'large_string', 'dictionary<values=string'))


@contextlib.contextmanager
def _open(path: str) -> Iterator[Any]:
  """Open a Parquet file. Errors in the `with` statement become a `UserError` that names the file."""
  parquet = _import_pyarrow()
  try:
    with parquet.ParquetFile(path) as file:
      yield file
  except UserError:
    raise
  except Exception as error:  # pyarrow raises errors of many types on damaged data
    raise UserError(
      f'{path} cannot be read ({" ".join(str(error).split())}); expected a whole Parquet file: copy or write it again'
    ) from error


def _import_pyarrow() -> types.ModuleType:
  """Import the library pyarrow. Raise UserError if it is not installed."""
  try:
    import pyarrow.parquet
  except ImportError as error:
    raise UserError(
      "data set parquet: expected the package pyarrow: install it by `pip install 'hbf[parquet]'`"
    ) from error
  return pyarrow.parquet
