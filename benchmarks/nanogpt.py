"""Training speed of a GPT and of HyperBF against nanoGPT in PyTorch, and nanoGPT's loss on the whole held-out text.

git clone https://github.com/karpathy/nanoGPT; pip install torch
python -m benchmarks.nanogpt --nanogpt nanoGPT                    # steps, in one process and in turn
python -m benchmarks.nanogpt --checkpoint nanoGPT/out/ckpt.pt     # its loss on the held-out text

All take whole training steps (windows of a text, forward, cross-entropy, backward, clipping, AdamW) in float32, in
nanoGPT's sizes for a CPU: 4 blocks of width 128, 4 heads, windows of 64 characters, batches of 12. Our networks also
have relative positions, as recipe `characters` says. nanoGPT prints estimates from random windows. Here every
character of the held-out text counts once, with the earlier characters of its window as context. The same holds for
this library's models.
"""

import argparse
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from benchmarks import common
from configs import shakespeare
from hbf.config.recipes import make_text_config
from hbf.config.resolve import resolve
from hbf.data.text.texts import Texts
from hbf.data.text.tokenizers import Characters
from hbf.interop.nanogpt import load
from hbf.tasks.registry import make_task
from hbf.training.durations import Clock
from hbf.training.experiment import make_evaluator, make_objective, make_splits
from hbf.training.machine import keep_freed_memory
from hbf.training.optimizer import make_optimizer, make_schedule
from hbf.training.sharding import batch_sharding, make_mesh
from hbf.training.state import init_state, make_train_step

OURS = {'gpt': 'vit', 'hyperbf': 'hyperbf'}
CHARACTERS = Characters(''.join(map(chr, range(32, 97))))  # as many as in tiny Shakespeare
STEPS = 20  # steps of a round


def our_steps(name: str, tokens: np.ndarray) -> common.Thunk:
  """Return a function that takes `STEPS` train steps of a model with recipe characters."""
  config = resolve(make_text_config(f'model={name}', {'name': 'random'}))
  if name == 'vit':
    config.model.stage2.activation = 'gelu_erf'  # as in PyTorch
  task = make_task(config, Texts('random', CHARACTERS, {'train': tokens, 'test': tokens}))
  model, batch_size = task.make_model(config.model), config.train.batch_size
  optimizer = make_optimizer(config.optimizer, make_schedule(config.optimizer, Clock(16_000, batch_size, 1.0)))
  objective = make_objective(config, task)
  sharding = batch_sharding(make_mesh(jax.devices()[:1]))
  resident = task.open(make_splits(task, 0.0)['train'], sharding).resident
  batches = np.random.default_rng(0).integers(0, 15_000, (STEPS, batch_size)).astype(np.int32)
  first = {'index': batches[0]}
  state = jax.jit(lambda resident, batch: init_state(model, optimizer, objective, resident, batch))(resident, first)
  step = jax.jit(make_train_step(model, optimizer, objective), donate_argnums=0)

  def take() -> jax.Array:
    nonlocal state
    for batch in batches:
      state = step(state, resident, {'index': batch})
    return state.step

  return take


def their_steps(nanogpt: pathlib.Path, tokens: np.ndarray) -> common.Thunk:
  """Return a function that takes training steps of nanoGPT's GPT on random windows.

  A step does the same as in nanoGPT's train.py without compilation.
  """
  try:
    import torch
  except ImportError:
    sys.exit('error: this benchmark needs PyTorch: pip install torch')
  sys.path.insert(0, str(nanogpt))
  try:
    from model import GPT, GPTConfig  # type: ignore[import-not-found]
  except ImportError:
    sys.exit(f'error: {nanogpt} has no model.py: give a clone of github.com/karpathy/nanoGPT')
  torch.manual_seed(0)
  sizes = {'n_layer': 4, 'n_head': 4, 'n_embd': 128, 'block_size': 64, 'vocab_size': 65, 'dropout': 0.0}
  model = GPT(GPTConfig(bias=False, **sizes))
  optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), 'cpu')
  data = tokens.astype(np.uint16)

  def batch() -> tuple[Any, Any]:
    starts = torch.randint(len(data) - 64, (12,))
    x, y = (
      torch.stack([torch.from_numpy(data[i + more : i + more + 64].astype(np.int64)) for i in starts])
      for more in (0, 1)
    )
    return x, y

  def take() -> float:
    for _ in range(STEPS):
      _, loss = model(*batch())
      loss.backward()
      torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
      optimizer.step()
      optimizer.zero_grad(set_to_none=True)
    return loss.item()

  return take


def speed(nanogpt: pathlib.Path, rounds: int) -> list[dict[str, Any]]:
  """Return a row for each model. Each ratio is that of two times in the same round."""
  tokens = np.random.default_rng(0).integers(0, 65, 1_000_000).astype(np.uint8)
  thunks = {'nanoGPT (PyTorch)': their_steps(nanogpt, tokens)}
  thunks |= {f'ours, {name}': our_steps(model, tokens) for name, model in OURS.items()}
  seconds = common.alternate(thunks, rounds)
  theirs = seconds['nanoGPT (PyTorch)']
  return [
    {
      'model': name,
      'steps/s': common.spread([STEPS / s for s in times], digits=1),
      'ours/theirs': common.spread(common.ratios(theirs, times)),
    }
    for name, times in seconds.items()
  ]


def evaluate(checkpoint: pathlib.Path, heads: int, data_dir: str) -> dict[str, Any]:
  """Return the scores of a nanoGPT checkpoint on the last tenth of tiny Shakespeare, its held-out text."""
  model, variables = load(checkpoint, heads)
  config = resolve(shakespeare.get_config())
  config.update_from_flattened_dict({'data.dir': data_dir, 'data.length': model.length})
  task, mesh = make_task(config), make_mesh(jax.devices()[:1])
  splits = make_splits(task, 0.0)
  test = task.open(splits['test'], batch_sharding(mesh))
  found: Mapping[str, Any] = make_evaluator(config, task, model, mesh, splits)(variables['params'], test).summary
  scores = {score.name: f'{found[score.name]:{score.form}}' for score in task.scores}
  return {'checkpoint': checkpoint.name, 'window': model.length, 'tokens': found['n'], **scores}


def main() -> None:
  """Run the benchmark."""
  flags = common.parser(__doc__.splitlines()[0])
  what = flags.add_mutually_exclusive_group(required=True)
  what.add_argument('--nanogpt', type=pathlib.Path, help='clone of nanoGPT, for its model.py')
  what.add_argument('--checkpoint', type=pathlib.Path, nargs='+', help='checkpoints of its runs on shakespeare_char')
  flags.add_argument('--heads', type=int, default=4, help='heads of the checkpoints')
  flags.add_argument('--data_dir', default='~/tensorflow_datasets', help='TFDS folder with tiny_shakespeare')
  arguments: argparse.Namespace = flags.parse_args()
  keep_freed_memory()
  if arguments.nanogpt:
    title = 'Training steps, float32, 12 windows of 64 characters: median (quartiles)'
    common.report('nanogpt', title, speed(arguments.nanogpt, arguments.rounds), arguments.out)
  else:
    rows = [evaluate(path, arguments.heads, arguments.data_dir) for path in arguments.checkpoint]
    common.report('nanogpt-loss', "nanoGPT's checkpoints on the last tenth of tiny Shakespeare", rows, arguments.out)


if __name__ == '__main__':
  common.launch(main)
