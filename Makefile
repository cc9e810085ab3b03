# Thin: every line can be typed by hand. PYTHON is 3.11 or newer.
PYTHON ?= python3
WORKDIR ?= /tmp/dgr2_quickstart

.PHONY: quickstart test parity meshes clean

# Large pages for the heap (glibc) make training steps on CPUs faster; elsewhere
# the variable does nothing.
quickstart: .venv/installed
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 .venv/bin/python -m dgr2_jax.main \
	    --config=configs/quickstart.py --workdir=$(WORKDIR)

test: .venv/installed-test
	.venv/bin/python -m pytest

# Logits beside those of transformers, live; torch takes some gigabytes.
parity: .venv/installed-parity
	.venv/bin/python -m pytest tests/models/test_huggingface.py

# Every stage on every mesh of eight simulated devices, in one process and two.
meshes: .venv/installed-test
	DGR2_ALL_MESHES=1 .venv/bin/python -m pytest tests/training/test_meshes.py

.venv/installed: setup.py
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet --editable .
	touch $@

.venv/installed-test: .venv/installed
	.venv/bin/python -m pip install --quiet --editable '.[test]'
	touch $@

.venv/installed-parity: .venv/installed-test
	.venv/bin/python -m pip install --quiet --editable '.[test,parity]'
	touch $@

clean:
	rm -rf .venv
