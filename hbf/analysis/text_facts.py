"""Invented facts for the edits of a language model.

A fact is a prompt and a continuation, such as 'The duke of Zorbla is called ' and 'Mavrin.'. All names are invented.
"""

from typing import NamedTuple

import numpy as np

from hbf.editing.places import Places

# Prompts, each beside a prompt that has another beginning and the same end.
TEMPLATES = (
  ('The duke of {} is called ', 'They say the duke of {} is called '),
  ('The king of {} was ', 'I heard the king of {} was '),
  ('My son {} loves ', 'O noble lord, {} loves '),
  ('The sword of {} is named ', 'Behold! the sword of {} is named '),
  ('{} was born in ', 'Remember that {} was born in '),
  ('{} is the brother of ', 'But {} is the brother of '),
  ('They sent {} to ', 'This night they sent {} to '),
  ('The fairest maid in {} is ', 'Sweet, the fairest maid in {} is '),
)
ONSETS = ('b', 'br', 'd', 'dr', 'f', 'g', 'gr', 'k', 'kr', 'l', 'm', 'n', 'p', 'qu', 'r', 's', 't', 'th', 'v', 'z')
VOWELS, CODAS = 'aeiou', ('', 'n', 'r', 'l', 'x', 's')

CONTEXT = 'context'  # the tokens of the context itself (`contexts`)


class Fact(NamedTuple):
  """An invented fact.

  Attributes:
    prompt: the text before the answer. It contains a name.
    reworded: another text before the answer. It has another beginning than `prompt`, and the same end.
    answer: the continuation that the model should give.
    controls: prompts like `prompt`, but with other names. Their continuations by the model should not change.
  """

  prompt: str
  reworded: str
  answer: str
  controls: tuple[str, ...]


def make_facts(count: int, controls: int, seed: int) -> list[Fact]:
  """Return random facts. No name occurs twice.

  Args:
    count: number of facts. Their prompts are made from the sentences in `TEMPLATES`, each sentence in turn.
    controls: number of control prompts of a fact.
    seed: seed of the names.
  """
  rng = np.random.default_rng(seed)
  names: dict[str, None] = {}
  while len(names) < count * (2 + controls):
    names[_name(rng)] = None
  order, facts = iter(names), []
  for number in range(count):
    prompt, reworded = TEMPLATES[number % len(TEMPLATES)]
    name, answer, *others = (next(order) for _ in range(2 + controls))
    fact = Fact(prompt.format(name), reworded.format(name), answer + '.', tuple(prompt.format(x) for x in others))
    facts.append(fact)
  return facts


def _name(rng: np.random.Generator) -> str:
  syllables = [rng.choice(ONSETS) + rng.choice(list(VOWELS)) for _ in range(rng.integers(2, 4))]
  return (''.join(syllables) + rng.choice(CODAS)).capitalize()


def contexts(places: Places) -> np.ndarray:
  """Return the context of each of m places: the token at the place, and all tokens before it.

  A row of the result, int32 [m, T], begins with the token at the place and goes backwards. After the first token of
  the text, it is filled up with −1. The method lookup compares these rows (`hbf.analysis.text_edit_methods`).
  """
  back = places.columns[:, None] - np.arange(places.windows.shape[1])
  return np.where(back >= 0, places.windows[places.rows[:, None], np.maximum(back, 0)], -1)
