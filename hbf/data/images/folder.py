"""A folder of images, ROOT/train/CLASS/* and ROOT/test/CLASS/*. The test split may have another name.

Instead of folders of classes, a split may have a CSV file with labels or values (`hbf.data.images.targets`).
"""

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping
from concurrent import futures
from pathlib import Path

import numpy as np

from hbf.data.images import codec
from hbf.data.images.files import list_folder
from hbf.data.images.sources import Target
from hbf.data.images.targets import CLASSES, CSV, TASK, read_csv
from hbf.errors import UserError, warn

_THREADS = 16
_PART = 1024  # number of files whose sizes a thread reads in one task. A task for each file would take much memory.


@dataclasses.dataclass(frozen=True)
class FolderSource:
  """A `Source` of labeled image files, read as RGB.

  Attributes:
    paths: paths of the files, [n].
    labels: class of each file, [n], or a vector of K numbers for each, [n][K].
    size: height and width in pixels that every image is resized to.
  """

  paths: tuple[str, ...]
  labels: tuple[int, ...] | tuple[tuple[float, ...], ...]
  size: int

  def __len__(self) -> int:
    return len(self.paths)

  def __getitem__(self, index: int) -> tuple[np.ndarray, Target]:
    return codec.decode_file(self.paths[index], channels=3, size=self.size), self.labels[index]

  def read_labels(self) -> np.ndarray:
    """Return the label of every file: int [n], or float32 [n, K]."""
    labels = np.array(self.labels)
    return labels.astype(np.int64 if labels.ndim == 1 else np.float32)

  def check(self, indices: np.ndarray) -> None:
    """Check the files of the examples `indices`, int [n]; see `codec.check_file`.

    Raises:
      UserError: a file is not an image or is damaged. The message names the file.
    """
    with futures.ThreadPoolExecutor(_THREADS) as pool:
      for _ in pool.map(codec.check_file, (self.paths[index] for index in indices)):
        pass

  def traits(self, sample: np.ndarray) -> Iterator[bytes]:
    """Yield label, name and size of every file as bytes, then the content of each file in `sample`, int [n]."""
    parts = [self.paths[i : i + _PART] for i in range(0, len(self.paths), _PART)]
    with futures.ThreadPoolExecutor(_THREADS) as pool:
      sizes = itertools.chain.from_iterable(pool.map(_sizes, parts))
      for path, label, size in zip(self.paths, self.labels, sizes, strict=True):
        yield f'{label} {os.path.basename(path)} {size}'.encode()
      yield from pool.map(codec.read_file, (self.paths[index] for index in sample))


def open_folder(
  root: str, size: int | None, used: Mapping[str, str], targets: str = CLASSES
) -> tuple[tuple[str, ...], dict[str, FolderSource]]:
  """Open the images ROOT/train/CLASS/* and those of the other splits. Leave out hidden files and folders.

  Warn of other folders in ROOT and of files beside the class folders, because they are not used.

  Args:
    root: the folder. `~` is the home directory.
    size: height and width in pixels that every image is resized to.
    used: the name of the folder of each split. Its keys are `train`, `test` and perhaps `validation`.
    targets: kind of the labels, see `hbf.data.images.targets`. Unless it is CLASSES, each split has a CSV file.

  Returns:
    The names of the classes (sorted), labels or values, and the source of each split.

  Raises:
    UserError: the size is not given; a folder is missing, empty or not expected; a class has no image or contains a
      folder; or two splits are the same folder.
  """
  if not size:
    raise UserError(
      'image_folder needs the size of its images; expected a number of pixels: set data.image_size, for example to 64'
    )
  folder = Path(os.path.expanduser(root))
  if not root or not folder.is_dir():
    raise UserError(
      f'image folder {root!r} does not exist; expected a folder with train/ and test/: set data.root to it (commands '
      'for trained runs: --data_root)'
    )
  _require_splits(folder, used)
  paths = {split: folder / name for split, name in used.items()}
  _require_different(paths)
  if targets != CLASSES:
    return _open_listed(paths, size, targets)
  classes = _classes(paths['train'])
  for split in sorted(paths.keys() - {'train'}):
    if unknown := sorted(set(_classes(paths[split])) - set(classes)):
      raise UserError(
        f'{paths[split] / unknown[0]} is a class that train/ lacks; expected only classes of {paths["train"]}: '
        'remove the folder or add training images'
      )
  return classes, {split: _open_split(path, classes, size) for split, path in paths.items()}


def _open_listed(
  paths: Mapping[str, Path], size: int, targets: str
) -> tuple[tuple[str, ...], dict[str, FolderSource]]:
  """Open splits with CSV files of their images. Return the names of the columns and the source of each split."""
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
  """Open the images ROOT/CLASS/*. Leave out hidden files and folders.

  Args:
    root: the folder. `~` is the home directory.
    size: height and width in pixels that every image is resized to.

  Returns:
    The sorted names of the classes, and the source of the images.

  Raises:
    UserError: the folder is missing, has no class folder, or has files outside the class folders. Or a class has no
      image or contains a folder.
  """
  folder = Path(os.path.expanduser(root))
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


def _require_splits(folder: Path, used: Mapping[str, str]) -> None:
  found, _ = list_folder(folder)
  for split, name in used.items():
    if name not in found:
      raise UserError(
        f'{folder}/{name} does not exist; expected train/ and a folder to test on, each with class folders; there '
        f'is {", ".join(found) or "no folder"}: rename one, or set '
        f'data.{"validation_split" if split == "validation" else "test_split"} to the name of the {split} folder'
      )
  own = used.get('validation')
  held_out = f'validates on {own}/' if own else 'holds out the part data.validation of it'
  for name in sorted(set(found) - set(used.values())):
    warn(
      f'{folder / name} is not used: the run trains on {used["train"]}/, {held_out}, and tests on {used["test"]}/; '
      f'set data.test_split or data.validation_split to use it, or rename it to .{name} to hide this warning'
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


def _open_split(split: Path, classes: tuple[str, ...], size: int) -> FolderSource:
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
