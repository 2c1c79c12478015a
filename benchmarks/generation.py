"""Speed of text generation with a KV cache, against reading the whole text again for every token.

python -m benchmarks.generation
python -m benchmarks.generation --models hyperbf,gmlp --count 64 --batch 8

Networks have random weights: 4 blocks of width 128 with 4 heads, a vocabulary of 65 tokens, and windows of just the
text's length. Both ways are one compiled loop. Without a cache, the loop reads the whole window for every token.
tests/models/test_generation.py checks that both write the same text.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import Thunk, alternate, checked, launch, parser, positive, ratios, report, spread
from hbf.models.generation import Sampling, generate
from hbf.models.language import LanguageModel
from hbf.nn.registry import make_stages, stage_names, stage_options
from hbf.nn.trunk import Trunk
from hbf.training.machine import keep_freed_memory

WIDTH, DEPTH, HEADS, HIDDEN, VOCABULARY = 128, 4, 4, 512, 65
GREEDY = Sampling(temperature=0.0)


def main() -> None:
  """Print a row for every model."""
  flags = parser(__doc__)
  flags.set_defaults(rounds=5)
  flags.add_argument('--models', default='hyperbf,vit,linear,gmlp,mixer', type=checked(stage_names))
  flags.add_argument('--count', type=positive, default=256, help='tokens to write after a prompt of one token')
  flags.add_argument('--batch', type=positive, default=1, help='texts at once')
  options = flags.parse_args()
  keep_freed_memory()
  rows = [measure(name, options.count, options.batch, options.rounds) for name in options.models]
  title = f'{options.count} tokens written, texts at once: {options.batch}; {DEPTH} blocks of width {WIDTH}, float32'
  report('generation', title, rows, options.out)


def measure(name: str, count: int, batch: int, rounds: int) -> dict[str, Any]:
  """Return a model's tokens per second with and without a cache, and the ratio of the two in the same round."""
  trunk = Trunk(DEPTH, *make_stages(name, HEADS, *stage_options(name, HIDDEN)))
  model = LanguageModel(trunk, VOCABULARY, count + 1, WIDTH)
  prompts = [[i % VOCABULARY] for i in range(batch)]
  texts = jnp.zeros((1, count + 1), jnp.int32)
  variables = jax.jit(functools.partial(model.init, train=False))(jax.random.key(0), texts)
  seconds = alternate(
    {
      'cached': lambda: generate(model, variables, prompts, count, GREEDY),
      'uncached': whole_texts(model, variables, jnp.asarray(prompts), count),
    },
    rounds,
  )
  speed = {way: spread([batch * count / z for z in times], 0) for way, times in seconds.items()}
  return {
    'model': name,
    'tokens/s, cached': speed['cached'],
    'tokens/s, uncached': speed['uncached'],
    'ratio': spread(ratios(seconds['uncached'], seconds['cached']), 1),
  }


def whole_texts(model: LanguageModel, variables: Any, prompts: jax.Array, count: int) -> Thunk:
  """Return a function that writes the likeliest tokens after prompts [B, 1] without a cache."""

  @jax.jit
  def write(variables: Any, texts: jax.Array) -> jax.Array:
    def step(i: jax.Array, texts: jax.Array) -> jax.Array:
      logits = jnp.asarray(model.apply(variables, texts, train=False))
      return texts.at[:, i + 1].set(jnp.argmax(logits[:, i], axis=-1))

    return jax.lax.fori_loop(0, count, step, texts)

  texts = jnp.zeros((len(prompts), count + 1), jnp.int32).at[:, :1].set(prompts)
  return lambda: write(variables, texts)


if __name__ == '__main__':
  launch(main)
