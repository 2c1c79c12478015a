"""Imported parameters as a run's workdir, and a run's parameters out of its workdir."""

import contextlib
import pathlib

import jax
import jax.numpy as jnp

from hbf.errors import UserError
from hbf.interop.weights import Params
from hbf.models.build import abstract_params, build_model
from hbf.models.classifier import ImageClassifier
from hbf.training.checkpoints import Checkpoints
from hbf.training.experiment import Experiment, load_dataset, with_sharding
from hbf.training.sharding import make_mesh
from hbf.training.state import Totals, TrainState
from hbf.training.workdir import claim, load_config, locked


def write(workdir: pathlib.Path, experiment: Experiment, params: Params) -> None:
  """Makes the workdir of a run of these parameters that has taken no step.

  Raises:
    UserError: something is there already.
  """
  if workdir.exists():
    raise UserError(f'{workdir} exists: choose another --workdir, or remove it')
  params = jax.tree.map(jnp.asarray, params)
  state = TrainState(jnp.zeros((), jnp.int32), params, experiment.optimizer.init(params), Totals.zeros())
  with locked(workdir):
    claim(workdir, experiment.config)
    with contextlib.closing(Checkpoints(workdir / 'checkpoints')) as checkpoints:
      checkpoints.save(0, state, validation=None)


def read(workdir: pathlib.Path, checkpoint: str, **moved: str) -> tuple[ImageClassifier, Params]:
  """The model and the parameters of a run's checkpoint; arguments as in `hbf.training.evaluate.evaluate_workdir`."""
  config = load_config(workdir)
  config.data.update({key: value for key, value in moved.items() if value})
  checkpoints = Checkpoints(workdir / 'checkpoints', read_only=True)
  step, dataset = checkpoints.find(checkpoint), load_dataset(config)
  model = build_model(config.model, len(dataset.classes))
  return model, checkpoints.restore_params(
    step, with_sharding(abstract_params(model, dataset.image_shape), make_mesh())
  )
