"""The web server by itself: the command in a process of its own, asked over the loopback address."""

import asyncio
import concurrent.futures
import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from hbf.tasks import answers
from hbf.training.export import from_run
from hbf.training.learned import Learned, LearnedClass, write_learned
from hbf.training.predict import Classifier, answer, of_trained

SECONDS, BYTES, QUEUE = 2.0, 100_000, 4


@pytest.fixture(scope='module', autouse=True)
def installed():
  for package in ('starlette', 'uvicorn'):
    pytest.importorskip(package)


class Server:
  """A running server."""

  def __init__(self, workdir, folder, *flags):
    self.log = folder / 'log'
    command = [sys.executable, '-m', 'hbf', 'serve', f'--workdir={workdir}', '--port=0', '--batch=1']
    command += [f'--timeout={SECONDS}', f'--limit_bytes={BYTES}', f'--queue={QUEUE}', *flags]
    self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log.open('w'), text=True)
    ready = self.process.stdout.readline()
    self.port = int(re.fullmatch(r'ready: http://127\.0\.0\.1:(\d+)\n', ready)[1])

  def ask(self, method, path, body=None, **headers):
    """Return the status, the headers and the JSON of an answer."""
    connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=60)
    connection.request(method, path, body, headers)
    found = connection.getresponse()
    content = found.read()
    connection.close()
    return found.status, found.headers, content

  def open(self, sent=b''):
    """Return a socket to the server on which this has been sent."""
    made = socket.create_connection(('127.0.0.1', self.port), timeout=60)
    made.sendall(sent)
    return made

  def says(self, text):
    """Wait until the log has a line with this text."""
    for _ in range(200):
      if [line for line in self.log.read_text().splitlines() if text in line]:
        return True
      time.sleep(0.05)
    return False

  def end(self):
    self.process.send_signal(signal.SIGTERM)
    return self.process.wait(60)


@pytest.fixture(scope='module')
def server(finished, tmp_path_factory):
  running = Server(finished[0], tmp_path_factory.mktemp('serve'))
  yield running
  assert running.end() == 0


@pytest.fixture(autouse=True)
def goes_on(request, installed):
  """Whatever a test has sent, the server goes on."""
  yield
  if 'server' in request.fixturenames:
    running = request.getfixturevalue('server')
    status, _, content = running.ask('GET', '/health')
    assert (status, json.loads(content)['inside']) == (200, 0)
    assert 'Traceback' not in running.log.read_text()


def make_images(folder, count):
  paths = [str(folder / f'{number}.png') for number in range(count)]
  for number, path in enumerate(paths):
    pixels = np.random.default_rng(number).integers(0, 256, (9, 11), np.uint8)
    Image.fromarray(pixels).save(path)
  return paths


def read(path):
  with open(path, 'rb') as file:
    return file.read()


def test_answers_are_those_of_predict_bit_for_bit(finished, server, tmp_path):
  paths = make_images(tmp_path, 20)
  expected = [*answer(of_trained(from_run(finished[0])), paths, top=10, batch_size=1)]
  with concurrent.futures.ThreadPoolExecutor(QUEUE) as pool:
    found = [*pool.map(lambda path: server.ask('POST', '/predict?top=10', read(path)), paths)]
  assert [status for status, *_ in found] == [200] * 20
  assert [json.loads(content)['classes'] for *_, content in found] == [one.to_json()['classes'] for one in expected]


def test_the_page_and_the_health_address(server):
  status, headers, content = server.ask('GET', '/')
  assert status == 200 and b'Drop an image here' in content and b'{{' not in content
  assert "default-src 'none'" in headers['content-security-policy']
  said = json.loads(server.ask('GET', '/health')[2])
  assert (said['status'], said['dataset'], said['classes']) == ('ok', 'digits', 10)


@pytest.mark.parametrize(
  ('method', 'path', 'body', 'headers', 'status', 'said'),
  [
    ('POST', '/predict', b'', {}, 400, 'the body is empty'),
    ('POST', '/predict', b'PK\x05\x06' + bytes(18), {}, 400, 'is a ZIP archive'),
    ('POST', '/predict', b'hello', {}, 400, 'is not an image that can be read'),
    ('POST', '/predict?top=0', b'hello', {}, 400, "top is '0': expected a whole number"),
    ('POST', '/predict', b'hello', {'content-encoding': 'gzip'}, 415, 'is compressed'),
    ('POST', '/predict', b'hello', {'content-encoding': 'Identity'}, 400, 'is not an image that can be read'),
    ('POST', '/predict', bytes(10**8), {}, 413, 'has more than 100,000 bytes'),
    ('POST', '/predict', [bytes(10**5)] * 100, {}, 413, 'has more than 100,000 bytes'),  # without a length
    ('POST', '/patches', b'hello', {}, 404, 'start it with --patches'),
    ('GET', '/predict', None, {}, 405, 'POST an image to /predict'),
    ('POST', '/nothing', bytes(10**7), {}, 404, 'POST /nothing is not known'),
    ('POST', '/predict/', b'', {}, 404, 'POST /predict/ is not known'),
    ('GET', '/%1b', b'', {}, 404, 'GET /'),
  ],
)
def test_wrong_requests_are_told_so_and_logged_in_a_line(server, method, path, body, headers, status, said):
  begin, lines = time.perf_counter(), server.log.read_text().count('\n')
  found, answered, content = server.ask(method, path, body, **headers)
  assert time.perf_counter() - begin < 30
  assert found == status and said in json.loads(content)['error']
  assert answered['content-type'] == 'application/json'
  assert server.says(said) and server.log.read_text().count('\n') == lines + 1


async def ask_in_process(service, method, path, body):
  """Return the status and the JSON of the answer of a service that runs in this process."""
  said = []

  async def receive():
    return {'type': 'http.request', 'body': body}

  async def send(message):
    said.append(message)

  scope = {'type': 'http', 'method': method, 'path': path, 'query_string': b'', 'headers': []}
  await service.application()(scope, receive, send)
  return said[0]['status'], json.loads(b''.join(message.get('body', b'') for message in said))


@pytest.mark.parametrize('form', [answers.LIKELIEST_CLASSES, answers.VALUES])
def test_outputs_that_are_not_finite_are_refused_and_not_counted_as_answers(form, tmp_path, caplog):
  from hbf.serving.application import Limits, Service
  from hbf.serving.batcher import Batcher

  shape, image = (2, 2, 1), read(make_images(tmp_path, 1)[0])
  classifier = Classifier(('a', 'b'), shape, lambda images: np.full((len(images), 2), np.nan), form)
  batcher = Batcher(classifier.logits, shape, batch=1)
  service = Service(classifier, {}, batcher, Limits(), None)

  async def ask():
    async with batcher.open():
      return [await ask_in_process(service, *request) for request in requests]

  requests = [('POST', '/predict', image), ('GET', '/health', b'')]
  (status, refusal), (_, health) = asyncio.run(ask())
  assert status == 500 and 'outputs of the model for this image are not finite: serve' in refusal['error']
  assert health['requests'] == {'500': 1}
  assert ['None' in record.getMessage() for record in caplog.records] == [False]


HEAD = b'POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n'


@pytest.mark.parametrize(
  ('sent', 'said'),
  [
    (b'', 'no request came within 2 s'),
    (b'POST /predict HT', 'no request came within 2 s'),
    (HEAD + b'half', 'only 4 bytes of the body came within 2 s'),
  ],
)
def test_a_client_that_stops_is_told_so_in_time(server, sent, said):
  with server.open(sent) as client:
    begin, received = time.perf_counter(), b''
    while part := client.recv(10**6):
      received += part
    assert time.perf_counter() - begin < 3 * SECONDS + 10
  assert received.startswith(b'HTTP/1.1 408 ') and said.encode() in received and server.says(said)


def test_a_client_that_leaves_is_logged(server):
  server.open(HEAD + b'half').close()
  assert server.says('refused 499 127.0.0.1 /predict: the client left')


def test_what_is_no_http_is_refused(server):
  with server.open(b'\x00\x01 nonsense\r\n\r\n') as client:
    received = client.recv(10**6)
  assert received.startswith(b'HTTP/1.1 400 ') and b'{"error": "the request is no valid HTTP' in received
  assert server.says('refused 400 127.0.0.1: the request is no valid HTTP')


def test_a_broken_body_after_an_answer_closes_the_connection(server):
  with server.open(b'POST /nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n') as client:
    assert client.recv(10**6).startswith(b'HTTP/1.1 404 ')
    client.sendall(b'no chunk\r\n\r\n')
    while client.recv(10**6):
      pass


def test_a_client_that_does_not_read_is_left(server):
  many = b'GET / HTTP/1.1\r\nHost: localhost\r\n\r\n' * 20_000
  with server.open() as client:
    client.settimeout(60)
    begin = time.perf_counter()
    with pytest.raises(OSError):
      while time.perf_counter() - begin < 60:
        client.sendall(many)
  assert time.perf_counter() - begin < 3 * SECONDS + 20


def test_data_after_an_answer_close_the_connection(server):
  with server.open(b'GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n') as client:
    assert client.recv(10**6).startswith(b'HTTP/1.1 200 ')
    begin = time.perf_counter()
    with pytest.raises(OSError):
      while time.perf_counter() - begin < 30:
        client.sendall(b'1')
        time.sleep(0.02)


def test_a_full_server_says_when_to_come_again(server, tmp_path):
  (path,) = make_images(tmp_path, 1)
  slow = [server.open(HEAD) for _ in range(QUEUE)]
  for _ in range(200):
    if json.loads(server.ask('GET', '/health')[2])['inside'] == QUEUE:
      break
    time.sleep(0.01)
  status, headers, content = server.ask('POST', '/predict', read(path))
  assert (status, headers['retry-after']) == (503, '1') and b'4 images are waiting' in content
  for client in slow:
    client.close()
  assert server.says('the client left')
  for _ in range(100):
    if (status := server.ask('POST', '/predict', read(path))[0]) == 200:
      break
    time.sleep(0.05)
  assert status == 200


def test_sigterm_answers_what_is_inside_and_ends_with_0(finished, tmp_path):
  (path,) = make_images(tmp_path, 1)
  running, content = Server(finished[0], tmp_path), read(path)
  head = b'POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n' % len(content)
  with running.open(head + content[:-1]) as client:
    while not json.loads(running.ask('GET', '/health')[2])['inside']:
      time.sleep(0.01)
    running.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    with pytest.raises(ConnectionError):
      running.open()
    client.sendall(content[-1:])
    received = b''
    while part := client.recv(10**6):
      received += part
  assert received.startswith(b'HTTP/1.1 200 ') and b'"classes"' in received
  assert running.process.wait(60) == 0 and running.log.read_text() == ''


def test_learned_classes_are_left_out_with_a_line(finished, tmp_path):
  folder = shutil.copytree(finished[0], tmp_path / 'run')
  rose = LearnedClass('rose', ('a.png',), np.ones(3, np.float32))
  write_learned(folder, Learned(1, False, np.eye(3), np.ones((10, 3)), (rose,)))
  running = Server(folder, tmp_path)
  assert running.end() == 0
  assert 'has learned classes, which are left out: only `hbf predict` answers them' in running.log.read_text()


def test_a_port_in_use_is_a_line(finished, server, tmp_path):
  command = [sys.executable, '-m', 'hbf', 'serve', f'--workdir={finished[0]}', f'--port={server.port}']
  done = subprocess.run(command, capture_output=True, text=True)
  assert (done.returncode, done.stdout, done.stderr.count('\n')) == (1, '', 1)
  assert f'127.0.0.1:{server.port} can not be used' in done.stderr
