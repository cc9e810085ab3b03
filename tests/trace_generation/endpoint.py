"""A chat completion endpoint on loopback that misbehaves as it is told."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import http.server
import json
import re
import socket
import threading
import time

from dgr2_jax.data import tokens


@dataclasses.dataclass(frozen=True)
class Reply:
  """An HTTP reply: `cut` is '' for whole, 'dropped' or 'truncated'."""
  status: int = 200
  body: bytes = b''
  headers: tuple[tuple[str, str], ...] = ()
  cut: str = ''


def completion(content, finish='stop', usage=(100, 20)):
  """A good reply."""
  return Reply(body=json.dumps({
      'choices': [{'message': {'role': 'assistant', 'content': content},
                   'finish_reason': finish}],
      'usage': {'prompt_tokens': usage[0],
                'completion_tokens': usage[1]}}).encode())


def key_of(body):
  """What an endpoint can tell questions apart by."""
  return json.dumps(body, sort_keys=True)


def faithful(body, first):
  """A trace as the prompt of `body` wants it, with a candidate number first."""
  user = body['messages'][1]['content']
  history, candidates = user.split('Candidates, in the order', 1)
  bought = tokens.SEMANTIC_ID.findall(history)
  count = len(re.findall('^Candidate [0-9]+: <', candidates, re.MULTILINE))
  order = [first, *(n for n in range(1, count + 1) if n != first)]
  return json.dumps({
      'explanation': f'Pattern: it began with {bought[0]}. Complement: more of '
                     f'it. Match: Candidate {first} is. Candidate {first} fits '
                     'best.',
      'recommendations': [str(n) for n in order]})


class Endpoint:
  """The server; use `serve`.

  Attributes:
    url: its base URL.
    asked: how often each question came, by `key_of` its body.
    arrivals: when requests came, by time.monotonic().
    keys: values of the Authorization header.
    most_at_once: most requests under way at a time.
  """

  def __init__(self, respond):
    """Makes a server; `respond(body, times asked before)` gives a reply."""
    self.respond = respond
    self.asked = collections.Counter()
    self.arrivals = []
    self.keys = set()
    self.most_at_once = 0
    self._under_way = 0
    self._lock = threading.Lock()

  def handle(self, handler):
    length = int(handler.headers['Content-Length'])
    body = json.loads(handler.rfile.read(length))
    key = key_of(body)
    with self._lock:
      self._under_way += 1
      self.most_at_once = max(self.most_at_once, self._under_way)
      self.arrivals.append(time.monotonic())
      self.keys.add(handler.headers.get('Authorization'))
      before = self.asked[key]
      self.asked[key] += 1
    try:
      assert handler.path == '/v1/chat/completions'
      reply = self.respond(body, before)
    finally:
      with self._lock:
        self._under_way -= 1
    handler.close_connection = handler.close_connection or bool(reply.cut)
    if reply.cut == 'dropped':
      handler.connection.shutdown(socket.SHUT_RDWR)
      return
    handler.send_response(reply.status)
    for name, value in reply.headers:
      handler.send_header(name, value)
    handler.send_header('Content-Length', str(len(reply.body)))
    handler.end_headers()
    half = len(reply.body) // 2 if reply.cut else None
    handler.wfile.write(reply.body[:half])


@contextlib.contextmanager
def serve(respond):
  """Serves until the end of the block."""
  endpoint = Endpoint(respond)

  class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def do_POST(self):
      with contextlib.suppress(ConnectionError):
        endpoint.handle(self)

    def log_message(self, *unused_args):
      pass

  class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # some handlers may still hold a reply back

    def handle_error(self, *unused_args):
      pass  # a client that was killed

  with Server(('127.0.0.1', 0), Handler) as server:
    endpoint.url = f'http://127.0.0.1:{server.server_port}/v1'
    thread = threading.Thread(target=server.serve_forever, args=(.01,))
    thread.start()
    try:
      yield endpoint
    finally:
      server.shutdown()
      thread.join()
