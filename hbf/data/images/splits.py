"""The files of each split in a user's folder, and messages about splits that are missing or not used.

A shard is one of several files of a split. The used splits are those that a run trains, validates or tests on.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hbf.arguments import home_path
from hbf.data.images.files import list_folder
from hbf.data.registry import DataRequest
from hbf.errors import UserError, warn


def root_folder(root: str, content: str) -> Path:
  """Return the folder `root`. `~` is the home directory.

  For the error message, `content` says what the folder should have.

  Raises:
    UserError: the folder does not exist.
  """
  folder = Path(home_path(root))
  if not root or not folder.is_dir():
    raise UserError(
      f'folder {root!r} does not exist; expected a folder with {content}: set data.root to it (commands for trained '
      'runs: --data_root)'
    )
  return folder


def check(where: str, form: str, found: Sequence[str], used: Mapping[str, str]) -> None:
  """Check that the splits that a run uses are there. Warn of splits that it does not use.

  Args:
    where: beginning of the path of a split, for messages.
    form: the rest of this path, with {} in place of the split's name, such as '{}-*.tar'.
    found: the user's names of the splits that are there.
    used: the user's name of each used split. Its keys are `train`, `test` and perhaps `validation`.

  Raises:
    UserError: a split is missing.
  """
  for split, name in used.items():
    if name not in found:
      cure = '' if split == 'train' else f', or set data.{split}_split to the name of the {split} split'
      raise UserError(
        f'{where}{form.format(name).rstrip("/")} does not exist; expected {form.format("train")} and a split to test '
        f'on; there is {", ".join(found) or "none"}: rename one{cure}'
      )
  train, test, own = (form.format(used[split]) if split in used else '' for split in ('train', 'test', 'validation'))
  held_out = f'validates on {own}' if own else 'holds out the part data.validation of it'
  for name in sorted(set(found) - set(used.values())):
    warn(
      f'{where}{form.format(name).rstrip("/")} is not used: the run trains on {train}, {held_out}, and tests on '
      f'{test}; set data.test_split or data.validation_split to use it, or rename it to .{name} to hide this warning'
    )


def find_shards(request: DataRequest, ending: str) -> dict[str, tuple[str, ...]]:
  """Return the sorted paths of the files SPLIT.ENDING or SPLIT-*.ENDING, for each split that the request names.

  The files are in the folder `root` of the request. If it has none, they are in its subfolder `data`.

  Raises:
    UserError: the folder or a split does not exist. Or a file is missing: train-00000-of-00002, for example, says
      that there are two files.
  """
  folder = root_folder(request.root, f'train-*.{ending} and test-*.{ending}')
  folders, files = list_folder(folder)
  if not any(name.endswith(f'.{ending}') for name in files) and 'data' in folders:
    folder /= 'data'
    _, files = list_folder(folder)
  found: dict[str, list[str]] = {}
  for name in files:
    if name.endswith(f'.{ending}'):
      found.setdefault(name.removesuffix(f'.{ending}').partition('-')[0], []).append(f'{folder}/{name}')
  check(f'{folder}/', f'{{}}-*.{ending}', list(found), request.splits)
  for name in request.splits.values():
    _require_all(found[name])
  return {split: tuple(found[name]) for split, name in request.splits.items()}


def _require_all(paths: Sequence[str]) -> None:
  """Raise UserError if a file of a split is missing, such as the second file beside train-00000-of-00002.tar."""
  numbered = [found for path in paths if (found := re.fullmatch(r'(.*)-(\d+)-of-(\d+)(\.\w+)', path))]
  for start, width, count, ending in {(found[1], len(found[2]), found[3], found[4]) for found in numbered}:
    expected = [f'{start}-{number:0{width}d}-of-{count}{ending}' for number in range(int(count))]
    if missing := sorted(set(expected) - set(paths)):
      raise UserError(f'{missing[0]} is missing; expected all {int(count)} files of the split: add it')
