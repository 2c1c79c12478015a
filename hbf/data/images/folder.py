"""A folder of images, ROOT/train/CLASS/* and ROOT/test/CLASS/*. The test split may have another name.

If images have labels or values instead of a class, each split has a CSV file that lists them
(`hbf.data.images.targets`), and no class folders.
"""

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping
from concurrent import futures
from pathlib import Path

import numpy as np
from typing_extensions import override

from hbf.arguments import home_path
from hbf.data.images import codec, splits
from hbf.data.images.dataset import Dataset
from hbf.data.images.encoded import EncodedSource, as_dataset
from hbf.data.images.files import list_folder
from hbf.data.images.targets import CLASSES, CSV, TASK, read_csv
from hbf.data.pipeline.host import THREADS
from hbf.data.registry import DataRequest
from hbf.errors import UserError, warn

_PART = 1024  # number of files whose sizes a thread reads in one task. A task for each file would take much memory.


@dataclasses.dataclass(frozen=True)
class FolderSource(EncodedSource):
  """A `Source` of image files, read as RGB.

  Attributes:
    paths: paths of the files, [n].
    labels: target of each file: classes, [n], or labels or values, [n][K].
    size: as in `EncodedSource`.
    shape: as in `EncodedSource`.
  """

  paths: tuple[str, ...]
  labels: tuple[int, ...] | tuple[tuple[float, ...], ...]
  size: int | None
  shape: tuple[int, int] | None = None

  def name(self, index: int) -> str:
    """Return the path of a file."""
    return self.paths[index]

  @override
  def content(self, index: int) -> bytes:
    return codec.read_file(self.paths[index])

  @override
  def decode(self, index: int) -> np.ndarray:
    # Pillow opens the file itself. It reads only the first bytes of a large file that is not an image.
    return codec.decode_file(self.paths[index], channels=3, size=self.size)

  def check_one(self, index: int) -> None:
    """Check a file; see `codec.check_file`. For a JPEG or PNG, only its first and its last bytes are read."""
    codec.check_file(self.paths[index])

  @override
  def facts(self) -> Iterator[bytes]:
    parts = [self.paths[i : i + _PART] for i in range(0, len(self.paths), _PART)]
    with futures.ThreadPoolExecutor(THREADS) as pool:
      sizes = itertools.chain.from_iterable(pool.map(_sizes, parts))
      for path, label, size in zip(self.paths, self.labels, sizes, strict=True):
        yield f'{label} {os.path.basename(path)} {size}'.encode()


def open_folder(request: DataRequest) -> Dataset:
  """Open the images ROOT/train/CLASS/* and those of the other splits. Leave out hidden files and folders.

  If the request is for labels or values, each split has a CSV file instead of class folders. Warn of other folders in
  ROOT, and of files that are not used.

  Raises:
    UserError: a folder is missing, empty or not expected; a class has no image or contains a folder; or two splits
      are the same folder.
  """
  folder = splits.root_folder(request.root, 'train/ and test/')
  splits.check(f'{folder}/', '{}/', list_folder(folder)[0], request.splits)
  paths = {split: folder / name for split, name in request.splits.items()}
  _require_different(paths)
  if request.targets != CLASSES:
    names, listed = _open_listed(paths, request.image_size, request.targets)
    return as_dataset(request.name, names, listed, request.targets)
  classes = _classes(paths['train'])
  for split in sorted(paths.keys() - {'train'}):
    if unknown := sorted(set(_classes(paths[split])) - set(classes)):
      raise UserError(
        f'{paths[split] / unknown[0]} is a class that train/ lacks; expected only classes of {paths["train"]}: '
        'remove the folder or add training images'
      )
  sources = {split: _open_split(path, classes, request.image_size) for split, path in paths.items()}
  return as_dataset(request.name, classes, sources)


def _open_listed(
  paths: Mapping[str, Path], size: int | None, targets: str
) -> tuple[tuple[str, ...], dict[str, FolderSource]]:
  """Open splits whose CSV files list labels or values. Return their K names, and the source of each split.

  Args:
    paths: the folder of each split.
    size: height and width in pixels that images are resized to. None keeps the stored size.
    targets: the kind of targets, LABELS or VALUES.
  """
  names: tuple[str, ...] = ()
  sources = {}
  for split in sorted(paths, key=lambda name: name != 'train'):  # train first, because it names the columns
    folder, listed = paths[split], CSV[targets]
    found, files, vectors = read_csv(folder, targets)
    names = names or found
    if set(found) != set(names):
      raise UserError(
        f'{folder / listed} has the columns {", ".join(found)}; expected those of {paths["train"] / listed}: '
        f'{", ".join(names)}'
      )
    if missing := [file for file in files if not (folder / file).is_file()]:
      raise UserError(
        f'{folder / listed} lists {missing[0]}, which is not a file in {folder}; expected the path of an image from '
        'there: mend the line, or add the image'
      )
    if unlisted := sorted(set(list_folder(folder)[1]) - {*files, *CSV.values()}):
      warn(
        f'{folder} has files that {listed} does not list, which are not used: {len(unlisted)}, such as {unlisted[0]}'
      )
    columns = vectors[:, np.array([found.index(name) for name in names])]
    labels = tuple(tuple(row) for row in columns.tolist())
    sources[split] = FolderSource(tuple(f'{folder}/{file}' for file in files), labels, size)
  return names, sources


def open_classes(root: str, size: int) -> tuple[tuple[str, ...], FolderSource]:
  """Open the images ROOT/CLASS/* of classes to add to a trained network. Leave out hidden files and folders.

  Args:
    root: the folder. `~` is the home directory.
    size: height and width in pixels that every image is resized to.

  Returns:
    The sorted names of the classes, and the source of the images.

  Raises:
    UserError: the folder is missing, has no class folder, or has files outside the class folders. Or a class has no
      image or contains a folder.
  """
  folder = Path(home_path(root))
  if not folder.is_dir():
    raise UserError(f'image folder {root!r} does not exist; expected a folder with a subfolder for each class')
  classes, loose = list_folder(folder)
  if loose:
    raise UserError(f'{folder / loose[0]} is in no class folder; expected {folder}/CLASS/{loose[0]}: move it there')
  if not classes:
    raise UserError(f'{folder} has no folder in it; expected one for each class: make {folder}/CLASS/ with images')
  return tuple(classes), _open_split(folder, tuple(classes), size)


def _require_different(paths: Mapping[str, Path]) -> None:
  for (one, first), (other, second) in itertools.combinations(paths.items(), 2):
    if first.samefile(second):
      raise UserError(
        f'{second} is the same folder as {first}; expected other images for {other} than for {one}: link it to '
        'another folder'
      )


def _classes(split: Path) -> tuple[str, ...]:
  classes, loose = list_folder(split)
  if not classes:
    for kind, listed in CSV.items():
      if listed in loose:
        raise UserError(f'{split} has {listed} and no folder of a class: choose the task for {kind}, {TASK[kind]}')
    raise UserError(f'{split} has no folder in it; expected one for each class: make {split}/CLASS/ with images')
  if loose:
    warn(f'{split} has files outside the class folders, which are not used: {len(loose)}, such as {loose[0]}')
  return tuple(classes)


def _open_split(split: Path, classes: tuple[str, ...], size: int | None) -> FolderSource:
  paths: list[str] = []
  labels: list[int] = []
  for label, name in enumerate(classes):
    folder = split / name
    if not folder.is_dir():  # The test split may lack a class.
      continue
    nested, files = list_folder(folder)
    if nested:
      raise UserError(
        f'{folder / nested[0]} is a folder within a class; expected images only: move its images to {folder}, or '
        f'rename it to .{nested[0]} to leave it out'
      )
    if not files:
      raise UserError(f'{folder} has no image in it; expected at least one: add images or remove the folder')
    paths += (f'{folder}/{file}' for file in files)
    labels += [label] * len(files)
  return FolderSource(tuple(paths), tuple(labels), size)


def _sizes(paths: tuple[str, ...]) -> list[int]:
  return [os.path.getsize(path) for path in paths]
