"""Tests of metrics.jsonl, the clock and the progress line."""

import json
import time

import pytest

from dgr2_jax.training import logging


def _lines(path):
  return [json.loads(line) for line in
          (path / 'metrics.jsonl').read_text().splitlines()]


def _write(path, stage, start, steps):
  writer = logging.MetricsWriter(path, stage, start)
  for step in steps:
    writer.write(step, {'train/loss': step / 10}, {'seconds': 1.23456})
  writer.close()


def test_lines_and_curves(tmp_path):
  _write(tmp_path, 'ar_sft', 0, [1, 2])
  assert _lines(tmp_path) == [
      {'stage': 'ar_sft', 'step': step, 'train/loss': step / 10,
       'timing': {'seconds': 1.235}} for step in (1, 2)]
  assert list((tmp_path / 'tensorboard' / 'ar_sft').iterdir())


def test_resuming_drops_only_this_stages_later_lines(tmp_path):
  _write(tmp_path, 'ar_sft', 0, [10, 20])
  _write(tmp_path, 'cft', 0, [10, 20])
  _write(tmp_path, 'cft', 10, [15])
  assert [(x['stage'], x['step']) for x in _lines(tmp_path)] == [
      ('ar_sft', 10), ('ar_sft', 20), ('cft', 10), ('cft', 15)]


@pytest.mark.parametrize('torn', [
    '{"stage": "cft", "st', '{"stage": "cft", "step": 7}', '17\n', '\n',
    '\udcff'])
def test_torn_lines_are_dropped(tmp_path, torn):
  _write(tmp_path, 'cft', 0, [10])
  with open(tmp_path / 'metrics.jsonl', 'ab') as f:
    f.write(torn.encode(errors='surrogateescape'))
  _write(tmp_path, 'cft', 10, [20])
  assert [x['step'] for x in _lines(tmp_path)] == [10, 20]


def test_not_finite_is_null(tmp_path):
  writer = logging.MetricsWriter(tmp_path, 'cft', 0)
  writer.write(1, {'a': float('nan'), 'b': float('inf'), 'c': 1}, {})
  writer.close()
  assert _lines(tmp_path) == [
      {'stage': 'cft', 'step': 1, 'a': None, 'b': None, 'c': 1.0, 'timing': {}}]


def test_clock_pauses(monkeypatch):
  now = [100.]
  monkeypatch.setattr(time, 'monotonic', lambda: now[0])
  clock = logging.Clock()
  now[0] += 2
  with clock.pause():
    now[0] += 50
  with pytest.raises(KeyError), clock.pause():
    now[0] += 50
    raise KeyError
  now[0] += 3
  assert clock.seconds() == 5


def test_progress(caplog):
  with caplog.at_level('INFO', 'absl'):
    logging.progress('cft', 120, 600, 20., 60, {'loss': 1.23456}, 400_000.)
  assert caplog.messages == [
      'cft 120/600 | loss 1.235 | 3 steps/s | 20.0k tokens/s | ETA 2m40s']


@pytest.mark.parametrize('seconds, text', [
    (0.2, '0s'), (59.4, '59s'), (59.6, '1m00s'), (155, '2m35s'),
    (3720, '1h02m'), (90000, '25h00m')])
def test_duration(seconds, text):
  assert logging.duration(seconds) == text
