"""Generation of texts by the model of a run."""

import pathlib
from collections.abc import Sequence
from typing import Any

import flax.linen as nn

from hbf.config.defaults import LARGEST_SEED
from hbf.data.text.tokenizers import Tokenizer
from hbf.errors import UserError
from hbf.models.generation import Sampling, generate_on
from hbf.models.language import LanguageModel
from hbf.options import whole
from hbf.training.restore import restore, stored_texts, with_edits
from hbf.training.workdir import load_config


def write_texts(
  workdir: pathlib.Path,
  prompts: Sequence[str],
  count: int,
  sampling: Sampling,
  seed: int = 0,
  stop: str = '',
  checkpoint: str = 'latest',
  average: bool = False,
  edits: bool = False,
) -> list[str]:
  """Continue prompts. The training text is not needed.

  Args:
    workdir: the run folder of a run of task next_token.
    prompts: texts of at least one token each.
    count: the largest number of tokens to write for each prompt. A text may become longer than the model's window
      (`hbf.models.generation.generate_on`).
    sampling: the way to draw tokens.
    seed: the seed of the draws.
    stop: a text of one token. When the model draws this token, the text ends before it. '': no token ends the text.
    checkpoint: 'latest', 'best' or a step.
    average: True to use the moving average of the parameters.
    edits: True to apply the run's edits.

  Returns:
    The continuation of each prompt, without the prompt.

  Raises:
    UserError: the run has another task, no such checkpoint, or no edits of this checkpoint. Or a prompt is empty or
      too long, or has characters that are not in the vocabulary, or bytes that are not UTF-8.
  """
  check_task(workdir, load_config(workdir).task)
  texts = stored_texts(workdir)
  restored = restore(workdir, checkpoint, average=average, dataset=texts)
  if edits:
    restored = with_edits(restored, workdir, average)
  return continue_texts(restored.model, restored.params, texts.tokenizer, prompts, count, sampling, seed, stop)


def continue_texts(
  model: nn.Module,
  params: Any,
  tokenizer: Tokenizer,
  prompts: Sequence[str],
  count: int,
  sampling: Sampling,
  seed: int = 0,
  stop: str = '',
) -> list[str]:
  """Continue prompts with a model that is in memory. `write_texts` does the same with the model of a run folder.

  Args:
    model: the language model of a run.
    params: the parameters of the model.
    tokenizer: the tokenizer of the run.
    prompts: texts of at least one token each.
    count: the largest number of tokens to write for each prompt.
    sampling: the way to draw tokens.
    seed: the seed of the draws.
    stop: a text of one token that ends a text, see `write_texts`.

  Returns:
    The continuation of each prompt, without the prompt.
  """
  assert isinstance(model, LanguageModel)
  whole(0, LARGEST_SEED).check('seed', seed)
  tokens = [tokenizer.encode_text(prompt).tolist() for prompt in prompts]
  end = _token(tokenizer, stop) if stop else None
  written = generate_on(model, {'params': params}, tokens, count, sampling, seed, end)
  return [tokenizer.decode(text.tolist()).decode(errors='replace') for text in written]


def check_task(workdir: pathlib.Path, task: str) -> None:
  """Raise UserError unless `task`, the task of the run in `workdir`, is next_token."""
  if task != 'next_token':
    raise UserError(f'{workdir} holds a run of task {task}: give a run of task next_token, which can continue a text')


def _token(tokenizer: Tokenizer, text: str) -> int:
  tokens = tokenizer.encode_text(text)
  if len(tokens) != 1:
    raise UserError(f'stop={text!r} is {len(tokens)} tokens: expected a text of one token')
  return int(tokens[0])
