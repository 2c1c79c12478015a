"""A run whose network is restored for analysis, on images or on texts."""

import dataclasses
import pathlib
from typing import Any, Self

import flax.linen as nn
import jax

from hbf.training.machine import quiet
from hbf.training.restore import Restored, restore


@dataclasses.dataclass(frozen=True)
class RestoredRun:
  """The network of a run at a checkpoint, with the task of the run, which opens the run's data.

  Attributes:
    workdir: the run folder.
    restored: the restored network, its config and its task.
    average: True if the parameters are the moving average of the trained parameters.
  """

  workdir: pathlib.Path
  restored: Restored
  average: bool = False

  @classmethod
  def of(
    cls, workdir: pathlib.Path, checkpoint: str = 'latest', dir: str = '', root: str = '', average: bool = False
  ) -> Self:
    """Restore a run.

    Args:
      workdir: the run folder.
      checkpoint: 'latest', 'best' or a step.
      dir: folder of the prepared TFDS data. If empty, the folder used in training.
      root: folder of the images or texts. If empty, the folder used in training.
      average: True to take the moving average of the parameters.

    Raises:
      UserError: the class cannot load the run (`check`), or an error of `hbf.training.restore.restore`.
    """
    cls.check(workdir)
    with quiet():
      restored = restore(workdir, checkpoint, jax.devices()[:1], average, dir=dir, root=root)
    return cls(workdir, restored, average)

  @classmethod
  def check(cls, workdir: pathlib.Path) -> None:
    """Raise `UserError` if this class cannot load the run in a folder."""
    raise NotImplementedError

  @property
  def params(self) -> Any:
    """Parameters of the network."""
    return self.restored.params

  def with_params(self, params: Any, model: nn.Module | None = None) -> Self:
    """Return the run with other parameters, and with the network `model` if it is given."""
    model = self.restored.model if model is None else model
    return dataclasses.replace(self, restored=dataclasses.replace(self.restored, params=params, model=model))
