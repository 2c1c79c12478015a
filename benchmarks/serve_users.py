"""The clients of benchmarks.serve, which Locust runs: they send images one after another, and check the answers."""

import itertools
import json
import os
import pathlib

from locust import FastHttpUser, task

# The server may pad an image to a batch of another size than `hbf predict`, which changes the last bits.
TOLERANCE = 1e-5
FOLDER = pathlib.Path(os.environ['HBF_IMAGES'])
EXPECTED = [
  (pathlib.Path(one['image']).read_bytes(), one['classes'])
  for one in json.loads((FOLDER / 'expected.json').read_text())
]
NUMBERS = itertools.count()


class Client(FastHttpUser):
  """A client that sends the next image as soon as it has its answer."""

  connection_timeout = network_timeout = 60.0
  max_retries = 0

  @task
  def ask(self) -> None:
    """Send an image, and compare the answer with that of `hbf predict`."""
    image, classes = EXPECTED[next(NUMBERS) % len(EXPECTED)]
    with self.client.post('/predict', data=image, name='answered', catch_response=True) as answer:
      if answer.status_code == 503 and answer.headers.get('retry-after') and 'waiting' in answer.json()['error']:
        answer.request_meta['name'] = 'refused'
        answer.success()
      elif answer.status_code != 200:
        answer.request_meta['name'] = 'failed'
        answer.failure(f'status {answer.status_code}: {answer.error}')
      elif not same(answer.json()['classes'], classes):
        answer.failure(f'wrong answer {answer.text}: expected {classes}')
      else:
        answer.success()


def same(found: list[dict], expected: list[dict]) -> bool:
  """Return True if two answers have the same classes, with the same probabilities up to rounding."""
  names = [[one['class'] for one in answer] for answer in (found, expected)]
  pairs = zip(found, expected, strict=False)
  return names[0] == names[1] and all(abs(a['probability'] - b['probability']) < TOLERANCE for a, b in pairs)
