"""The evaluation of a checkpoint of a run on any split."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

from hbf.data.augment.copies import COPIES
from hbf.data.pipeline.identity import identity
from hbf.errors import UserError, choose
from hbf.models.build import count_parameters
from hbf.tasks.images import ImageTask
from hbf.tasks.task import Task
from hbf.training import processes
from hbf.training.edits import Edits
from hbf.training.experiment import make_evaluator, make_splits
from hbf.training.machine import device_name
from hbf.training.restore import find, open_read_only, with_edits
from hbf.training.sharding import batch_sharding
from hbf.training.workdir import check_data, load_config, write_json


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """The scores of one checkpoint on one split.

  Attributes:
    result: the scores by name, tables and curves such as the confusion matrix (`hbf.tasks.task.TaskScores`), and
      facts about the evaluation, such as the run's seed and the device. JSON can hold all values.
    task: the task of the run.
    copies: the kind of changed copies, if the caller chose it. '': the kind in the run's config.
  """

  result: dict[str, Any]
  task: Task
  copies: str = ''

  def save(self, folder: pathlib.Path) -> None:
    """Write the result to the file eval-<split>-<step>.json in a folder. A missing folder is made.

    The name has `-average` after the step if the average was evaluated, then `-edited` if edits were applied, and
    then the kind of copies if the caller chose it.

    Raises:
      UserError: the file cannot be written.
    """
    result, average = self.result, '-average' if self.result['evaluated'] == 'average' else ''
    edited = '-edited' if 'edits' in self.result else ''
    copies = f'-{self.copies}' if self.copies else ''
    path = folder / f'eval-{result["split"]}-{result["checkpoint"]}{average}{edited}{copies}.json'
    try:
      with contextlib.suppress(OSError):  # after this error, writing the file fails too, with a message
        folder.mkdir(parents=True, exist_ok=True)
      write_json(path, result)
    except UserError as error:
      raise UserError(f'{error}, or give another folder as --output') from error


def _find(workdir: pathlib.Path, checkpoint: str) -> int:
  load_config(workdir)  # raises if the folder is not a run folder
  return open_read_only(workdir).find(checkpoint)


def _with_copies(task: Task, copies: str) -> Task:
  """Return the task with `copies` in place of the config's `evaluate.copies`. '': the task stays as it is."""
  if not copies:
    return task
  if not isinstance(task, ImageTask):
    raise UserError(f'copies={copies} is for images; the run is on texts: expected no copies, leave the flag out')
  return dataclasses.replace(task, copies=choose('copies', copies, COPIES))


@processes.ended_by_loss()
def evaluate_workdir(
  workdir: pathlib.Path,
  checkpoint: str,
  split: str,
  devices: Sequence[jax.Device] | None = None,
  average: bool = False,
  copies: str = '',
  dataset: Any = None,
  edits: Edits | bool = False,
  **moved: str,
) -> Evaluation:
  """Evaluate a checkpoint. Nothing is written; see `Evaluation.save`.

  Args:
    workdir: the run folder.
    checkpoint: 'latest', 'best' or a step.
    split: 'train', 'validation' (the training examples that were held out) or 'test'.
    devices: the devices to evaluate on. None: all.
    average: True to evaluate the moving average of the parameters instead of the parameters.
    copies: the kind of changed copies of each image, as in the config key `evaluate.copies`. '': the kind in the
      run's config. The network's outputs for the copies of an image are averaged. The scores of these mean outputs
      are the result's entry `copies`.
    dataset: the run's data set of images, if it is in memory. None: the data set that the config names.
    edits: True to apply the edits in the run folder, or an `Edits` object of this checkpoint.
    **moved: `dir` and `root`, new values of the config keys data.dir and data.root, if the data have moved since
      training. '' keeps the value of the run.

  Raises:
    UserError: the folder is not a run folder, or lacks the checkpoint, average, edits or split. Or the data differ
      from the run's.
  """
  step = processes.on_first_process(lambda: _find(workdir, checkpoint))
  with processes.raise_everywhere():
    if dataset is not None:
      check_data(workdir, identity(dataset))
    found = find(workdir, str(step), devices, dataset, **moved)
    params = count_parameters(found.model, found.task.shape)
  restored = found.restore(average)  # in which the processes compare what they have read
  with processes.raise_everywhere():
    if edits:
      restored = with_edits(restored, workdir, average, edits)
    config, task, mesh = restored.config, _with_copies(restored.task, copies), restored.mesh
    splits = make_splits(task, config.data.validation)
    source = choose('split', split, splits)
    examples = task.open(source, batch_sharding(mesh))
  processes.barrier(mesh)
  evaluator = make_evaluator(config, task, restored.model, mesh, splits)
  scored = evaluator(restored.params, examples)
  about = {
    'dataset': config.data.name,
    'model': config.model.name,
    'recipe': config.recipe,
    'seed': config.seed,
    'params': params,
    'checkpoint': restored.step,
    'split': split,
    'evaluated': 'average' if average else 'parameters',
    **({'edits': restored.model.edits} if edits else {}),
    'device': device_name(mesh.devices.flat),
  }
  summary = scored.summary
  if task.copies:
    copies_evaluator = make_evaluator(config, task, restored.model, mesh, splits, task.copies)
    copied = copies_evaluator(restored.params, examples).summary
    summary = summary | {'copies': {name: copied[name] for name in task.result_names}}
  return Evaluation(about | summary | task.details(scored.counts, scored.per_example), task, copies)
