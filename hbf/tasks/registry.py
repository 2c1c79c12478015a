"""The tasks by their names in a config."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from hbf.errors import choose
from hbf.tasks.classification import Classification
from hbf.tasks.images import ImageTask
from hbf.tasks.language import MaskedToken, NextToken
from hbf.tasks.multi_label import MultiLabel
from hbf.tasks.regression import Regression
from hbf.tasks.task import Task

TASKS: Mapping[str, type[Task]] = {
  'classification': Classification,
  'multi_label': MultiLabel,
  'regression': Regression,
  'next_token': NextToken,
  'masked_token': MaskedToken,
}


def on_images(task: str) -> bool:
  """Return True if the examples of this task are images, False if they are texts.

  Raises:
    UserError: the task is unknown.
  """
  return issubclass(choose('task', task, TASKS), ImageTask)


def make_task(config: ConfigDict, dataset: Any = None) -> Task:
  """Return the task of a run's config.

  Args:
    config: the run's config.
    dataset: the data set. None: the one that the config names.

  Raises:
    UserError: the task or the data set is unknown, or a value in the config is not valid for it.
  """
  kind = choose('task', config.task, TASKS)
  return kind.from_config(config, kind.load_dataset(config) if dataset is None else dataset)
