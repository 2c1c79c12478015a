"""Tasks by the name that a config gives them."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from hbf.errors import choose
from hbf.tasks.classification import Classification
from hbf.tasks.language import MaskedToken, NextToken
from hbf.tasks.task import Task

TASKS: Mapping[str, type[Task]] = {
  'classification': Classification,
  'next_token': NextToken,
  'masked_token': MaskedToken,
}


def make_task(config: ConfigDict, dataset: Any = None) -> Task:
  """The task of a run's config.

  Args:
    config: of the run.
    dataset: to take; None: the one that the config names.

  Raises:
    UserError: there is no such task or data set, or something in the config can't be.
  """
  kind = choose('task', config.task, TASKS)
  return kind.of(config, kind.load(config) if dataset is None else dataset)
