"""Texts that a run's model writes."""

import pathlib
from collections.abc import Sequence

from hbf.data.text.texts import Texts
from hbf.data.text.tokenizers import Tokenizer, read_tokenizer
from hbf.errors import UserError
from hbf.models.generation import Sampling, generate_on
from hbf.models.language import LanguageModel
from hbf.training.evaluate import restore
from hbf.training.workdir import load_config, read_data


def write_texts(
  workdir: pathlib.Path,
  prompts: Sequence[str],
  count: int,
  sampling: Sampling,
  seed: int = 0,
  stop: str = '',
  checkpoint: str = 'latest',
  average: bool = False,
) -> list[str]:
  """Goes on with prompts. The text that the run was trained on needn't be there.

  Args:
    workdir: of a run of task next_token.
    prompts: texts of at least one token each.
    count: most tokens to write for each; where model and prompt are full, see `generate_on`.
    sampling: how tokens are drawn.
    seed: of what is drawn.
    stop: a text of one token that ends a text, and isn't part of it; '': none does.
    checkpoint: 'latest', 'best' or a step.
    average: whether the moving average of the parameters writes.

  Returns:
    What follows each prompt.

  Raises:
    UserError: the run is of another task, or has no such checkpoint; a prompt is empty, too long or has characters
      that the vocabulary lacks.
  """
  if (task := load_config(workdir).task) != 'next_token':
    raise UserError(f'{workdir} holds a run of task {task}: give one of next_token, which can go on with a text')
  about = read_data(workdir, 'name', 'tokenizer')
  if about is None:
    raise UserError(f'{workdir} has no data.json, which says what the tokens are: restore it from a copy')
  tokenizer = read_tokenizer(about['tokenizer'])
  restored = restore(workdir, checkpoint, average=average, dataset=Texts(about['name'], tokenizer, {}))
  assert isinstance(restored.model, LanguageModel)
  tokens = [tokenizer.encode(prompt.encode()).tolist() for prompt in prompts]
  end = _token(tokenizer, stop) if stop else None
  written = generate_on(restored.model, {'params': restored.params}, tokens, count, sampling, seed, end)
  return [tokenizer.decode(text.tolist()).decode(errors='replace') for text in written]


def _token(tokenizer: Tokenizer, text: str) -> int:
  tokens = tokenizer.encode(text.encode())
  if len(tokens) != 1:
    raise UserError(f'--stop={text!r} is {len(tokens)} tokens: expected a text of one')
  return int(tokens[0])
