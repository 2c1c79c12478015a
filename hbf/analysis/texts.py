"""Meaning of the centers of a language model: the contexts to which they respond, and the tokens that they favor.

The excess logit of a token is its logit minus the mean over the vocabulary. A vote is the contribution of a center of
the last block to the excess logit of a next token (`votes`).
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from hbf.analysis.capture import by_token
from hbf.analysis.interventions import Mean
from hbf.analysis.restored_run import RestoredRun
from hbf.analysis.unit_params import directions, last_block, silence
from hbf.data.text.tokenizers import Tokenizer
from hbf.editing.places import BATCH, spaced_windows
from hbf.errors import UserError
from hbf.evaluation.batches import in_batches
from hbf.models.build import unrolled
from hbf.models.language import LanguageModel
from hbf.nn.block import Block
from hbf.tasks.language import NextToken
from hbf.training.experiment import make_splits
from hbf.training.workdir import load_config


@dataclasses.dataclass(frozen=True)
class TextRun(RestoredRun):
  """The language model of a run of task next_token at a checkpoint, and the texts of the run."""

  @classmethod
  def check(cls, workdir: pathlib.Path) -> None:
    """Raise `UserError` unless the run is of task next_token."""
    if (task := load_config(workdir).task) != 'next_token':
      raise UserError(f'{workdir} holds a run of task {task}: give a run of task next_token')

  @property
  def task(self) -> NextToken:
    """The task of the run."""
    assert isinstance(self.restored.task, NextToken)
    return self.restored.task

  @property
  def model(self) -> LanguageModel:
    """The network."""
    assert isinstance(self.restored.model, LanguageModel)
    return self.restored.model

  @property
  def tokenizer(self) -> Tokenizer:
    """The tokenizer of the texts."""
    return self.task.dataset.tokenizer

  def windows(self, split: str, most: int) -> np.ndarray:
    """Return n ≤ `most` windows of T tokens, evenly spaced in a split, int32 [n, T + 1].

    The last column is the token after the window, which is only a target.

    Raises:
      UserError: the split is shorter than one window.
    """
    text = make_splits(self.task, self.restored.config.data.validation)[split].tokens
    try:
      return spaced_windows(text, self.task.length, most)
    except UserError as error:
      raise UserError(f'split {split}: {error}') from None

  def shown(self, tokens: Sequence[int]) -> str:
    """Return tokens as a text with visible line breaks and tabs."""
    text = self.tokenizer.decode(list(tokens)).decode(errors='replace')
    return text.replace('\n', '⏎').replace('\t', '⇥')

  def observe(self, windows: np.ndarray, params: Any = None) -> 'Observed':
    """Run the network on windows [n, T + 1]. The last token of a window is not an input.

    Args:
      windows: the result of `windows`.
      params: parameters to use in place of the run's.
    """
    params = self.params if params is None else params
    return Observed(*in_batches(lambda batch: _observe(self.model, params, batch[:, :-1]), windows, BATCH))

  def responses(self, windows: np.ndarray) -> dict[str, np.ndarray]:
    """Return `Observed.responses` for windows [n, T + 1], without the memory that the logits take."""
    found: dict[str, np.ndarray] = in_batches(
      lambda batch: _observe(self.model, self.params, batch[:, :-1])[2], windows, BATCH
    )
    return found

  def losses(self, windows: np.ndarray, params: Any = None) -> np.ndarray:
    """Return the negative log-likelihoods of all next tokens, float64 [n, T] in nats.

    Args:
      windows: the result of `windows`.
      params: parameters to use in place of the run's.
    """
    return nll(self.observe(windows, params).logits, windows)


class Observed(NamedTuple):
  """Arrays that a model computes from n windows of T tokens.

  Attributes:
    logits: logits of the next token, [n, T, V].
    tokens: tokens after the last block, [n, T, D].
    responses: by block, the responses R in the sum Σ R c that stage 2 computes, [n, T, U]. U is the number of centers
      of all heads.
  """

  logits: np.ndarray
  tokens: np.ndarray
  responses: dict[str, np.ndarray]


@functools.partial(jax.jit, static_argnums=0)
def _observe(model: LanguageModel, params: Any, tokens: jax.Array) -> tuple[Any, Any, Any]:
  last, found = last_block(model), []

  def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    out = call(*args, **kwargs)
    if context.method_name == '__call__' and isinstance(context.module, Block) and context.module.name == last:
      found.append(out)
    return out

  with nn.intercept_methods(intercept):
    logits, sown = unrolled(model).apply({'params': params}, tokens, train=False, mutable=['responses'])
  responses = {
    block: by_token(kept['stage2']['responses'][0], tokens.shape)
    for block, kept in sown.get('responses', {}).items()
    if 'stage2' in kept
  }
  return logits, found[0].astype(jnp.float32), responses


def nll(logits: np.ndarray, windows: np.ndarray) -> np.ndarray:
  """Return the negative log-likelihoods of all next tokens, float64 [n, T] in nats.

  Args:
    logits: logits of the next token, [n, T, V].
    windows: windows of text, int32 [n, T + 1].
  """
  log_p = special.log_softmax(logits.astype(np.float64), axis=-1)
  return np.asarray(-np.take_along_axis(log_p, windows[:, 1:, None], axis=-1)[..., 0])


class Place(NamedTuple):
  """The position of a token: the index of its window, and the index of the token in this window."""

  window: int
  token: int


def top_places(responses: np.ndarray, count: int) -> list[list[Place]]:
  """Return a list for each center: the places of the tokens to which it responds most, the greatest response first.

  A list has at most one token of each window.

  Args:
    responses: responses of U centers, [n, T, U].
    count: the length of each list. It is n if n is less than `count`.
  """
  best = responses.argmax(axis=1)  # [n, U]
  order = np.argsort(-responses.max(axis=1), axis=0, kind='stable')[:count]
  return [
    [Place(int(window), int(best[window, center])) for window in order[:, center]]
    for center in range(responses.shape[-1])
  ]


def context(run: TextRun, windows: np.ndarray, place: Place, before: int = 24) -> str:
  """Return the text of the token at a place, in brackets, after the text of at most `before` earlier tokens."""
  start = max(0, place.token - before)
  past = run.shown(windows[place.window, start : place.token].tolist())
  return f'{past}[{run.shown([windows[place.window, place.token]])}]'


def readout(run: TextRun, tokens: np.ndarray, classes: np.ndarray) -> np.ndarray:
  """Return the derivative [n, T, D] of a next token's excess logit with respect to the last block's output.

  The divisor of the final LayerNorm is treated as a constant.

  Args:
    run: the run.
    tokens: output of the last block, [n, T, D].
    classes: a possible next token for each position, as its index in the vocabulary, int [n, T].
  """
  params = run.params
  size = np.sqrt(tokens.astype(np.float64).var(axis=-1, keepdims=True) + run.model.trunk.norm_epsilon)
  through = writing(run)[classes] * np.asarray(params['norm']['scale'], np.float64)
  return np.asarray((through - through.mean(axis=-1, keepdims=True)) / size)


def writing(run: TextRun) -> np.ndarray:
  """Return the derivative [V, D] of each token's excess logit with respect to the final LayerNorm's output."""
  head = run.params['embedding']['embedding'] if run.model.tied else run.params['head']['kernel'].T
  directions = np.asarray(head, np.float64)
  return np.asarray(directions - directions.mean(axis=0))


def written(run: TextRun, block: str) -> np.ndarray:
  """Return how much a block's U units raise the excess logits of the V tokens for a response of 1, [U, V].

  The later blocks are skipped. The final LayerNorm does not divide by the standard deviation, because this differs
  between positions. So the result ranks the tokens for each unit, but its size has no meaning.
  """
  added = directions(run.params, block)
  centered = added - added.mean(axis=1, keepdims=True)
  return np.asarray(centered * np.asarray(run.params['norm']['scale'], np.float64) @ writing(run).T)


def votes(run: TextRun, seen: Observed, classes: np.ndarray) -> np.ndarray:
  """Return the votes [n, T, U]: contributions of the last block's centers to a next token's excess logit.

  The divisor of the final LayerNorm is treated as a constant.

  Args:
    run: the run.
    seen: the network's arrays for n windows.
    classes: a possible next token for each position, as its index in the vocabulary, int [n, T].

  Raises:
    UserError: stage 2 of the last block is not a HyperBF.
  """
  block = last_block(run.model)
  if block not in seen.responses:
    raise UserError('stage 2 of the last block is not a HyperBF, so it has no votes: give a run with stage 2 hyperbf')
  each = readout(run, seen.tokens, classes) @ directions(run.params, block).T
  return np.asarray(seen.responses[block] * each)


def loss_without(run: TextRun, windows: np.ndarray, losses: np.ndarray, block: str, units: Sequence[int]) -> Mean:
  """Silence several units of a block together. Return the mean change of the loss, in nats per token.

  The confidence interval of the mean is over the windows.

  Args:
    run: the run.
    windows: windows of text, int32 [n, T + 1].
    losses: the negative log-likelihoods of all next tokens without any silenced unit, [n, T] (`nll`).
    block: name of the block.
    units: indices of the units to silence.
  """
  without = run.losses(windows, silence(run.params, block, units))
  return Mean.of((without - losses).mean(axis=1))
