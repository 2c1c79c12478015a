"""Loggers: programs that receive the numbers of a run besides metrics.jsonl, such as TensorBoard."""

import importlib.util
import pathlib
import time
import uuid
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import jax
import numpy as np
from ml_collections import ConfigDict

from hbf.errors import UserError, choose, warn
from hbf.training.workdir import flatten, read_json, write_json

PROJECT = 'hbf'  # name of the project in Weights & Biases, and of the experiment in MLflow
IDENTITIES = 'loggers.json'  # file of a run folder with the run's identity in each program


class Histogram(NamedTuple):
  """The distribution of the values of a parameter.

  Attributes:
    counts: the number of values in each of n bins, int [n].
    edges: the limits of the bins, float [n + 1].
  """

  counts: np.ndarray | jax.Array
  edges: np.ndarray | jax.Array


class Logger(Protocol):
  """A receiver of the numbers of a run."""

  def numbers(self, step: int, values: Mapping[str, float]) -> None:
    """Receive numbers by name, such as 'train/loss', that hold after a step."""

  def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
    """Receive the histogram of every parameter, by its path such as 'block0/stage1/query/kernel'."""

  def images(self, step: int, name: str, images: np.ndarray) -> None:
    """Receive images under a name such as 'train/images', uint8 [n, H, W, C] with 1 or 3 channels."""

  def close(self, finished: bool) -> None:
    """End the connection. If the run is not finished, a later process may open it again, to continue the run."""


class TensorBoard:
  """A logger that writes event files for TensorBoard into the run folder."""

  package = 'tensorboardX'
  takes_pictures = True

  def __init__(self, config: ConfigDict, workdir: pathlib.Path, start: int):
    """Open new event files.

    An interrupted process may have written values for steps after `start`. TensorBoard hides these values now.
    """
    from tensorboardX import SummaryWriter

    self._writer = SummaryWriter(str(workdir / 'tensorboard'), purge_step=start + 1)

  def numbers(self, step: int, values: Mapping[str, float]) -> None:
    """Write a scalar for each number."""
    for name, value in values.items():
      self._writer.add_scalar(name, value, step)

  def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
    """Write the histograms."""
    for name, (counts, edges) in values.items():
      middles = (edges[:-1] + edges[1:]) / 2  # TensorBoard also wants sums of the values, which these estimate
      self._writer.add_histogram_raw(
        f'parameters/{name}',
        min=float(edges[0]),
        max=float(edges[-1]),
        num=int(counts.sum()),
        sum=float(counts @ middles),
        sum_squares=float(counts @ middles**2),
        bucket_limits=edges[1:].tolist(),
        bucket_counts=counts.tolist(),
        global_step=step,
      )

  def images(self, step: int, name: str, images: np.ndarray) -> None:
    """Write the images as one picture."""
    self._writer.add_images(name, images, step, dataformats='NHWC')

  def close(self, finished: bool) -> None:
    """Close the files."""
    self._writer.close()


class WandB:
  """A logger that sends a run to Weights & Biases, or keeps it in the run folder if WANDB_MODE is offline."""

  package = 'wandb'
  takes_pictures = True

  def __init__(self, config: ConfigDict, workdir: pathlib.Path, start: int):
    """Open the run at Weights & Biases.

    A continued run goes on in the same run there. Weights & Biases ignores the steps that it already has.
    """
    import wandb

    self._wandb = wandb
    self._run = wandb.init(
      project=PROJECT,
      name=workdir.name,
      dir=workdir,
      id=_identity(workdir, 'wandb', start, lambda: uuid.uuid4().hex[:8]),
      resume='allow',
      reinit='create_new',  # a user's own run in this process stays open
      config=config.to_dict(),
      settings=wandb.Settings(console='off'),
    )

  def numbers(self, step: int, values: Mapping[str, float]) -> None:
    """Send the numbers."""
    self._run.log(dict(values), step=step)

  def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
    """Send the histograms."""
    made = {f'parameters/{name}': self._wandb.Histogram(np_histogram=tuple(value)) for name, value in values.items()}
    self._run.log(made, step=step)

  def images(self, step: int, name: str, images: np.ndarray) -> None:
    """Send the images."""
    self._run.log({name: [self._wandb.Image(image.squeeze()) for image in images]}, step=step)

  def close(self, finished: bool) -> None:
    """Send what is left, and mark the run as finished or as failed."""
    self._run.finish(exit_code=0 if finished else 1)


class MLflow:
  """A logger that sends a run to MLflow: to the server, folder or database in MLFLOW_TRACKING_URI.

  MLflow has no histograms and no series of pictures, so it gets numbers only.
  """

  package = 'mlflow'
  takes_pictures = False

  def __init__(self, config: ConfigDict, workdir: pathlib.Path, start: int):
    """Open the run in MLflow, with the config as its parameters. A continued run goes on in the same run there."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    self._client, self._metric = MlflowClient(), Metric
    self._run = _identity(workdir, 'mlflow', start, lambda: self._create(workdir.name))
    self._client.update_run(self._run, status='RUNNING')
    self._last = {metric: self._steps(metric) for metric in self._client.get_run(self._run).data.metrics}
    if not self._client.get_run(self._run).data.params:  # the run is new here, though training may go on
      params = [Param(key, str(value)) for key, value in flatten(config.to_dict()).items()]
      self._client.log_batch(self._run, params=params)

  def _create(self, name: str) -> str:
    experiment = self._client.get_experiment_by_name(PROJECT)
    number = self._client.create_experiment(PROJECT) if experiment is None else experiment.experiment_id
    return self._client.create_run(number, run_name=name).info.run_id

  def _steps(self, metric: str) -> int:
    """Return the last step for which MLflow has a value of this metric."""
    return max(value.step for value in self._client.get_metric_history(self._run, metric))

  def numbers(self, step: int, values: Mapping[str, float]) -> None:
    """Send the numbers, except those for which MLflow already has a value of this or a later step."""
    now = int(1000 * time.time())
    new = {name: value for name, value in values.items() if step > self._last.get(name, -1)}
    self._client.log_batch(self._run, metrics=[self._metric(name, value, now, step) for name, value in new.items()])

  def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
    """Send nothing."""

  def images(self, step: int, name: str, images: np.ndarray) -> None:
    """Send nothing."""

  def close(self, finished: bool) -> None:
    """Mark the run as finished or as killed."""
    self._client.set_terminated(self._run, status='FINISHED' if finished else 'KILLED')


LOGGERS: dict[str, type[TensorBoard] | type[WandB] | type[MLflow]] = {
  'tensorboard': TensorBoard,
  'wandb': WandB,
  'mlflow': MLflow,
}


def check_loggers(text: str) -> tuple[str, ...]:
  """Return the names in the config key `log.to`, which are separated by commas.

  Raises:
    UserError: a name is unknown or given twice, or its package is not installed.
  """
  names = tuple(filter(None, (name.strip() for name in text.split(','))))
  for name in names:
    package = choose('log.to', name, LOGGERS).package
    if names.count(name) > 1:
      raise UserError(f'log.to has {name} {names.count(name)} times: name each logger once')
    if importlib.util.find_spec(package) is None:
      raise UserError(f"log.to={name} needs the package {package}: install it by pip install 'hbf[{name}]'")
  return names


class Loggers:
  """The loggers of a run. If a logger fails during the run, the run goes on without it."""

  def __init__(self, config: ConfigDict, workdir: pathlib.Path, start: int):
    """Open the loggers that the config names, for a run that starts or continues after step `start`.

    Raises:
      UserError: a logger can't be opened.
    """
    self._loggers: dict[str, Logger] = {}
    for name in check_loggers(config.log.to):
      try:
        self._loggers[name] = LOGGERS[name](config, workdir, start)
      except Exception as error:
        self.close(finished=False)
        raise UserError(f'log.to={name} cannot start ({_line(error)}): mend this, or leave {name} out') from error

  def numbers(self, step: int, values: Mapping[str, float]) -> None:
    """Send numbers to all loggers; see `Logger.numbers`."""
    self._send(lambda logger: logger.numbers(step, values))

  def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
    """Send histograms to all loggers; see `Logger.histograms`."""
    self._send(lambda logger: logger.histograms(step, values))

  def images(self, step: int, name: str, images: np.ndarray) -> None:
    """Send images to all loggers; see `Logger.images`."""
    self._send(lambda logger: logger.images(step, name, images))

  def close(self, finished: bool) -> None:
    """Close all loggers; see `Logger.close`."""
    self._send(lambda logger: logger.close(finished))
    self._loggers = {}

  def _send(self, call: Callable[[Logger], None]) -> None:
    for name, logger in [*self._loggers.items()]:
      try:
        call(logger)
      except Exception as error:
        del self._loggers[name]
        warn(
          f'the logger {name} failed ({_line(error)}), and the run goes on without it: metrics.jsonl has all numbers'
        )


def _line(error: Exception) -> str:
  """Return the message of an error in one line."""
  return ' '.join(str(error).split()) or type(error).__name__


def _identity(workdir: pathlib.Path, name: str, start: int, make: Callable[[], str]) -> str:
  """Return the identifier that a run has in the program `name`, such as 'wandb'.

  For a new run (`start` is 0), `make` makes the identifier, and it is stored in the run folder. For a continued run
  it is read from there.
  """
  path = workdir / IDENTITIES
  stored = read_json(path, 'delete it; the loggers then begin anew') or {}
  if not start or name not in stored:
    stored[name] = make()
    write_json(path, stored)
  return stored[name]
