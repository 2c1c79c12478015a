"""Runs from Python: configs, training, evaluation, models and edits. docs/how-to/own-arrays.md has examples."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from rich.console import Console

from hbf.config import datasets as configs
from hbf.config.resolve import check_complete
from hbf.data.augment.batches import normalize
from hbf.data.datasets import Dataset, from_arrays
from hbf.data.images.arrays import NAME, ArrayData, to_images
from hbf.editing import edit as image_edits
from hbf.editing import text as text_edits
from hbf.editing.edit import ImageEditor, class_number, guarded_images, labeled_images, no_edits
from hbf.editing.editor import REACH, check_options
from hbf.editing.guard import Reader
from hbf.editing.learn import check_names, learn_images, nothing_learned
from hbf.errors import UserError
from hbf.evaluation.batches import in_batches
from hbf.models.generation import Sampling
from hbf.models.language import LanguageModel
from hbf.options import whole
from hbf.tasks.registry import on_images
from hbf.training import loop, pretrained
from hbf.training.callbacks import Callback
from hbf.training.edits import Edits, unedited
from hbf.training.edits_file import edits_of, write_edits
from hbf.training.evaluate import evaluate_workdir
from hbf.training.generate import check_task, continue_texts
from hbf.training.learned import Learned, learned_of, unextended, write_learned
from hbf.training.machine import quiet
from hbf.training.mirror import local_copy, mirrored
from hbf.training.restore import restore, stored_data
from hbf.training.side_file import check_checkpoint
from hbf.training.signals import signals
from hbf.training.workdir import load_config, locked


def get_config(data: str, model: str = '', recipe: str = '', size: str = '', task: str = '') -> ConfigDict:
  """Return the config of a run. You may change its keys.

  The flag --config=DATA:model=…,recipe=…,size=…,task=… of `hbf train` gives the same config.

  Args:
    data: the name of a data set, such as 'cifar10'. 'arrays': your own images in memory.
    model: a name such as 'hyperbf', 'gated' or 'vit', or two stages such as 'softmax+hyperbf'. '': hyperbf.
    recipe: a name such as 'small', 'laptop' or 'memo'. '': the recipe of the data set.
    size: the name of a network's size, such as 'tiny'. '': the size of the recipe.
    task: 'multi_label' or 'regression' if your own images have labels or values, or 'masked_token' for a text. '':
      the default, which is 'classification' for images and 'next_token' for texts.

  Raises:
    ValueError: a name is unknown. The message suggests the nearest known name.
  """
  given = {'model': model, 'recipe': recipe, 'size': size, 'task': task}
  for name, value in {'data': data, **given}.items():
    if not isinstance(value, str) or set(value) & set(':,='):
      raise UserError(f'{name} is {value!r}: expected a name')
  arguments = ','.join(f'{name}={value}' for name, value in given.items() if value)
  return configs.get_config(f'{data}:{arguments}')


@quiet()
def train(
  config: ConfigDict,
  workdir: str | os.PathLike[str],
  data: ArrayData | None = None,
  callbacks: Sequence[Callback] = (),
  *,
  devices: Sequence[jax.Device] | None = None,
  progress: bool = True,
) -> dict[str, Any] | None:
  """Train a network, or continue the run in a folder. Evaluate the test split once, at the end.

  This function works in a script, a notebook and a thread. Ctrl-C saves the run and then raises KeyboardInterrupt.
  But if the call is in another thread than the main thread, Ctrl-C does not stop it. A second call with the same
  arguments continues from the last checkpoint. If the run is finished, the call returns its result.

  The devices take up to `train.steps_per_call` steps at a time. Then every callback is called as
  `callback(step, metrics, state)`:

      step      the number of steps taken so far
      metrics   a dict: 'epoch', and 'loss' and 'accuracy' of training since the last logged step (`log.every`). Task
                multi_label has 'label_accuracy' instead of 'accuracy', and task regression has 'loss' only. If the
                validation split was evaluated after this step (`evaluate.every`), the dict also has 'validation',
                a dict of scores
      state     params, opt_state and average on the devices. The next steps overwrite these arrays. To keep some,
              copy them, for example with `jax.device_get(state.params)`

  If a run stopped during an evaluation, the same call repeats the evaluation, and calls every callback for this step
  again. If no step followed the last logged one, 'loss' and 'accuracy' are then not numbers.

  If a callback returns True, the run is saved and stops. If a callback raises an exception, the run is saved and this
  function raises the exception. The devices wait until all callbacks have returned.

  Args:
    config: a config of `get_config`. It is not changed.
    workdir: the run folder, or its address on a bucket (`s3://…`, `gs://…`). A missing folder is made.
    data: your own images to train and test on. None: the data set that the config names.
    callbacks: functions as described above. They are called in the order of this argument.
    devices: the devices to train on. None: all.
    progress: True to show progress on stderr.

  Returns:
    The content of result.json: the scores of the test split, such as 'accuracy' and 'nll', the number of parameters
    ('params'), the seconds of training ('train_seconds') and more. None if a callback stopped the run.

  Raises:
    ValueError: the config, the data or the folder is not valid. Nothing is written.
  """
  if not isinstance(config, ConfigDict):
    raise UserError(f"config is {config!r}: expected a ConfigDict, as hbf.get_config('cifar10') returns it")
  check_complete(config)
  if not isinstance(callbacks, Iterable):
    raise UserError(f'callbacks is {callbacks!r}: expected a list of functions, such as callbacks=[log]')
  functions, chosen = [*callbacks], _devices(devices)
  for function in functions:
    if not callable(function):
      raise UserError(f'callbacks has {function!r}: expected functions of step, metrics and state')
  address, dataset = _address(workdir), _dataset(data)
  if dataset is not None:
    config = _of_arrays(config)
  console = Console(stderr=True, quiet=not progress)
  # A signal calls the process's own handler last, which may end the process, so the bucket must be complete before.
  with signals(guest=True) as signaled, mirrored(address, console) as folder:
    return loop.train(config, folder, console, chosen, dataset=dataset, callbacks=functions, signaled=signaled)


@quiet()
def evaluate(
  workdir: str | os.PathLike[str],
  split: str = 'test',
  checkpoint: str | int = 'latest',
  *,
  data: ArrayData | None = None,
  average: bool = False,
  edits: Edits | bool = False,
  devices: Sequence[jax.Device] | None = None,
) -> dict[str, Any]:
  """Evaluate a checkpoint of a run. Nothing is written.

  Args:
    workdir: the run folder, or its address on a bucket.
    split: 'train', 'validation' (the training examples that were held out) or 'test'.
    checkpoint: 'latest', 'best' (by the validation split) or a step.
    data: the images that the run was trained on, in memory. Their fingerprint (a checksum) must be the one in the run
      folder. None: the data set that the run's config names. For other images use `Run.predict`.
    average: True to evaluate the moving average of the parameters (`train.average`).
    edits: True to apply the edits in the run folder, or an `Edits` object that was made for this checkpoint.
    devices: the devices to evaluate on. None: all.

  Returns:
    The scores of the split. For task classification they are 'n', 'accuracy', 'nll', 'ece', 'confusion' and more.

  Raises:
    ValueError: the folder is not a run folder or has no such checkpoint or split, or the data differ from the run's
      data.
  """
  chosen = _devices(devices)
  if edits and not isinstance(edits, bool | Edits):
    raise UserError(f'edits is {edits!r}: expected True for those in the run folder, False, or the edits of a run')
  folder, dataset = local_copy(_address(workdir)), _dataset(data)
  if dataset is not None:
    _check_on_images(load_config(folder), f'the run in {folder}')
  return evaluate_workdir(folder, str(checkpoint), split, chosen, average, dataset=dataset, edits=edits).result


@quiet()
def load(
  workdir: str | os.PathLike[str],
  checkpoint: str | int = 'latest',
  *,
  average: bool = False,
  edits: bool = False,
  learned: bool = False,
  device: jax.Device | None = None,
) -> 'Run':
  """Load a trained model from its run folder. The training data are not needed.

  Args:
    workdir: the run folder, or its address on a bucket.
    checkpoint: 'latest', 'best' (by the validation split) or a step.
    average: True to take the moving average of the parameters (`train.average`).
    edits: True to apply the edits in the folder (`Run.save_edits`, `hbf edit`).
    learned: True to add the learned classes in the folder (`Run.save_learned`, `hbf learn`).
    device: the device to compute on. None: the first one.

  Raises:
    ValueError: the folder is not a run folder or has no such checkpoint. Or edits or learned classes are asked for,
      and the folder has none that were made for this checkpoint.
  """
  if device is not None and not isinstance(device, jax.Device):
    raise UserError(f"device is {device!r}: expected a device, such as jax.devices('cpu')[0]")
  folder, where = local_copy(_address(workdir)), jax.devices()[0] if device is None else device
  restored = restore(folder, str(checkpoint), [where], average, stored_data(folder))
  run = Run(folder, restored.config, restored.model, restored.params, restored.step, restored.task, average, where)
  run = run.with_edits(edits_of(folder, restored.step, average)) if edits else run
  return run.with_learned(learned_of(folder, restored.step, average)) if learned else run


def load_pretrained(name: str, *, device: jax.Device | None = None) -> 'Run':
  """Load a trained model that comes with the package. The first call makes its run folder in the user's cache.

  The command `hbf pretrained` lists the names. `hbf explain` and other commands accept the run folder, which is the
  attribute `workdir` of the returned run.

  Args:
    name: a name such as 'laptop-cifar10-hyperbf'.
    device: the device to compute on. None: the first one.

  Raises:
    ValueError: there is no such model. The message suggests the nearest name.
  """
  with quiet():
    return load(pretrained.unpack(name), device=device)


def edit(
  run: 'Run',
  examples: Any,
  answers: Sequence[str | int],
  *,
  among: Any = None,
  reach: float = REACH,
  margin: float | None = None,
) -> 'Run':
  """Correct a model's answers for single examples by additional centers. Nothing is trained.

  An example is an image, or a prompt for a run of task next_token. The edit of an image has one center, and the edit
  of a prompt has one for each token of the answer. A center changes the logits of all examples whose points lie in a
  ball around it, such as crops of the corrected image. `hbf.editing.editor.Editor` describes the computation, and
  docs/how-to/edit.md has examples. Nothing is written to disk until you call `Run.save_edits`.

  Args:
    run: a run of task classification or next_token. It is not changed.
    examples: images [N, H, W, C] of the run's height, width and channels: uint8, or floats from 0 to 1. Or N prompts,
      for a run of task next_token.
    answers: name or index of the right class of each image, [N]. Or the text that should follow each prompt.
    among: images whose answers should not change, in the same form as `examples`. None: some 20,000 training images.
      Each call of this function then reads them, which takes a minute or less on a CPU. A run on arrays in memory
      needs `among`, such as its `x_train`. With prompts, `among` must be None: the answers that should not change are
      the next tokens at up to 20,000 positions of the training text.
    reach: radius of a center's ball, divided by a distance. The distance is from the center to the nearest image of
      `among` (or position of the training text) whose answer is not the new one. With a reach of at most 1, the ball
      contains no such image or position.
    margin: difference between the new answer's logit and the largest other logit, after the edit. None: 16 for
      images, 4 for prompts.

  Returns:
    The edited run. An image gets no edit if the edit of an earlier image in `examples` already corrects it. The
    method `undo` removes the last edit.

  Raises:
    ValueError: an image has a wrong shape, a class is unknown, a prompt is empty or too long, or the model already
      gives the right answer. Or `reach` or `margin` is not positive. Or the example already has an edit. Or the run
      has learned classes, or is a language model without centers in stage 2 of its last block.
  """
  _check_run(run)
  is_text = run.config.task == 'next_token'
  if margin is None:
    margin = text_edits.MARGIN if is_text else image_edits.MARGIN
  check_options(reach, margin)  # before the training data are read
  if is_text:
    counts = _count(examples), _count(answers)
    if None in counts or counts[0] != counts[1] or among is not None:
      raise UserError('expected a list of prompts, a list of as many answers, and no images')
    if wrong := [text for text in (*examples, *answers) if not isinstance(text, str)]:
      raise UserError(f'prompts and answers have {wrong[0]!r}: expected texts')
    return _edit_texts(run, examples, answers, reach, margin)
  run._check_classifies('hbf.edit')
  checked = run._checked(examples)
  _check_one_each('answers', answers, checked)
  run._check_no_learned()
  for answer in answers:
    class_number(answer, run.classes)  # before the training images are read
  if among is None:
    run._check_stored('hbf.edit', 'among=x_train')
  kept = guarded_images(run.workdir, run.config) if among is None else run._checked(among, 'among')
  model, params = unedited(run.model, run.params)
  reader = Reader.of(model, params, run.task)
  edits = no_edits(reader, run.config, run.step, run.average, kept) if run.edits is None else run.edits
  editor = ImageEditor(reader, run.classes, kept, edits)
  sources = [f'image {number}' for number in range(len(checked))]
  editor.edit(checked, answers, sources, reach, margin)
  return run.with_edits(editor.edits)


def _edit_texts(run: 'Run', prompts: Sequence[str], answers: Sequence[Any], reach: float, margin: float) -> 'Run':
  model, params = unedited(run.model, run.params)
  assert isinstance(model, LanguageModel)
  text, about = text_edits.training_text(run.workdir, run.config), (run.step, run.average)
  editor = text_edits.TextEditor(model, params, run.task.dataset.tokenizer, text, run.edits, about)
  for prompt, answer in zip(prompts, answers, strict=True):
    editor.edit(prompt, answer, reach, margin)
  return run.with_edits(editor.edits)


def learn(run: 'Run', images: Any, labels: Sequence[str], *, among: tuple[Any, Sequence[int]] | None = None) -> 'Run':
  """Add classes to a classifier from a few images each. Nothing is trained.

  The features of an image are the input of the network's head. The center of a class is the mean of the features of
  its images. An image gets a new class, instead of the trained class that the classifier answers, if its features are
  nearer to the new class's center than to the trained class's center.
  `hbf.models.extended.ExtendedClassifier` has the equations, and docs/how-to/learn.md has examples. Nothing is
  written to disk until you call `Run.save_learned`.

  Args:
    run: a run of task classification, without edits. It is not changed.
    images: images of the new classes [N, H, W, C], of the run's height, width and channels: uint8, or floats from 0
      to 1.
    labels: the name of the class of each image, [N].
    among: a pair: n images of the trained classes, in the form of `images`, and the index of each image's class, [n].
      Each trained class needs at least two images. None: some 20,000 training images. The first call for a run then
      reads these images, which takes a minute or less on a CPU. A run on arrays in memory needs `among`, such as its
      `(x_train, y_train)`.

  Returns:
    The run with the new classes. Its `predict` returns the probabilities of trained classes and then of new classes.

  Raises:
    ValueError: an image has a wrong shape, a label is not a text, a class exists already, or the run has edits. Or
      `among` is no pair of images and classes.
  """
  _check_run(run)
  run._check_classifies('hbf.learn')
  checked = run._checked(images)
  _check_one_each('labels', labels, checked)
  run._check_no_edits()
  model, params = unextended(run.model, run.params)
  reader, trained, learned = Reader.of(model, params, run.task), run._images.class_names, run.learned
  check_names(labels, trained, learned)
  given = None if among is None else run._labeled('among', among)
  if learned is None:
    if given is None:
      run._check_stored('hbf.learn', 'among=(x_train, y_train)')
    known = given or labeled_images(run.workdir, run.config)
    learned = nothing_learned(reader, *known, trained, run.step, run.average)
  sources = [f'image {number}' for number in range(len(checked))]
  return run.with_learned(learn_images(reader, learned, checked, labels, sources))


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
  """A trained model, as `load` returns it.

  Attributes:
    workdir: the run folder.
    config: the config of the run, in which every key has a value.
    model: the network, a Flax module: `run.model.apply({'params': run.params}, run.normalize(images), train=False)`.
    params: the parameters.
    step: the step of the checkpoint.
    task: the task of the run, an `hbf.tasks.task.Task`.
    average: True if `params` is the moving average of the trained parameters (`train.average`).
    device: the device that holds the parameters.
    edits: the edits that `model` and `params` contain (`hbf.edit`). None: the run has no edits.
    learned: the learned classes that `model` and `params` contain (`hbf.learn`). None: the run has none.
  """

  workdir: pathlib.Path
  config: ConfigDict
  model: nn.Module
  params: Mapping[str, Any]
  step: int
  task: Any
  average: bool
  device: jax.Device
  edits: Edits | None = None
  learned: Learned | None = None

  def __repr__(self) -> str:
    return f'Run({str(self.workdir)!r}, model={self.config.model.name!r}, step={self.step})'

  @property
  def classes(self) -> tuple[str, ...]:
    """The names of the classes, learned classes last. For task multi_label, the names of the labels.

    For task regression, the names of the values.
    """
    return (*self._images.class_names, *(self.learned.names if self.learned else ()))

  def predict(self, images: Any, batch_size: int = 100) -> np.ndarray:
    """Return probabilities, float32 [N, K], of N images and the K `classes`.

    For task multi_label they are the probabilities of the K labels. For task regression, the result has the K
    predicted values of each image.

    Args:
      images: images [N, H, W, C] of the run's height, width and channels, as uint8 or as floats from 0 to 1.
      batch_size: the largest number of images in a batch.

    Raises:
      ValueError: the images have another shape, type or range, or the run is not on images.
    """
    whole(1).check('batch_size', batch_size)
    checked = self._checked(images)

    def outputs(batch: np.ndarray) -> jax.Array:
      return self._outputs(self.params, jax.device_put(batch, self.device))

    found = in_batches(outputs, checked, min(batch_size, len(checked)))
    return np.asarray(self.task.answers.numbers(np.asarray(found, np.float64)), np.float32)

  def normalize(self, images: Any) -> jax.Array:
    """Return normalized float32 images [N, H, W, C] for the model. See `predict` for the argument and the errors."""
    return normalize(jax.device_put(self._checked(images), self.device), self.task.mean, self.task.std)

  def generate(
    self,
    prompts: Sequence[str],
    count: int = 200,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: str = '',
  ) -> list[str]:
    """Continue texts with a model of task next_token. The returned texts do not contain the prompts.

    Args:
      prompts: texts to continue, of at least one token each.
      count: the largest number of tokens to write for each prompt.
      temperature: divisor of the logits. 0: always the likeliest token.
      top_k: draw from the k likeliest tokens only. 0: from all tokens.
      top_p: draw from the smallest set of likeliest tokens whose probabilities sum to at least this value.
      seed: the seed of the random draws.
      stop: a text of one token. When the model draws this token, the text ends before it. '': no token ends the text.

    Raises:
      ValueError: the run has another task. Or a prompt is empty, too long, or has characters that the vocabulary
        lacks.
    """
    check_task(self.workdir, self.config.task)
    if isinstance(prompts, str):
      raise UserError('prompts is one text: expected a list of texts')
    sampling, tokenizer = Sampling(temperature, top_k, top_p), self.task.dataset.tokenizer
    return continue_texts(self.model, self.params, tokenizer, prompts, count, sampling, seed, stop)

  def evaluate(self, split: str = 'test', data: ArrayData | None = None) -> dict[str, Any]:
    """Evaluate a split, with the checkpoint and the edits of this run.

    The arguments and the result are as in `hbf.evaluate`.

    Raises:
      ValueError: the run has classes that were added by `learn`. The splits have no images of them.
    """
    if self.learned:
      raise UserError('the run has learned classes, of which the data set has no images: call predict on your own')
    edits = self.edits or False
    return evaluate(
      self.workdir, split, self.step, data=data, average=self.average, edits=edits, devices=[self.device]
    )

  def with_edits(self, edits: Edits | None) -> 'Run':
    """Return a copy of the run that has these edits instead of its own. None: the copy has no edits.

    Raises:
      ValueError: the edits were made for another checkpoint, or the run has learned classes.
    """
    model, params = unedited(self.model, self.params)
    if edits:
      self._check_no_learned()
      check_checkpoint('edits', edits, self.step, self.average)
      model, params = edits.applied(model, params)
    return dataclasses.replace(self, model=model, params=params, edits=edits or None)

  def undo(self, number: int = -1) -> 'Run':
    """Return a copy of the run without one edit.

    The other edits keep their centers, their radii and their corrections.

    Args:
      number: the index of the edit. −1: the last edit.

    Raises:
      ValueError: there is no such edit.
    """
    if self.edits is None:
      raise UserError(f'the run has no edit {number}: make one by hbf.edit, or load the run with edits=True')
    return self.with_edits(self.edits.without(number if number != -1 else len(self.edits) - 1))

  def save_edits(self) -> None:
    """Write the edits to the file edits.npz in the run folder, in place of the edits that the file has.

    `hbf.load(workdir, edits=True)`, `hbf predict --edits` and `hbf eval --edits` read this file. If the run has no
    edits, the file is removed.

    Raises:
      ValueError: the folder can't be written, or another process uses it, such as a training run. Or the
        folder has learned classes.
    """
    with locked(self.workdir):
      write_edits(self.workdir, self.edits)

  def with_learned(self, learned: Learned | None) -> 'Run':
    """Return a copy of the run that has these learned classes instead of its own. None: the copy has none.

    Raises:
      ValueError: the classes were learned for another checkpoint, or the run has edits.
    """
    model, params = unextended(self.model, self.params)
    if learned:
      self._check_no_edits()
      check_checkpoint('learned classes', learned, self.step, self.average)
      model, params = learned.applied(model, params)
    return dataclasses.replace(self, model=model, params=params, learned=learned or None)

  def forget(self, name: str) -> 'Run':
    """Return a copy of the run without one learned class. The other classes stay as they are.

    Raises:
      ValueError: there is no learned class of this name.
    """
    if self.learned is None:
      raise UserError(f'the run has no learned class {name}: add classes by hbf.learn, or load with learned=True')
    return self.with_learned(self.learned.without(name))

  def save_learned(self) -> None:
    """Write the learned classes to the file learned.npz in the run folder, in place of the classes that the file has.

    `hbf.load(workdir, learned=True)` and `hbf predict` read this file. If the run has no learned classes, the file is
    removed.

    Raises:
      ValueError: the folder can't be written, or another process uses it, such as a training run. Or the
        folder has edits.
    """
    with locked(self.workdir):
      write_learned(self.workdir, self.learned)

  @property
  def _images(self) -> Dataset:
    """The data set of the run without its images: names of the classes, shape of the images and other facts.

    Raise UserError if the run is not on images.
    """
    if not on_images(self.config.task):
      raise UserError(f'{self.workdir} holds a run of task {self.config.task}: expected one on images')
    return self.task.dataset

  def _check_classifies(self, what: str) -> None:
    if self.config.task != 'classification':
      raise UserError(
        f'{what} needs classes, and the run in {self.workdir} has task {self.config.task}: give a run of task '
        'classification'
      )

  def _check_no_learned(self) -> None:
    if self.learned:
      raise UserError('the run has learned classes, which edits can not join yet: load the run without them')

  def _check_no_edits(self) -> None:
    if self.edits:
      raise UserError('the run has edits, which learned classes can not join yet: load the run without edits')

  def _check_stored(self, what: str, remedy: str) -> None:
    if self.config.data.name == NAME:
      raise UserError(f'{what} needs training images, and {self.workdir} does not hold them: give {remedy}')

  def _labeled(self, name: str, pair: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return images of trained classes, and the class of each, int64 [n]. Raise UserError if the pair is not that."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
      raise UserError(f'{name} is a {type(pair).__name__}: expected a pair, (images, the class of each image)')
    images, numbers = self._checked(pair[0], f'{name}[0]'), whole(0, len(self._images.classes) - 1)
    _check_one_each(f'{name}[1]', pair[1], images)
    for label in (labels := np.asarray(pair[1]).tolist()):
      numbers.check(f'a class in {name}[1]', label)
    return images, np.array(labels)

  def _checked(self, images: Any, name: str = 'images') -> np.ndarray:
    return to_images(name, images, self._images.image_shape, 'as in training')

  @functools.cached_property
  def _outputs(self) -> Callable[[Any, jax.Array], jax.Array]:
    mean, std, about = self.task.mean, self.task.std, self.task.about()

    def outputs(params: Any, images: jax.Array) -> jax.Array:
      logits = self.model.apply({'params': params}, normalize(images, mean, std), train=False)
      return jnp.asarray(self.task.outputs(jnp.asarray(logits, jnp.float32), about))

    return jax.jit(outputs)


def _address(workdir: Any) -> str | os.PathLike[str]:
  """Return the argument. Raise UserError unless it is the path of a run folder or its address on a bucket."""
  if not isinstance(workdir, str | os.PathLike) or not str(workdir):
    raise UserError(f'workdir is {workdir!r}: expected a folder, such as "runs/c10"')
  return workdir


def _devices(devices: Any) -> list[jax.Device] | None:
  """Return the devices as a list, and None as None. Raise UserError unless there are devices, all different."""
  if devices is None:
    return None
  listed = [*devices] if isinstance(devices, Iterable) else []
  if not listed or not all(isinstance(device, jax.Device) for device in listed) or len({*listed}) < len(listed):
    raise UserError(f'devices is {devices!r}: expected a list of different devices, such as jax.devices()[:1]')
  return listed


def _check_run(run: Any) -> None:
  if not isinstance(run, Run):
    raise UserError(f"run is {run!r}: expected a loaded run, such as hbf.load('runs/c10')")


def _count(values: Any) -> int | None:
  """Return the number of entries of a list or an array. None for a text, and for what has no entries in order."""
  try:
    return None if isinstance(values, str | bytes | Set | Mapping) else len(values)
  except TypeError:
    return None


def _check_one_each(name: str, values: Any, images: np.ndarray) -> None:
  """Raise UserError unless the argument `name` has an entry for each image."""
  count = _count(values)
  if count is None:
    raise UserError(f'{name} is {values!r}: expected a list with an entry for each image')
  if count != len(images):
    raise UserError(f'{name} has {count} entries for {len(images)} images: expected one for each image')


def _dataset(data: Any) -> Dataset | None:
  """Return a user's arrays as a data set. None if there are no arrays."""
  if data is not None and not isinstance(data, ArrayData):
    raise UserError(f'data is a {type(data).__name__}: expected hbf.ArrayData(x_train, y_train, x_test, y_test)')
  return None if data is None else from_arrays(data)


def _check_on_images(config: ConfigDict, what: str) -> None:
  if not on_images(config.task):
    raise UserError(f'{what} is for task {config.task}, and data holds images: expected a task on images')


def _of_arrays(config: ConfigDict) -> ConfigDict:
  """Return a copy of a config in which the data set is the user's own arrays.

  Raise UserError if the config's task is not on images.
  """
  _check_on_images(config, 'config')
  changed = config.copy_and_resolve_references()
  changed.data.update(name=NAME, image_size=0)
  return changed
