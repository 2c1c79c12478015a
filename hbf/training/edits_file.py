"""The file edits.npz in a run folder, which holds the edits of the run."""

import pathlib

import numpy as np

from hbf.errors import UserError, warn
from hbf.training import side_file
from hbf.training.edits import Edit, Edits
from hbf.training.workdir import check_kinds, load_config, locked

FILE, VERSION = side_file.EDITS, 1
_ARRAYS = ('centers', 'radius', 'changes')  # of all centers of all edits, in their order
_CURE = 'restore it from a copy, or remove it; the run is then without edits'


def write_edits(workdir: pathlib.Path, edits: Edits | None) -> None:
  """Write or replace the file atomically. If there are no edits, remove the file.

  Raises:
    UserError: the file can't be written, or the run has classes that `hbf learn` added.
  """
  path = workdir / FILE
  if not edits:
    path.unlink(missing_ok=True)
    return
  side_file.check_alone(path)
  names = [
    {'source': edit.source, 'was': edit.was, 'label': edit.label, 'centers': len(edit.centers)}
    for edit in edits.edits
  ]
  about = {'version': VERSION, 'step': edits.step, 'average': edits.average, 'edits': names}
  arrays = {
    'centers': np.concatenate([edit.centers for edit in edits.edits]),
    'radius': np.concatenate([edit.radii for edit in edits.edits]),
    'changes': np.concatenate([edit.changes for edit in edits.edits]),
    'metric': edits.metric,
  }
  side_file.write_arrays(path, about, arrays, _read)


def read_edits(workdir: pathlib.Path) -> Edits | None:
  """Return the edits of a run. None if the run has no edits.

  Raises:
    UserError: the folder is not a run folder, or the file is damaged.
  """
  load_config(workdir)  # raises if it is not a run folder
  path = workdir / FILE
  return _read(path) if path.exists() else None


def _read(path: pathlib.Path) -> Edits:
  with side_file.read_arrays(path, _CURE, 'version', 'step', 'average', 'edits') as (about, arrays):
    # n, m and k are compared below.
    side_file.check_shapes(arrays, centers='nd', radius='m', changes='kc', metric='dd')
    side_file.check_of_checkpoint(about, path, _CURE)
    for said in about['edits']:
      check_kinds(said, path, _CURE, source=str, was=str, label=str)
    ends = np.cumsum([said.get('centers', 1) for said in about['edits']])  # older files do not say that it is 1
    if {len(arrays[name]) for name in _ARRAYS} != {ends[-1]}:
      raise ValueError('its arrays have other numbers of centers than its edits')
    parts = zip(about['edits'], *(np.split(arrays[name], ends[:-1]) for name in _ARRAYS), strict=True)
    edits = [Edit(said['source'], said['was'], said['label'], *own) for said, *own in parts]
    return Edits(about['step'], about['average'], arrays['metric'], tuple(edits))


def undo(workdir: pathlib.Path, number: int) -> None:
  """Remove the edit of this number from a run.

  Raises:
    UserError: the run has no such edit, or another process uses the folder.
  """
  load_config(workdir)  # raises if it is not a run folder; `locked` would make one
  with locked(workdir):
    edits = read_edits(workdir)
    if edits is None:
      raise UserError(f'{workdir} has no edits: there is nothing to undo')
    write_edits(workdir, edits.without(number))


def edits_of(workdir: pathlib.Path, step: int, average: bool) -> Edits:
  """Return the edits of a run, after a check that they belong to the checkpoint of this step.

  Args:
    workdir: the run folder.
    step: the step of the checkpoint.
    average: True if the edits must belong to the moving average of the parameters.

  Raises:
    UserError: the run has no edits, or `step` or `average` differs from that of the edits.
  """
  edits = edits_if_any(workdir, step, average)
  if edits is None:
    raise UserError(f'{workdir} has no edits: make one by `hbf edit`, or leave them out')
  return edits


def edits_if_any(workdir: pathlib.Path, step: int, average: bool) -> Edits | None:
  """Return what `edits_of` returns, or None if the run has no edits.

  Raises:
    UserError: `step` or `average` differs from that of the edits.
  """
  edits = read_edits(workdir)
  if edits is not None:
    side_file.check_checkpoint('edits', edits, step, average, workdir=workdir, remedy='undo')
  return edits


def warn_of_edits(workdir: pathlib.Path, applied: bool, instead: str = '--edits applies them') -> None:
  """Warn if a run has edits, unless `applied` says that the command applies them. `instead` says what does."""
  if not applied and (workdir / FILE).exists():
    warn(f'{workdir} has edits, which are left out: {instead}')


def to_rows(edits: Edits) -> list[tuple[str, ...]]:
  """Return a table row for each edit: number, image or prompt, old answer, new answer and radii."""
  return [
    (str(i), *map(_visible, (edit.source, edit.was, edit.label)), _range(edit.radii))
    for i, edit in enumerate(edits.edits)
  ]


def _visible(text: str) -> str:
  """Return a text for a table cell, with ⏎ for line breaks, and in quotes if it begins or ends in a space."""
  text = text.replace('\n', '⏎')
  return f'‘{text}’' if text != text.strip() else text


def _range(radii: np.ndarray) -> str:
  least, most = (f'{radius:.3g}' for radius in (radii.min(), radii.max()))
  return least if least == most else f'{least} to {most}'
