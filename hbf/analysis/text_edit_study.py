"""Measurement of edits that teach invented facts to a language model.

python -m hbf.analysis.text_edit_study --run=runs/hyperbf-0 --run=runs/vit-0
python -m hbf.analysis.text_edit_study --report         # draws the table and the picture again, from stored numbers

A fact is a prompt and an answer (`hbf.analysis.text_facts`). An edit has one center for each character of the answer.
docs/research/edit.md explains the results.
"""

import functools
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from hbf.analysis.edit_methods import Base, coefficients_of, sum_of
from hbf.analysis.edit_study import FINE_TUNING, descend
from hbf.analysis.report.text_edit_report import draw, table
from hbf.analysis.study import Record, Study
from hbf.analysis.text_edit_methods import TEXT_METHODS, TextMethod, TextTrial
from hbf.analysis.text_facts import CONTEXT, TEMPLATES, Fact, contexts, make_facts
from hbf.analysis.texts import TextRun, nll
from hbf.editing import text
from hbf.editing.editor import GUARDED
from hbf.editing.guard import metric_of
from hbf.editing.places import BATCH, LAYERS, Passages, Places, points_of_copies, read
from hbf.errors import UserError, in_one_line
from hbf.evaluation.batches import in_batches
from hbf.models.edited import LAST, Observed
from hbf.models.generation import Sampling, generate
from hbf.training.experiment import make_splits

COPIES = 20  # copies of a fact, each after another passage. The methods do not see them
CONTROLS, CONTINUED = 5, 8  # prompts with other names for each fact, and tokens of their continuations
FACTS, IN_TRIALS = 50, 16  # facts in the result and in a trial
WINDOWS, WINDOWS_IN_TRIALS = 150, 60  # windows of text that measure the damage
TUNED, TUNED_IN_TRIALS = 16, 4  # facts for fine-tuning
NAMED = 400  # guarded prompts with other names
COUNTS = (1, 10, 50)
SETS = {'prompt': 1, 'copies': COPIES, 'reworded': 1, 'controls': CONTROLS}  # number of texts for each fact
# Largest share of other answers, in percent, that a trial may change by one fact and by `IN_TRIALS` facts.
CHANGED, CHANGED_BY_MANY = 0.1, 1.0
RATES = tuple(float(rate) for rate in np.logspace(-3.5, -0.5, 8))


class Split(NamedTuple):
  """Texts with facts, and a text in which the model's predictions should not change.

  A place is a position in a text at which the model predicts the next token. The places have five names:

  - 'prompt': the places of a fact's answer after its prompt,
  - 'copies': the places of the answer after a passage and the prompt, for `COPIES` passages of the split,
  - 'reworded': the places of the answer after the reworded prompt,
  - 'controls': the places of the model's own continuations of prompts with other names (control prompts),
  - 'text': all places of some windows of the split.

  Attributes:
    places: the places by their names. The first four are in the order of the facts.
    seen: what the model computes at these places, as `seen[name][layer]`.
    losses: the model's loss at each place 'text', in bits.
  """

  places: dict[str, Places]
  seen: dict[str, dict[str, Observed]]
  losses: np.ndarray

  def rows(self, name: str, facts: range) -> np.ndarray:
    """Return the indices of some facts' places in `places[name]`. For 'text', return the indices of all places."""
    rows = self.places[name].rows
    if name == 'text':
      return np.arange(len(rows))
    return np.flatnonzero((rows >= facts.start * SETS[name]) & (rows < facts.stop * SETS[name]))


def open_split(run: TextRun, name: str, facts: Sequence[Fact], windows: int, seed: int) -> Split:
  """Return the places of some facts and of a split's text, with what the model computes there.

  Args:
    run: the run.
    name: the split, 'validation' or 'test'. It gives the passages and the windows of text.
    facts: the facts.
    windows: the largest number of windows of text.
    seed: the seed of the passages.
  """
  encode, length = run.tokenizer.encode_text, run.task.length
  passages = passages_of(run, name, seed)
  texts: dict[str, list[Any]] = {'prompt': [], 'copies': [], 'reworded': []}
  for fact in facts:
    prompt, other, answer = encode(fact.prompt), encode(fact.reworded), encode(fact.answer)
    room = length - len(prompt) - len(answer) + 1
    if room < 1:
      raise UserError(
        f"a fact takes {len(prompt) + len(answer)} tokens: expected at most {length}, the model's window"
      )
    texts['prompt'].append((prompt, answer))
    texts['reworded'].append((other, answer))
    texts['copies'] += [(np.concatenate([passages.draw(room), prompt]), answer) for _ in range(COPIES)]
  controls = [encode(prompt) for fact in facts for prompt in fact.controls]
  greedy = Sampling(temperature=0)
  after = generate(run.model, {'params': run.params}, [text.tolist() for text in controls], CONTINUED, greedy)
  texts['controls'] = list(zip(controls, after, strict=True))
  places = {key: Places.of(pairs, length) for key, pairs in texts.items()}
  places['text'] = Places.everywhere(run.windows(name, windows))
  seen = {key: observed(run, where) for key, where in places.items()}
  return Split(places, seen, bits(seen['text'][LAST].logits, places['text'].following))


def observed(run: TextRun, places: Places) -> dict[str, Observed]:
  """Return what the model computes at some places, by the name of the layer whose outputs are the points.

  `CONTEXT` is an additional name, for methods that look up contexts. Its points are the contexts themselves
  (`hbf.analysis.text_facts.contexts`).
  """
  seen = read(run.model, run.params, places)
  return seen | {CONTEXT: seen[LAST]._replace(points=contexts(places))}


def passages_of(run: TextRun, split: str, seed: int) -> Passages:
  """Return random passages of a split. A copy of a text follows one of them."""
  tokens = make_splits(run.task, run.restored.config.data.validation)[split].tokens
  return text.passages_of(tokens, run.tokenizer, run.task.length, seed)


class Bases(NamedTuple):
  """The guarded examples and the metric by layer, for two kinds of methods.

  Attributes:
    text: those of most methods. The guarded examples are places of the training text.
    names: those of methods with `TextMethod.names`. The guarded examples are the same places of the training text,
      and the last tokens of prompts with invented names.
  """

  text: dict[str, Base]
  names: dict[str, Base]

  def of(self, wanted: TextMethod, layer: str) -> Base:
    """Return the guarded examples and the metric that a method uses in a layer."""
    return (self.names if wanted.names else self.text)[layer]


def open_bases(run: TextRun, seed: int = 0) -> Bases:
  """Compute the points of the guarded examples, and the metric of copies in each layer.

  A copy of an example follows a random passage of the training text. `seed` is the seed of these passages.
  """
  copies = points_of_copies(run.model, run.params, passages_of(run, 'train', seed))
  metric = {layer: metric_of(points) for layer, points in copies.items()} | {CONTEXT: np.zeros((0, 0))}
  guard = observed(run, Places.everywhere(run.windows('train', GUARDED // run.task.length)))
  encoded = [run.tokenizer.encode_text(fact.prompt) for fact in make_facts(NAMED, 0, seed=3)]
  ends = observed(run, Places.of([(prompt, prompt[:1]) for prompt in encoded], run.task.length))
  both = {layer: _joined([guard[layer], ends[layer]]) for layer in guard}
  text, names = ({layer: Base(seen[layer], metric[layer]) for layer in seen} for seen in (guard, both))
  return Bases(text, names)


def _joined(parts: Sequence[Observed]) -> Observed:
  return Observed(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


class Edits:
  """The edits by which a method teaches all facts of a split.

  An edit has a response R and coefficients c for each token of the answer (`hbf.analysis.edit_methods`).
  """

  def __init__(self, wanted: TextMethod, trial: TextTrial, bases: Bases, split: Split) -> None:
    """Compute the responses of all edits to all places."""
    self.method, self.margin, self.split = wanted.method, trial.margin, split
    self.seen = {name: seen[trial.layer] for name, seen in split.seen.items()}
    self.labels, base = split.places['prompt'].following, bases.of(wanted, trial.layer)
    everything = _joined(list(self.seen.values()))
    responses = wanted.method.respond(base, self.seen['prompt'], self.labels, everything, trial.reach)
    ends = np.cumsum([len(seen.logits) for seen in self.seen.values()])[:-1]
    self.responses = dict(zip(self.seen, np.split(responses, ends, axis=1), strict=True))

  def logits(self, facts: range) -> dict[str, np.ndarray]:
    """Make the edits of some facts in order. Return the edited logits by the name of the places.

    The places are those of these facts, and all places of the text.
    """
    own = self.split.rows('prompt', facts)
    responses, edited = self.responses['prompt'][np.ix_(own, own)], self.seen['prompt'].at(own)
    _, coefficients = coefficients_of(self.method, responses, edited, self.labels[own], self.margin, skip=False)
    found = {}
    for name, seen in self.seen.items():
      rows = self.split.rows(name, facts)
      found[name] = seen.logits[rows] + sum_of(self.method, self.responses[name][np.ix_(own, rows)], coefficients)
    return found


def scores(logits: Mapping[str, np.ndarray], split: Split, facts: range) -> dict[str, float]:
  """Return the scores of an edited model for some facts.

  Args:
    logits: the edited model's logits at the places of these facts and of the text, by the name of the places.
    split: the places.
    facts: the indices of the facts.

  Returns:
    In percent, 'prompt': share of the facts whose answer the model writes after the prompt. 'copies': the same after
    a passage and the prompt. 'reworded': the same after the reworded prompt. 'controls': share of the control prompts
    whose continuation changes. 'changed': share of the places of the text whose answer changes. Not in percent,
    'bits': the loss for each token of the text, in bits.
  """
  found = {name: 100 * float(np.mean(_written(logits[name], split, name, facts))) for name in SETS}
  found['controls'] = 100 - found['controls']
  before, now = split.seen['text'][LAST].logits, logits['text']
  found['changed'] = 100 * float((now.argmax(axis=-1) != before.argmax(axis=-1)).mean())
  # The loss is computed only where the logits differ. This is faster: most edits change few places.
  places, other = split.places['text'], (now != before).any(axis=1)
  losses = split.losses.copy()
  losses[other] = bits(now[other], places.following[other])
  return found | {'bits': float(losses.mean())}


def _written(logits: np.ndarray, split: Split, name: str, facts: range) -> np.ndarray:
  """Return a boolean for each text of these facts in `split.places[name]`.

  It is True if the likeliest tokens at the places of the text are the wanted continuation.
  """
  rows, places = split.rows(name, facts), split.places[name]
  wrong = logits.argmax(axis=-1) != places.following[rows]
  return np.bincount(places.rows[rows] - facts.start * SETS[name], wrong, len(facts) * SETS[name]) == 0


def bits(logits: np.ndarray, following: np.ndarray) -> np.ndarray:
  """Return the negative log-likelihood of each following token [m] in bits, from logits [m, V]."""
  windows = np.stack([np.zeros_like(following), following], axis=1)
  return np.asarray(nll(logits[:, None], windows)[:, 0] / np.log(2))


def alone(edits: Edits, count: int) -> dict[str, float]:
  """Teach one fact at a time to the unedited model. Return the means of `scores` over the first `count` facts."""
  each = [range(i, i + 1) for i in range(count)]
  return _means([scores(edits.logits(fact), edits.split, fact) for fact in each])


def _means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
  return {key: float(np.mean([one[key] for one in found])) for key in found[0]}


def many(edits: Edits, counts: Sequence[int]) -> list[dict[str, float]]:
  """Teach the first n facts together, for each number n in `counts`. Return the `scores` of these n facts."""
  return [{'facts': count} | scores(edits.logits(range(count)), edits.split, range(count)) for count in counts]


def tried(wanted: TextMethod, bases: Bases, split: Split, count: int) -> list[dict[str, Any]]:
  """Teach the first `count` facts with each choice of a method's options: one at a time, and all together.

  Return a dict for each choice. It has the options and the mean scores of single facts (`alone`). Its entry 'many' is
  the list that `many` returns for all these facts.
  """
  found = []
  for trial in wanted.trials:
    edits = Edits(wanted, trial, bases, split)
    found.append(trial._asdict() | alone(edits, count) | {'many': many(edits, [count])})
  return found


def best(found: Sequence[Mapping[str, float]], most: float) -> int:
  """Return the index of the best choice of a method's options, a trial.

  A trial is allowed if it changes at most `most` percent of the answers in the text. The best allowed trial has the
  greatest harmonic mean of two shares: the score 'copies', and the share of the control prompts whose continuation
  stays, 100 − 'controls'. Meng et al. 2022 also compare methods by a harmonic mean. If no trial is allowed, the best
  one changes the fewest answers.

  Args:
    found: the `scores` of each trial.
    most: the greatest allowed score 'changed', in percent.
  """
  allowed = [i for i, one in enumerate(found) if one['changed'] <= most]
  if not allowed:
    return min(range(len(found)), key=lambda i: found[i]['changed'])

  def score(i: int) -> float:
    written, kept = found[i]['copies'], 100 - found[i]['controls']
    return 2 * written * kept / max(written + kept, 1e-9)

  return max(allowed, key=score)


def separation(bases: Bases, split: Split, layer: str, count: int) -> list[float]:
  """Return in percent, for each template, how often a fact's prompt is nearer to its copy than to a control prompt.

  A template is one of the sentences from which prompts are made (`hbf.analysis.text_facts.TEMPLATES`). A copy is the
  same prompt after a passage. Each copy is compared with each control prompt of the fact. The distances from the
  fact's prompt are measured in the metric of `bases.text`.

  Args:
    bases: the metric of each layer.
    split: the places of the facts.
    layer: the layer that gives the points.
    count: the number of facts.
  """
  metric = bases.text[layer].metric
  nearer: list[list[float]] = [[] for _ in TEMPLATES]
  for fact in range(count):
    own, copies, others = (
      split.seen[name][layer].points[split.rows(name, range(fact, fact + 1))] @ metric.T
      for name in ('prompt', 'copies', 'controls')
    )
    # The first of the places of each text is the end of its prompt.
    to_copies = np.linalg.norm(copies[:: len(own)] - own[0], axis=-1)
    to_others = np.linalg.norm(others[::CONTINUED] - own[0], axis=-1)
    nearer[fact % len(TEMPLATES)].append(100 * float((to_copies[:, None] < to_others).mean()))
  return [float(np.mean(values)) for values in nearer if values]


class TextFineTuning:
  """Fine-tuning of all parameters on a fact, until all tokens of its answer are right.

  It ends after `hbf.analysis.edit_study.STEPS` steps in any case.
  """

  def __init__(self, run: TextRun, split: Split) -> None:
    """Make the functions that tune and evaluate the run's network. JAX compiles them at their first call."""
    self.split, self._params, model = split, run.params, run.model

    def loss(params: Any, window: jax.Array, columns: jax.Array, following: jax.Array) -> tuple[jax.Array, jax.Array]:
      logits = jnp.asarray(model.apply({'params': params}, window[None], train=False))[0, columns]
      counted = following >= 0
      each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(following, 0))
      right = jnp.all((logits.argmax(axis=-1) == following) | ~counted)
      return jnp.sum(each * counted) / counted.sum(), right

    def tuned(params: Any, window: jax.Array, columns: jax.Array, following: jax.Array, rate: Any) -> Any:
      return descend(lambda params: loss(params, window, columns, following), params, rate)

    self._tuned = jax.jit(tuned)
    self._logits = jax.jit(lambda params, windows: model.apply({'params': params}, windows, train=False))

  def taught(self, params: Any, fact: int, rate: float) -> Any:
    """Return the parameters after fine-tuning `params` on the prompt and the answer of a fact.

    `fact` is the index of the fact, and `rate` the learning rate.
    """
    places = self.split.places['prompt']
    rows = self.split.rows('prompt', range(fact, fact + 1))
    missing = places.windows.shape[1] - len(rows)  # one shape for all facts, so that one program serves them
    columns = np.pad(places.columns[rows], (0, missing))
    following = np.pad(places.following[rows], (0, missing), constant_values=-1)
    return self._tuned(params, places.windows[fact], columns, following, rate)

  def logits(self, params: Any, facts: range) -> dict[str, np.ndarray]:
    """Return the logits of the network with `params`, in the form in which `Edits.logits` returns them."""
    found = {}
    for name, places in self.split.places.items():
      where = self.split.rows(name, facts)
      windows, rows = np.unique(places.rows[where], return_inverse=True)
      logits = in_batches(functools.partial(self._logits, params), places.windows[windows], BATCH)
      found[name] = logits[rows, places.columns[where]]
    return found

  def alone(self, rate: float, count: int) -> dict[str, float]:
    """Fine-tune on one fact at a time, for the first `count` facts. Return the means of `scores` over them."""
    found = []
    for fact in (range(i, i + 1) for i in range(count)):
      params = self.taught(self._params, fact.start, rate)
      found.append(scores(self.logits(params, fact), self.split, fact))
    return _means(found)

  def many(self, rate: float, counts: Sequence[int]) -> list[dict[str, float]]:
    """Fine-tune on the first facts, one after the other.

    For each number n in `counts`, return the `scores` of the first n facts after fine-tuning on these facts.
    """
    params, found = self._params, []
    for fact in range(counts[-1]):
      params = self.taught(params, fact, rate)
      if fact + 1 in counts:
        facts = range(fact + 1)
        found.append({'facts': len(facts)} | scores(self.logits(params, facts), self.split, facts))
    return found


def measure(workdir: pathlib.Path, count: int = FACTS) -> list[dict[str, Any]]:
  """Measure all methods on a run. Return a row for the model without edits, then a row for each method.

  The options of a method are chosen twice: once for single facts, which are taught one at a time, and once for many
  facts, which are taught together. The row of a method has these keys:

  - 'trials': the results of all trials, which are choices of the options,
  - 'best' and 'best_of_many': the indices of the trials that are best for single facts and for many facts,
  - 'alone': the scores for single facts with the trial 'best',
  - 'many': the scores for many facts with the trial 'best_of_many',
  - 'alone_of_many': the scores for single facts with the trial 'best_of_many'.

  Fine-tuning uses the trial 'best' for many facts too. So its row has no 'best_of_many' and no 'alone_of_many'.

  Args:
    workdir: folder of a run of task next_token with a validation split.
    count: number of facts.

  Raises:
    UserError: the run is not of task next_token, it holds out no text, or its tokenizer lacks a character of a fact.
  """
  run = TextRun.of(workdir)
  config = run.restored.config
  if not config.data.validation:
    raise UserError(f'{workdir} holds out no text of train: give a run with data.validation above 0')
  bases = open_bases(run)
  held_out = open_split(run, 'validation', make_facts(IN_TRIALS, CONTROLS, seed=2), WINDOWS_IN_TRIALS, seed=2)
  test = open_split(run, 'test', make_facts(count, CONTROLS, seed=1), WINDOWS, seed=1)
  about = {'model': config.model.name, 'seed': config.seed, 'facts': count}
  counts = sorted({min(number, count) for number in COUNTS})
  before = scores({name: seen[LAST].logits for name, seen in test.seen.items()}, test, range(count))
  nearer = {layer: separation(bases, test, layer, count) for layer in LAYERS}
  rows = [about | {'method': 'no edit', 'alone': before, 'many': [], 'separation': nearer}]
  logging.info('%s: %s', workdir, nearer)
  for name, wanted in TEXT_METHODS.items():
    trials = tried(wanted, bases, held_out, IN_TRIALS)
    one, last = best(trials, CHANGED), best([trial['many'][0] for trial in trials], CHANGED_BY_MANY)
    row: dict[str, Any] = {'method': name, 'trials': trials, 'best': one, 'best_of_many': last}
    edits = Edits(wanted, wanted.trials[last], bases, test)
    row['alone_of_many'], row['many'] = alone(edits, count), many(edits, counts)
    same = one == last
    row['alone'] = row['alone_of_many'] if same else alone(Edits(wanted, wanted.trials[one], bases, test), count)
    rows.append(about | row)
    logging.info('%s, %s: %s, %s', workdir, name, row['alone'], row['many'][-1])
  rows.append(about | _fine_tuning(run, held_out, test, counts))
  return rows


def _fine_tuning(run: TextRun, held_out: Split, test: Split, counts: Sequence[int]) -> dict[str, Any]:
  """Return the row of fine-tuning. Many facts are taught with the learning rate that is best for single facts."""
  trying = TextFineTuning(run, held_out)
  trials = [{'rate': rate} | trying.alone(rate, TUNED_IN_TRIALS) for rate in RATES]
  chosen = best(trials, CHANGED)
  tuning = TextFineTuning(run, test)
  one, after = tuning.alone(RATES[chosen], TUNED), tuning.many(RATES[chosen], counts)
  logging.info('%s: %s, %s', FINE_TUNING, one, after[-1])
  return {'method': FINE_TUNING, 'trials': trials, 'best': chosen, 'alone': one, 'many': after}


def _measure_all(folders: Sequence[pathlib.Path], record: Record) -> None:
  record.save({'rows': [row for folder in folders for row in measure(folder)]})


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command and return its exit status."""
  study = Study('text-edit', draw, table)
  about = 'a run folder of task next_token; may be repeated'
  flags = study.parser('hbf.analysis.text_edit_study', __doc__, about).parse_args(arguments)
  return study.run(flags, functools.partial(_measure_all, flags.run))


if __name__ == '__main__':
  sys.exit(main())
