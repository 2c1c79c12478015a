"""Continue texts with the model of a run on texts.

hbf generate --workdir=runs/text --prompt='The ' --count=200 --temperature=0.8 --top_k=40
"""

import json
from collections.abc import Sequence

from absl import flags

from hbf import cli
from hbf.errors import UserError

WORKDIR = cli.define_workdir()
PROMPTS = flags.DEFINE_multi_string('prompt', [], 'A text to continue. The flag may be repeated.')
COUNT = flags.DEFINE_integer('count', 200, 'The largest number of tokens to write.', lower_bound=1)
TEMPERATURE = flags.DEFINE_float(
  'temperature', 1.0, 'Below 1: likely tokens become likelier. 0: only the likeliest token.'
)
TOP_K = flags.DEFINE_integer('top_k', 0, 'Draw only from the k likeliest tokens. 0: from all.')
TOP_P = flags.DEFINE_float('top_p', 1.0, 'Draw only from the likeliest tokens whose probabilities sum to this.')
SEED = flags.DEFINE_integer('seed', 0, 'Seed of the draws.')
STOP = flags.DEFINE_string('stop', '', 'A token that ends a text, such as a line break.')
CHECKPOINT, AVERAGE = cli.define_checkpoint('Write with')
EDITS = flags.DEFINE_boolean('edits', False, "Apply the run's edits (hbf edit).")
JSON = flags.DEFINE_boolean('json', False, 'Print a JSON list of {prompt, text}.')


def main(argv: Sequence[str]) -> int:
  """Continue the prompts, print the texts, and return the exit status."""
  del argv
  if not PROMPTS.value:
    raise UserError("no text to continue: give --prompt='…'")
  from hbf.markdown import printable
  from hbf.models.generation import Sampling
  from hbf.training.machine import keep_compiled_programs, keep_freed_memory

  keep_freed_memory()
  keep_compiled_programs()
  from hbf.training.edits_file import warn_of_edits
  from hbf.training.generate import write_texts
  from hbf.training.mirror import local_copy

  workdir = local_copy(WORKDIR.value)
  texts = write_texts(
    workdir,
    PROMPTS.value,
    COUNT.value,
    Sampling(TEMPERATURE.value, TOP_K.value, TOP_P.value),
    SEED.value,
    STOP.value,
    CHECKPOINT.value,
    AVERAGE.value,
    EDITS.value,
  )
  warn_of_edits(workdir, EDITS.value)
  if JSON.value:
    print(json.dumps([{'prompt': prompt, 'text': text} for prompt, text in zip(PROMPTS.value, texts, strict=True)]))
  else:
    print('\n---\n'.join(printable(prompt) + text for prompt, text in zip(PROMPTS.value, texts, strict=True)))
  return 0


if __name__ == '__main__':
  cli.run(main)
