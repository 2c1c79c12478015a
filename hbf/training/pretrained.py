"""Trained models that come with the package, each with weights, config, scores and a description.

A model is a folder in `hbf/pretrained`. It has the run's config.json, data.json and result.json, the parameters in
the format safetensors, and a model card for users, README.md. `unpack` makes a run folder from a model, so that all
commands on runs work.
"""

import contextlib
import hashlib
import json
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from flax.traverse_util import flatten_dict, unflatten_dict

from hbf.arguments import Parser
from hbf.errors import UserError, choose, in_one_line
from hbf.interop import tensors
from hbf.tasks.registry import TASKS
from hbf.training.checkpoints import Checkpoints
from hbf.training.machine import cache_folder
from hbf.training.restore import restore, stored_data
from hbf.training.schema import GONE, RENAMED, renamed
from hbf.training.workdir import check_place, damaged, read_json, read_result, reason_of

MODELS = pathlib.Path(__file__).parents[1] / 'pretrained'
WEIGHTS, CARD, DESCRIPTION = 'model.safetensors', 'README.md', ('config.json', 'data.json', 'result.json')
# Entries of result.json that depend on the training machine. A model does not store them.
_OF_THE_MACHINE = ('train_seconds', 'compile_seconds', 'images_per_second', 'peak_memory_bytes')


def names() -> list[str]:
  """Return the names of all models, sorted."""
  return sorted(path.parent.name for path in MODELS.glob(f'*/{WEIGHTS}'))


def folder_of(name: str) -> pathlib.Path:
  """Return the folder of a model in the package.

  Raises:
    UserError: there is no such model. The message suggests the nearest name.
  """
  return choose('model', name, {known: MODELS / known for known in names()})


def read_params(name: str) -> dict[str, Any]:
  """Return the parameters of a model, on the host.

  Raises:
    UserError: there is no such model, or its weights can't be read.
  """
  found = {path: array for path, array in tensors.read(folder_of(name) / WEIGHTS).items() if path not in GONE}
  return renamed(unflatten_dict(found, sep='/'), RENAMED)


def describe(name: str) -> str:
  """Return one line about a model: data set, size and scores on the test split.

  Raises:
    UserError: there is no such model. The message suggests the nearest name.
  """
  result = _result(folder_of(name))
  scores = [score for score in TASKS[result['task']].scores if score.name in result]
  shown = ', '.join(f'{score.label} {result[score.name]:{score.form}}' for score in scores[:2])
  return f'{result["dataset"]}, {result["params"]:,} parameters, {shown}'


def default_workdir(name: str) -> pathlib.Path:
  """Return the default run folder of `unpack`. Its name contains a checksum of the model's files."""
  digest = hashlib.sha256(b''.join((folder_of(name) / file).read_bytes() for file in (WEIGHTS, *DESCRIPTION)))
  return cache_folder('pretrained') / f'{name}-{digest.hexdigest()[:8]}'


def unpack(name: str, workdir: pathlib.Path | None = None) -> pathlib.Path:
  """Make a run folder with a model's weights as its only checkpoint, and return the path of the folder.

  An existing folder of the same model stays as it is. After an error, no incomplete folder is left.

  Args:
    name: the name of a model, one of `names()`.
    workdir: the run folder, which must be missing or empty. None: a folder in the user's cache.

  Raises:
    UserError: there is no such model. Or the folder is neither empty nor a folder of this model, or can't be written.
  """
  if workdir is not None:
    check_place(workdir)
  source, folder = folder_of(name), (default_workdir(name) if workdir is None else workdir).absolute()
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    if folder.is_dir() and _same(folder / 'result.json', source / 'result.json'):
      return folder
    raise UserError(f'{folder} holds something else than {name}: choose another --workdir, or remove it')
  try:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f'.{folder.name}.', dir=folder.parent) as temporary:
      made = pathlib.Path(temporary) / folder.name
      made.mkdir()
      for file in DESCRIPTION:
        shutil.copyfile(source / file, made / file)
      _write_checkpoint(read_params(name), _result(source)['steps'], made / 'checkpoints')
      made.rename(folder)
  except Exception as error:  # Orbax's errors have several types
    if _same(folder / 'result.json', source / 'result.json'):  # another process was faster
      return folder
    if (reason := reason_of(error) or (str(error) if isinstance(error, OSError) else None)) is None:
      raise
    raise UserError(f'{folder} could not be written ({reason}): choose another --workdir, or make room') from error
  return folder


def _write_checkpoint(params: Any, step: int, folder: pathlib.Path) -> None:
  folder.mkdir()
  with contextlib.closing(Checkpoints(folder)) as checkpoints:
    checkpoints.save_params(step, jax.device_put(params))


def store(workdir: pathlib.Path, folder: pathlib.Path, about: str) -> None:
  """Store a finished run as a model in a new folder: its weights, config, data.json and result, and a model card.

  Args:
    workdir: the folder of a finished run.
    folder: the folder to write. Its name becomes the name of the model.
    about: sentences for the card about the purpose and the limits of the model.

  Raises:
    UserError: the run isn't finished, or `folder` exists.
  """
  result = read_result(workdir, 'steps', 'commit')
  if result is None:
    raise UserError(f'{workdir} is not finished: train it to its end')
  if folder.exists():
    raise UserError(f'{folder} exists: choose another name, or remove it')
  restored = restore(workdir, 'latest', jax.devices()[:1], dataset=stored_data(workdir))
  folder.mkdir(parents=True)
  params = {name: np.asarray(array, order='C') for name, array in flatten_dict(restored.params, sep='/').items()}
  (folder / WEIGHTS).write_bytes(safetensors.numpy.save(params))
  for file in DESCRIPTION[:-1]:
    shutil.copyfile(workdir / file, folder / file)
  kept = {key: value for key, value in result.items() if key not in _OF_THE_MACHINE}
  (folder / 'result.json').write_text(json.dumps(kept, indent=2) + '\n')
  (folder / CARD).write_text(card(folder, about))


def card(folder: pathlib.Path, about: str) -> str:
  """Return the card of a stored model, in Markdown. `about` is the text on its purpose and limits, as in `store`."""
  result, config = _result(folder), json.loads((folder / 'config.json').read_text())
  scores = [score for score in TASKS[result['task']].scores if score.name in result]
  train, optimizer = config['train'], config['optimizer']
  rows = [
    ('data set', result['dataset']),
    ('model', f'{result["model"]}, recipe {result["recipe"]}, {result["params"]:,} parameters'),
    ('training', f'{result["epochs"]:g} epochs, {result["train_operations"]:.2e} operations, seed {result["seed"]}'),
    ('optimizer', f'{optimizer["name"]}, learning rate {optimizer["learning_rate"]:g}, batch {train["batch_size"]}'),
    *((f'{score.label} on {result["split"]}', f'{result[score.name]:{score.form}}') for score in scores),
    ('trained on', f'{result["device"]}, commit {result["commit"]}'),
  ]
  table = '\n'.join(['| fact | value |', '|---|---|', *(f'| {key} | {value} |' for key, value in rows)])
  use = f"```python\nimport hbf\n\nrun = hbf.load_pretrained('{folder.name}')\n```"
  files = 'All keys are in config.json, all scores in result.json.'
  return '\n\n'.join((f'# {folder.name}', about.strip(), table, files, use)) + '\n'


def _result(folder: pathlib.Path) -> dict[str, Any]:
  cure = 'install the package again'
  found = read_json(folder / 'result.json', cure, 'task', 'steps')
  if found is None:
    raise damaged(folder / 'result.json', 'it is missing', cure)
  return found


def _same(one: pathlib.Path, other: pathlib.Path) -> bool:
  return one.is_file() and one.read_bytes() == other.read_bytes()


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
  """Store a finished run as a model of the package and return the exit status."""
  parser = Parser('hbf.training.pretrained', 'Store a finished run among the models of the package.')
  parser.add_path('workdir', help='the run folder')
  parser.add_argument('name', help='name of the model')
  parser.add_argument('--about', required=True, help='sentences of its card: purpose and limits')
  flags = parser.parse_args(arguments)
  store(flags.workdir, MODELS / flags.name, flags.about)
  print(MODELS / flags.name)
  return 0


if __name__ == '__main__':
  sys.exit(main())
