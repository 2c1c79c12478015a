"""Ways to damage a checkpoint folder, so that it cannot be restored."""

import os
import pathlib
import shutil
from collections.abc import Callable

METADATA = '_CHECKPOINT_METADATA'
NUMBERS = 'params/ocdbt.process_0/d'


def each(damage: Callable[[pathlib.Path], object], folder: pathlib.Path) -> None:
  """Damage every file of a folder. Damage to a single file might not show, because a restore skips some bytes."""
  for path in [*folder.iterdir()]:
    damage(path)


def flip(path: pathlib.Path) -> None:
  """Flip a bit in the first tenth of a file."""
  content = bytearray(path.read_bytes())
  content[len(content) // 10] ^= 1
  path.write_bytes(content)


def cut(path: pathlib.Path) -> None:
  """Keep only the first tenth of a file."""
  os.truncate(path, path.stat().st_size // 10)


def replace(path: pathlib.Path, by: str = '') -> None:
  """Replace a path by a file with this text, or by an empty folder if there is no text."""
  shutil.rmtree(path) if path.is_dir() else path.unlink()
  path.write_text(by) if by else path.mkdir()


def rename_keys(path: pathlib.Path) -> None:
  """Flip a bit in two keys of JSON: one of Orbax, one of this library."""
  path.write_text(path.read_text().replace('"commit_', '"bommit_').replace('"checksums"', '"bhecksums"'))


DAMAGES: dict[str, Callable[[pathlib.Path], None]] = {
  'bits of the parameters flipped': lambda folder: each(flip, folder / NUMBERS),
  'bits of the tables flipped': lambda folder: flip(folder / 'training' / 'manifest.ocdbt'),
  'bits of the metadata flipped': lambda folder: rename_keys(folder / METADATA),
  'the parameters cut off': lambda folder: each(cut, folder / NUMBERS),
  'the metadata cut off': lambda folder: cut(folder / METADATA),
  'a file of no bytes': lambda folder: os.truncate(folder / 'params' / 'manifest.ocdbt', 0),
  'the parameters missing': lambda folder: each(pathlib.Path.unlink, folder / NUMBERS),
  'the metadata missing': lambda folder: (folder / METADATA).unlink(),
  'an item missing': lambda folder: shutil.rmtree(folder / 'training'),
  'a folder in place of the metadata': lambda folder: replace(folder / METADATA),
  'a folder in place of a file': lambda folder: replace(folder / 'params' / '_METADATA'),
  'a file in place of an item': lambda folder: replace(folder / 'params', 'nothing'),
  'an empty folder': replace,
  'a file in place of the checkpoint': lambda folder: replace(folder, 'nothing'),
}
