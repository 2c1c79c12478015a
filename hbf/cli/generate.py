"""Goes on with texts, by the model of a run on texts.

python -m hbf generate --workdir=runs/text --prompt='The ' --count=200 --temperature=0.8 --top_k=40
"""

import json
import pathlib
from collections.abc import Sequence

from absl import flags

from hbf import cli
from hbf.errors import UserError
from hbf.models.generation import Sampling
from hbf.training.machine import keep_compiled_programs, keep_freed_memory

WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.', required=True)
PROMPTS = flags.DEFINE_multi_string('prompt', [], 'What to go on with; give several for several texts.')
COUNT = flags.DEFINE_integer('count', 200, 'Most tokens to write.')
TEMPERATURE = flags.DEFINE_float('temperature', 1.0, 'Below 1: likely tokens become likelier; 0: the likeliest only.')
TOP_K = flags.DEFINE_integer('top_k', 0, 'Only the k likeliest tokens are drawn; 0: all.')
TOP_P = flags.DEFINE_float('top_p', 1.0, 'Only the likeliest tokens are drawn that have this probability together.')
SEED = flags.DEFINE_integer('seed', 0, 'Of what is drawn.')
STOP = flags.DEFINE_string('stop', '', 'A token that ends a text, such as a line break.')
CHECKPOINT = flags.DEFINE_string('checkpoint', 'latest', 'latest, best (by held-out token_nll) or a step.')
AVERAGE = flags.DEFINE_boolean('average', False, 'Write with the moving average of the parameters (train.average).')
JSON = flags.DEFINE_boolean('json', False, 'Print a JSON list of {prompt, text}.')


def main(argv: Sequence[str]) -> int:
  """Writes and prints."""
  del argv
  keep_freed_memory()
  keep_compiled_programs()
  from hbf.training.generate import write_texts

  if not PROMPTS.value:
    raise UserError("nothing to go on with: give a --prompt='…'")
  texts = write_texts(
    pathlib.Path(WORKDIR.value).expanduser(),
    PROMPTS.value,
    COUNT.value,
    Sampling(TEMPERATURE.value, TOP_K.value, TOP_P.value),
    SEED.value,
    STOP.value,
    CHECKPOINT.value,
    AVERAGE.value,
  )
  if JSON.value:
    print(json.dumps([{'prompt': prompt, 'text': text} for prompt, text in zip(PROMPTS.value, texts, strict=True)]))
  else:
    print('\n---\n'.join(prompt + text for prompt, text in zip(PROMPTS.value, texts, strict=True)))
  return 0


if __name__ == '__main__':
  cli.run(main)
