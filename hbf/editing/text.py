"""Edits of a language model. An edit makes the model continue a prompt by an answer, with a center for each token."""

import pathlib
from typing import Any

import jax
import numpy as np

from hbf.data.text.tokenizers import Tokenizer
from hbf.editing.editor import (
  GUARDED,
  REACH,
  Editor,
  Made,
  check_options,
  check_task,
  edited_answers,
  record,
  task_with_data,
)
from hbf.editing.guard import metric_of
from hbf.editing.places import Passages, Places, points_of_copies, read, spaced_windows
from hbf.errors import UserError
from hbf.models.edited import LAST
from hbf.models.language import LanguageModel
from hbf.training.edits import Edits
from hbf.training.edits_file import edits_if_any
from hbf.training.experiment import make_splits
from hbf.training.restore import restore, stored_texts
from hbf.training.workdir import load_config, locked

MARGIN = 4.0  # docs/research/edit.md has the trials that chose it


class TextEditor(Editor):
  """The editor of a language model of task next_token.

  For each token of the answer, an edit has an example and a center. The example is the text before this token: the
  prompt, and the tokens of the answer so far. The center is the input of the last block's stage 2 at the last token
  of this text (`hbf.models.edited.EditedLanguageModel`). The guarded examples are places of the training text:
  positions at which the model predicts the next token.

  Attributes:
    model: the model without edits.
    params: its parameters.
    tokenizer: the tokenizer of the run.
  """

  kind = 'text'
  overlap = '{source!r} with its answer overlaps edit {number}, which answers {label!r}'

  def __init__(
    self,
    model: LanguageModel,
    params: Any,
    tokenizer: Tokenizer,
    text: np.ndarray,
    edits: Edits | None,
    about: tuple[int, bool],
  ) -> None:
    """Compute the logits and the points of the guarded examples.

    Args:
      model: the model without edits.
      params: its parameters.
      tokenizer: the tokenizer of the run.
      text: the tokens of the training text, int [L].
      edits: the edits made so far. None: there are none. Then the metric of the points is computed from passages of
        `text`.
      about: the attributes `step` and `average` of the edits: the step of the checkpoint, and True if the parameters
        are the moving average.

    Raises:
      UserError: stage 2 of the last block has no centers, or the text is too short.
    """
    check_centers(model, params)
    windows = spaced_windows(text, model.length, max(1, GUARDED // model.length))
    if edits is None:
      copies = points_of_copies(model, params, passages_of(text, tokenizer, model.length))
      edits = Edits(*about, metric_of(copies[LAST]))
    super().__init__(read(model, params, Places.everywhere(windows))[LAST], edits)
    self.model, self.params, self.tokenizer = model, params, tokenizer

  def edit(self, prompt: str, answer: str, reach: float = REACH, margin: float = MARGIN) -> None:
    """Add an edit, after which the likeliest continuation of a prompt is the answer.

    Args:
      prompt: a text of at least one token.
      answer: the text that should follow directly.
      reach: radius of each center's ball, divided by the distance from the center to the nearest guarded example with
        another answer.
      margin: difference between the right next token's logit and the largest other logit, after the edit. It is the
        same for each token of the answer.

    Raises:
      UserError: prompt or answer is empty, too long, or has characters that the vocabulary lacks. Or the model
        already writes the answer. Or an earlier edit has a center at a point of this edit. Or the model predicts the
        same token at all guarded places, and this token is in the answer. Or the points of the answer's tokens are
        too much alike to tell the tokens apart. In these cases, no edit is made.
    """
    tokens, wanted = encode(self.tokenizer, prompt, answer, self.model.length)
    seen = read(self.model, self.params, Places.of([(tokens, wanted)], self.model.length))[LAST]
    if np.array_equal(edited_answers(seen, self.edits), wanted):
      raise UserError(f'{prompt!r} is continued by {answer!r} already: there is nothing to edit')
    names = prompt, self._continued(tokens, len(wanted)), answer
    edits = self._with_edit(self.edits, names, seen, wanted, reach, margin)
    if not np.array_equal(edited_answers(seen, edits), wanted):
      raise UserError(f'the points of the model do not tell the tokens of {answer!r} apart: give a shorter answer')
    self.edits = edits

  def _continued(self, tokens: np.ndarray, count: int) -> str:
    """Return the greedy continuation of the prompt `tokens` by the edited model, a text of `count` tokens."""
    text = tokens
    for _ in range(count):
      end = Places.of([(text, text[:1])], self.model.length)
      text = np.append(text, edited_answers(read(self.model, self.params, end)[LAST], self.edits))
    return self.tokenizer.decode(text[len(tokens) :].tolist()).decode(errors='replace')


def passages_of(text: np.ndarray, tokenizer: Tokenizer, length: int, seed: int = 0) -> Passages:
  """Return random passages of the tokens [L] of a training text, to put before examples.

  An example and the passage before it fill a window of `length` tokens.
  """
  try:
    line_break = int(tokenizer.encode(b'\n')[0])
  except UserError:  # a vocabulary without line breaks
    line_break = -1
  return Passages(text, line_break, seed, length)


def encode(tokenizer: Tokenizer, prompt: str, answer: str, length: int) -> tuple[np.ndarray, np.ndarray]:
  """Return the tokens of a prompt and of its answer, int32 [a] and [b].

  Raises:
    UserError: the prompt or the answer is empty, or has characters that the vocabulary lacks. Or both together have
      more than `length` tokens.
  """
  found = []
  for name, text in (('prompt', prompt), ('answer', answer)):
    if not text:
      raise UserError(f'the {name} is empty: give a text of at least one token')
    try:
      found.append(tokenizer.encode_text(text))
    except UserError as error:
      raise UserError(f'{name} {text!r}: {error}') from error
  count = sum(map(len, found))
  if count > length:
    raise UserError(f'prompt and answer have {count} tokens: the model reads at most {length}, so shorten the prompt')
  return found[0], found[1]


def check_centers(model: LanguageModel, params: Any) -> None:
  """Raise UserError unless stage 2 of the last block has centers."""
  block = f'block{model.trunk.depth - 1}'
  if 'centers' not in params[block].get('stage2', {}):
    raise UserError(
      f'stage 2 of {block} has no centers, so none can be added: give a run whose stage 2 is hyperbf '
      '(--config=…:model=hyperbf)'
    )


def training_text(workdir: pathlib.Path, config: Any, **moved: str) -> np.ndarray:
  """Return the tokens of a run's training text, without the held-out part.

  Args:
    workdir: the run folder.
    config: the config of the run.
    **moved: see `hbf.editing.editor.task_with_data`.

  Raises:
    UserError: the text is missing, or differs from the run's.
  """
  task = task_with_data(workdir, config, **moved)
  return np.asarray(make_splits(task, config.data.validation)['train'].tokens)


def edit_text(
  workdir: pathlib.Path,
  prompt: str,
  answer: str,
  reach: float = REACH,
  margin: float = MARGIN,
  checkpoint: str = 'latest',
  average: bool = False,
  **moved: str,
) -> Made:
  """Make the model of a run continue a prompt by an answer, and write the edit into the run folder.

  Args:
    workdir: the run folder.
    prompt: a text.
    answer: the text that should follow directly.
    reach: see `TextEditor.edit`.
    margin: see `TextEditor.edit`.
    checkpoint: 'latest', 'best' or a step.
    average: True to edit the moving average of the parameters.
    **moved: see `hbf.editing.editor.task_with_data`.

  Raises:
    UserError: the run is not of task next_token, is in use, or has edits of another checkpoint. Or its text is
      missing. Or `reach` or `margin` is not positive. Or `TextEditor` or its method `edit` raises UserError. Nothing
      is written in these cases.
  """
  check_options(reach, margin)
  check_task(workdir, 'next_token')
  texts = stored_texts(workdir)
  encode(texts.tokenizer, prompt, answer, load_config(workdir).data.length)  # raises before the text is read
  with locked(workdir):
    restored = restore(workdir, checkpoint, jax.devices()[:1], average, texts)
    assert isinstance(restored.model, LanguageModel)
    check_centers(restored.model, restored.params)
    edits = edits_if_any(workdir, restored.step, average)
    text, about = training_text(workdir, restored.config, **moved), (restored.step, average)
    editor = TextEditor(restored.model, restored.params, texts.tokenizer, text, edits, about)
    return record(workdir, editor, lambda: editor.edit(prompt, answer, reach, margin))
