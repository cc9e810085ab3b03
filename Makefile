# Thin: every line can be typed by hand. PYTHON is 3.11 or newer.
PYTHON ?= python3
WORKDIR ?= /tmp/dgr2_quickstart
ENV = .venv/bin/python

.PHONY: quickstart test clean

$(ENV): setup.py
	$(PYTHON) -m venv .venv
	$(ENV) -m pip install --quiet --upgrade pip
	$(ENV) -m pip install --quiet --editable '.[test]'
	touch $(ENV)

quickstart: $(ENV)
	$(ENV) -m dgr2_jax.main --config=configs/quickstart.py --workdir=$(WORKDIR)

test: $(ENV)
	$(ENV) -m pytest

clean:
	rm -rf .venv
